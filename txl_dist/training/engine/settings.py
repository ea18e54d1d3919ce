"""DeepSpeed's JSON configuration as a pure function of ours, and `deepspeed.initialize`.

DeepSpeed's configuration is never an input.
"""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from txl_dist.config.run_config import RunConfig
from txl_dist.errors import ConfigError
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.training.engine.deepspeed_patches import import_deepspeed


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
            **_offload(config.deepspeed.offload, on_gpu=on_gpu),
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


def _offload(offload: str, *, on_gpu: bool) -> dict[str, Any]:
    """The sections of `zero_optimization` that keep tensors on the host."""
    host = {"device": "cpu", "pin_memory": on_gpu}
    sections = {
        "none": (),
        "optimizer": ("offload_optimizer",),
        "parameters": ("offload_optimizer", "offload_param"),
    }
    return {section: dict(host) for section in sections[offload]}


@contextmanager
def explain_refusals(extra: Collection[str]) -> Iterator[None]:
    """Turn DeepSpeed's exceptions about `deepspeed.extra` into a ConfigError. `extra`: its keys.

    RuntimeError passes unchanged: torch raises it for memory, devices and the network.
    """
    try:
        yield
    except Exception as error:
        if not extra or isinstance(error, RuntimeError):
            raise
        raise ConfigError(
            f"DeepSpeed refuses a setting among deepspeed.extra ({', '.join(extra)}): "
            f"{type(error).__name__}: {error}. Correct or remove it"
        ) from error


def initialise_deepspeed(
    model: TransformerXL,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    *,
    extra: Collection[str],
    device: torch.device,
) -> Any:
    """A DeepSpeed engine. Raises ConfigError if DeepSpeed refuses a key of `deepspeed.extra`."""
    # For DeepSpeed the number of the GPU, also where a launcher makes only one visible to a rank.
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with explain_refusals(extra):
        deepspeed = import_deepspeed()
        deepspeed.init_distributed(verbose=False)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine
