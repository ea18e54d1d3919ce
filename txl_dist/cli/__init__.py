"""The `txl` command line, one module per group of commands.

`txl --help` must stay under 0.3 s, so modules import torch, pydantic and the like inside functions.
"""
