"""DeepSpeed's JSON as a pure function of our config. It is an output, never an input."""

from typing import Any

from txl_dist.config import RunConfig
from txl_dist.errors import ConfigError

_OURS = {
    "optimizer": "optimizer",
    "scheduler": "optimizer.schedule",
    "gradient_clipping": "optimizer.gradient_clipping",
    "train_batch_size": "data.num_lanes",
    "train_micro_batch_size_per_gpu": "training.micro_batch_lanes",
    "gradient_accumulation_steps": "training.micro_batch_lanes",
    "managed_gradient_accumulation": "training.micro_batch_lanes",
    "gradient_allreduce_op": "data.num_lanes",
    "fp16": "precision",
    "bf16": "precision",
    "bfloat16": "precision",  # DeepSpeed still reads the old name
    "data_types": "precision",
    "torch_autocast": "precision",
    "checkpoint": "training",
}


def deepspeed_settings(
    config: RunConfig, *, num_ranks: int, num_micro_batches: int, micro_batch_rows: int
) -> dict[str, Any]:
    """The dict for `deepspeed.initialize`; ConfigError if `deepspeed.extra` contradicts us."""
    extra = dict(config.deepspeed.extra)
    for key in extra:
        if key in _OURS:
            raise ConfigError(
                f"deepspeed.extra.{key} would contradict {_OURS[key]}, which decides it; "
                f"remove it and set {_OURS[key]}"
            )
    zero = dict(extra.pop("zero_optimization", {}))
    if "stage" in zero:
        raise ConfigError(
            "deepspeed.extra.zero_optimization.stage would contradict deepspeed.zero_stage; "
            "remove it"
        )
    return {
        "train_micro_batch_size_per_gpu": micro_batch_rows,
        "gradient_accumulation_steps": num_micro_batches,
        "train_batch_size": micro_batch_rows * num_micro_batches * num_ranks,
        # Always written: DeepSpeed clips at 1.0 where the config says nothing.
        "gradient_clipping": config.optimizer.gradient_clipping,
        "zero_optimization": {"stage": config.deepspeed.zero_stage, **zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
        **extra,
    }
