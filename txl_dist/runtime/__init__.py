"""The runtime of a process: ranks and collectives, precision, memory allocation, code identity.

Only `device.py` and `world.py` import torch at the top.
"""
