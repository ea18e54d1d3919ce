"""The section `deepspeed`: the ZeRO stage, and which keys of DeepSpeed's JSON may be set.

DeepSpeed ignores top-level keys that it does not know, so a typo would be silent. Other settings
decide the value of most keys, and some change the numbers: `extra` takes only those that do not.
"""

from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from txl_dist.config.data_config import Section

GPU_BUCKET_SIZE = 25_000_000
"""Elements of a reduction on GPUs (100 MB). DeepSpeed's default of 500 million is more than most of
our models have, so nothing would be reduced before the end of backward, and takes 2 GB."""
REFUSED_ZERO_KEYS = {
    "stage": "deepspeed.zero_stage decides it",
    "offload_optimizer": "deepspeed.offload decides it",
    "offload_param": "deepspeed.offload decides it",
    "round_robin_gradients": "DeepSpeed 0.19.8 then mixes up which part of the optimizer state "
    "belongs to which parameter, so checkpoints would be wrong",
    "zenflow": "it has another optimizer state, which checkpoints do not contain",
}
"""Keys of `zero_optimization` that are refused, and why."""

ExtraKey = Literal[
    "zero_optimization",
    "communication_data_type",
    "comms_logger",
    "flops_profiler",
    "memory_breakdown",
    "wall_clock_breakdown",
]


class DeepSpeedConfig(Section):
    """The ZeRO stage, and DeepSpeed options that no setting of ours decides."""

    zero_stage: Literal[0, 1, 2, 3] = 1
    """What ranks shard: 0 nothing, 1 the optimizer state, 2 also gradients, 3 also parameters."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """What is kept on the host: optimizer state (stages 1-3), or also parameters (stage 3)."""
    extra: dict[ExtraKey, Any] = Field(default={})
    """Merged into DeepSpeed's JSON: `zero_optimization` without what `zero_stage` and `offload`
    decide, `communication_data_type`, and reports such as `comms_logger`."""

    @field_validator("extra")
    @classmethod
    def _reject_owned_keys(cls, extra: dict[ExtraKey, Any]) -> dict[ExtraKey, Any]:
        zero = extra.get("zero_optimization", {})
        if not isinstance(zero, dict):
            raise ValueError(f"zero_optimization={zero!r} must be a mapping")
        if problems := [
            f"zero_optimization.{key} is not supported: {reason}; remove it"
            for key, reason in REFUSED_ZERO_KEYS.items()
            if key in zero
        ]:
            raise ValueError("\n".join(problems))
        return extra

    @model_validator(mode="after")
    def _reject_ignored_offload(self) -> Self:
        for problem in refused_offload(self.offload, zero_stage=self.zero_stage):
            raise ValueError(problem)
        return self

    def reduction(self, *, stage: int, num_ranks: int, on_gpu: bool) -> dict[str, Any]:
        """`extra.zero_optimization`, with our defaults for GPUs (docs/decisions/0039)."""
        defaults: dict[str, Any] = {}
        if on_gpu and stage > 0:
            # Not at stage 2: DeepSpeed 0.19.8 frees a gradient that is larger than the bucket while
            # its other stream still reduces it (average_tensor in stage_1_and_2.py).
            overlaps = num_ranks > 1 and stage != 2
            defaults = {"overlap_comm": overlaps, "reduce_bucket_size": GPU_BUCKET_SIZE}
        return {**defaults, **self.extra.get("zero_optimization", {})}


def refused_offload(offload: str, *, zero_stage: int) -> Iterator[str]:
    """A message if DeepSpeed would ignore `deepspeed.offload` at this stage."""
    if offload == "optimizer" and zero_stage == 0:
        yield (
            "offload=optimizer at zero_stage=0 would be ignored: there is no partition to move. "
            "Use zero_stage 1, 2 or 3"
        )
    if offload == "parameters" and zero_stage < 3:
        yield (
            f"offload=parameters at zero_stage={zero_stage} would be ignored: DeepSpeed moves "
            "parameters at stage 3 only. Use zero_stage=3, or offload=optimizer"
        )
