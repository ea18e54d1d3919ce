"""Weights from other programs, and models to give to others.

original.py (.npz), transformers.py (directory) -> names and values of the original's tensors
architecture.py: their config -> ModelConfig    -> tensors.py: checked -> TransformerXL
single_file.py:  TransformerXL <-> model.safetensors + config.json (txl export, txl import)
formats.py: recognises the format of a path     stored_model.py: checkpoint or export, for
                                                evaluation and generation
"""
