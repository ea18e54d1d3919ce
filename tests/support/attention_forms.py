"""The forms of attention as parameters of tests: those that need triton run slowly on CPUs."""

import pytest

from txl_dist.model.variants import ATTENTION_FORMS

TORCH_FORMS = [name for name, form in ATTENTION_FORMS.items() if not form.needs_triton]
SLOW_IN_TRITON = [
    pytest.param(name, marks=pytest.mark.slow if form.needs_triton else ())
    for name, form in ATTENTION_FORMS.items()
]
