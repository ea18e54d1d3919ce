"""DeepSpeed's JSON as a pure function of our config. It is an output, never an input."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from txl_dist.config.run_config import RunConfig
from txl_dist.errors import ConfigError


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


@contextmanager
def refusals_explained(extra: Mapping[str, Any]) -> Iterator[None]:
    """Turn what DeepSpeed raises over `deepspeed.extra` into a ConfigError that names the field.

    A RuntimeError is not about settings: torch raises it for memory, devices and the network.
    """
    try:
        yield
    except ValidationError as error:
        problems = [
            f"{_place(extra, found['loc'])} is {found['input']!r}: {found['msg']}"
            for found in error.errors(include_url=False)
        ]
        raise ConfigError(
            f"DeepSpeed refuses {'; '.join(problems)}. Correct or remove it"
        ) from None
    except Exception as error:
        if not extra or isinstance(error, RuntimeError):
            raise
        raise ConfigError(
            f"DeepSpeed refuses a setting among deepspeed.extra ({', '.join(extra)}): "
            f"{type(error).__name__}: {error}. Correct or remove it"
        ) from error


def _place(extra: Mapping[str, Any], location: Sequence[str | int]) -> str:
    """The full name of the setting at `location`, which counts from somewhere inside `extra`."""
    names = [str(part) for part in location]
    pending: list[tuple[str, Any]] = [("deepspeed.extra", extra)]
    while pending:
        name, section = pending.pop(0)
        if isinstance(section, Mapping):
            if names and names[0] in section:
                return ".".join([name, *names])
            pending += [(f"{name}.{key}", value) for key, value in section.items()]
    return ".".join(["deepspeed.extra", "...", *names])
