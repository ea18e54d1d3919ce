"""The runtime of a process: ranks and collectives, precision, memory allocation, code identity.

Only `determinism.py`, `precision.py`, `threads.py` and `world.py` import torch at the top.
"""
