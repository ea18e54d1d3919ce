"""Changes of DeepSpeed's behaviour, all for version 0.19.8, which is pinned: check them again with
another one.

Each has a reason. What is only read of its private attributes is in stages.py.
"""

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def import_deepspeed() -> Any:
    """The module, imported without MLflow and torch's compiler, silent, and without its own ops."""
    with without_mlflow(), without_compiler():
        import deepspeed

        # Imported by `deepspeed.initialize` otherwise.
        import deepspeed.runtime.zero.muon.original_muon

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # At stage 3 DeepSpeed calls deprecated collectives, several times per step.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # No op of DeepSpeed is used here. To list those that could be compiled it runs a compiler, and
    # it would compile the one for shared memory at every start.
    deepspeed.ops.__compatible_ops__ = {}
    return deepspeed


@contextmanager
def without_mlflow() -> Iterator[None]:
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
def without_compiler() -> Iterator[None]:
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


def reduce_no_gradients(engine: Any) -> None:
    """Let stage 0 leave the gradients where they are, if there is one rank.

    DeepSpeed would flatten all of them, multiply them by 1 and copy them back.
    """
    engine.enable_backward_allreduce = False


@contextmanager
def norm_checked_by(zero: Any, method: str, check: Callable[[Any], Any]) -> Iterator[None]:
    """Within `engine.step()`, let `check` replace what `method` returns, the norm of the gradients.

    DeepSpeed discards a step with an infinite norm, but asks nobody else whether to update the
    weights (docs/decisions/0018).
    """
    norm_of_gradients = getattr(zero, method)
    setattr(zero, method, lambda: check(norm_of_gradients()))
    try:
        yield
    finally:
        delattr(zero, method)  # the method of the class becomes visible again


def link_optimizer_states(zero: Any) -> None:
    """Link each parameter to its slice of the optimizer's state, at stages 1 and 2.

    DeepSpeed does it in the first step, which is too late to load a checkpoint.
    """
    zero._hp_optimizer_states_linked = False
    zero._lazy_init_hp_params_optimizer_state()
