"""Importing DeepSpeed for an engine has only the effects that the engine needs."""

import subprocess
import sys

import pytest
import torch

from tests.support.commands import ENVIRONMENT
from txl_dist.training.engine.initialise import _without_compiler

CODE = """
import sys
from txl_dist.training.engine import initialise

with initialise._without_mlflow(), initialise._without_compiler():
    import deepspeed
    import deepspeed.runtime.zero.muon.original_muon
print([name for name in ("mlflow", "torch._inductor.compile_fx") if name in sys.modules])
"""


@pytest.mark.slow
def test_it_imports_neither_mlflow_nor_the_compiler() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CODE], check=True, capture_output=True, text=True, env=ENVIRONMENT
    )
    assert ended.stdout.splitlines()[-1] == "[]"


def test_decorators_do_nothing_while_deepspeed_is_imported_and_compile_afterwards() -> None:
    original = torch.compile

    def function() -> int:
        return 7

    with _without_compiler():
        assert torch.compile(function) is function
        assert torch.compile(dynamic=True)(function) is function
    assert torch.compile is original
