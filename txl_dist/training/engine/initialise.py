"""`deepspeed.initialize`, with the side effects of importing and starting DeepSpeed kept small."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.training.engine.settings import explain_refusals


def initialise_deepspeed(
    model: TransformerXL,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    *,
    extra: Mapping[str, Any],
    device: torch.device,
) -> Any:
    """A DeepSpeed engine. Raises ConfigError if DeepSpeed refuses a key of `extra`."""
    # For DeepSpeed the number of the GPU, also where a launcher makes only one visible to a rank.
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with explain_refusals(extra):
        with _without_mlflow(), _without_compiler():
            import deepspeed

            # Imported by `deepspeed.initialize` otherwise.
            import deepspeed.runtime.zero.muon.original_muon

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # At stage 3 DeepSpeed calls deprecated collectives, several times per step.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        # No op of DeepSpeed is used here. To list those that could be compiled it runs a compiler,
        # and it would compile the one for shared memory at every start.
        deepspeed.ops.__compatible_ops__ = {}
        deepspeed.init_distributed(verbose=False)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine


@contextmanager
def _without_mlflow() -> Iterator[None]:
    """Prevent DeepSpeed's autotuner, not used here, from importing MLflow, which takes 2 s."""
    if "mlflow" in sys.modules:
        yield
        return
    sys.modules["mlflow"] = None  # type: ignore[assignment]  # import raises ModuleNotFoundError
    try:
        yield
    finally:
        del sys.modules["mlflow"]


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Make `torch.compile` do nothing, for decorators that are applied on import.

    DeepSpeed decorates the functions of an optimizer that is not used here (Muon). Only to create
    the decorator, torch imports its compiler, which takes a third of the time to create an engine.
    """
    original = torch.compile
    torch.compile = _uncompiled  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = original


def _uncompiled(function: Any = None, **_: Any) -> Any:
    return _uncompiled if function is None else function
