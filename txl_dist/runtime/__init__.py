"""The runtime of a process: ranks and collectives, precision, memory allocation, code identity.

Only `world.py` and `precision.py` import torch.
"""
