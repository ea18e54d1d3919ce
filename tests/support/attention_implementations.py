"""The implementations of attention as parameters of tests; those for triton are slow on CPUs."""

import pytest

from txl_dist.model.choices import ATTENTION_IMPLEMENTATIONS

TORCH_IMPLEMENTATIONS = [
    name
    for name, implementation in ATTENTION_IMPLEMENTATIONS.items()
    if not implementation.needs_triton
]
SLOW_IN_TRITON = [
    pytest.param(name, marks=pytest.mark.slow if implementation.needs_triton else ())
    for name, implementation in ATTENTION_IMPLEMENTATIONS.items()
]
