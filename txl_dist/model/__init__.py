"""The model alone: imports torch and its own config; can be read, tested and exported by itself.

Nothing is exported here, so that the config can be imported without torch.
"""
