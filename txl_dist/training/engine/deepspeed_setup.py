"""DeepSpeed's JSON configuration from ours, `deepspeed.initialize`, and changes of its behaviour.

DeepSpeed's configuration is never an input.

The changes are for version 0.19.8, which is pinned: check them again with another one. Each has a
reason. stages.py has those of single stages, and what is only read of its private attributes.
"""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from txl_dist.config.run_config import RunConfig
from txl_dist.errors import ConfigError
from txl_dist.model.transformer_xl import TransformerXL

OFFLOADED = {
    "none": (),
    "optimizer": ("offload_optimizer",),
    "parameters": ("offload_optimizer", "offload_param"),
}
"""The sections of `zero_optimization` that keep tensors on the host, by `deepspeed.offload`."""


def deepspeed_settings(
    config: RunConfig,
    *,
    num_ranks: int,
    num_micro_batches: int,
    micro_batch_rows: int,
    on_gpu: bool,
) -> dict[str, Any]:
    """The dict for `deepspeed.initialize`."""
    stage = config.deepspeed.computed_stage(num_ranks=num_ranks, on_gpu=on_gpu)
    clips_itself = stage == 0 and num_ranks == 1  # Stage0Engine knows the norm
    # Validated in config/training_config.py. `reduction` has `zero_optimization`.
    extra: dict[str, Any] = {
        name: value for name, value in config.deepspeed.extra.items() if name != "zero_optimization"
    }
    return {
        "train_micro_batch_size_per_gpu": micro_batch_rows,
        "gradient_accumulation_steps": num_micro_batches,
        "train_batch_size": micro_batch_rows * num_micro_batches * num_ranks,
        # Always set: DeepSpeed's default is to clip at 1.0.
        "gradient_clipping": 0.0 if clips_itself else config.optimizer.gradient_clipping,
        "zero_optimization": {
            "stage": stage,
            **{
                section: {"device": "cpu", "pin_memory": on_gpu}
                for section in OFFLOADED[config.deepspeed.offload]
            },
            **config.deepspeed.reduction(stage=stage, num_ranks=num_ranks, on_gpu=on_gpu),
        },
        # Set here because DeepSpeed disables an autocast context around its engine. Gradients of
        # modules listed as safe would be reduced in bf16, so the list is empty.
        "torch_autocast": {
            "enabled": config.precision == "bf16",
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],
        },
        "zero_allow_untested_optimizer": True,
        # DeepSpeed's own AdamW for offloaded states compiles for about a minute.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,  # never: training has its own step line
        "wall_clock_breakdown": False,
        # Its throughput timer waits for the GPU before every micro-batch and after each step.
        "timers": {"throughput": {"enabled": False}},
        **extra,
    }


def initialise_deepspeed(
    model: TransformerXL,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    *,
    extra: Collection[str],
    device: torch.device,
) -> Any:
    """Create the engine. Raises ConfigError if DeepSpeed refuses one of the keys `extra`."""
    # For DeepSpeed the number of the GPU, also where a launcher makes only one visible to a rank.
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed = import_deepspeed()
    deepspeed.init_distributed(verbose=False)
    try:
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    except Exception as error:
        # A RuntimeError is torch's, about memory, devices or the network.
        if not extra or isinstance(error, RuntimeError):
            raise
        raise ConfigError(
            f"DeepSpeed refuses a setting among deepspeed.extra ({', '.join(extra)}): "
            f"{type(error).__name__}: {error}. Correct or remove it"
        ) from error
    if engine.zero_optimization_stage() == 3:
        limit_linear_of_stage_3()
    return engine


# --- changes of DeepSpeed's behaviour -------------------------------------------------------------


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


def limit_linear_of_stage_3() -> None:
    """Use DeepSpeed's linear function for partitioned weights that are trained, and for no others.

    Stage 3 replaces torch's for the whole process, by one that keeps no gathered weights for the
    backward pass. In bf16 it rounds before it adds the bias, so without this a score would depend
    on the process that computes it, as would other models of the process.
    """
    from deepspeed.runtime.zero.linear import zero3_linear_wrap
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses

    linear_of_torch = InsertPostInitMethodToModuleSubClasses.linear_bk

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        is_trained = torch.is_grad_enabled() and hasattr(weight, "ds_id")
        chosen = zero3_linear_wrap if is_trained else linear_of_torch
        output: Tensor = chosen(input, weight, bias)
        return output

    torch.nn.functional.linear = linear


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
