"""DeepSpeed's JSON as a pure function of our config. It is an output, never an input."""

from typing import Any

from txl_dist.config import RunConfig


def deepspeed_settings(
    config: RunConfig, *, num_ranks: int, num_micro_batches: int, micro_batch_rows: int
) -> dict[str, Any]:
    """The dict for `deepspeed.initialize`."""
    extra = dict(config.deepspeed.extra)  # checked with the config
    zero = extra.pop("zero_optimization", {})
    return {
        "train_micro_batch_size_per_gpu": micro_batch_rows,
        "gradient_accumulation_steps": num_micro_batches,
        "train_batch_size": micro_batch_rows * num_micro_batches * num_ranks,
        # Always written: DeepSpeed clips at 1.0 where the config says nothing.
        "gradient_clipping": config.optimizer.gradient_clipping,
        "zero_optimization": {"stage": config.deepspeed.zero_stage, **zero},
        # DeepSpeed switches off an autocast around its engine. No module is listed as safe for
        # lower precision, or its gradients would travel in bf16.
        "torch_autocast": {
            "enabled": config.precision == "bf16",
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
        **extra,
    }
