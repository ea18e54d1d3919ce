"""The section `deepspeed`: the ZeRO stage, and options that are passed to DeepSpeed."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from txl_dist.config.deepspeed_keys import refused_keys, refused_offload
from txl_dist.config.section import Section

GPU_BUCKET_SIZE = 25_000_000
"""Elements of a reduction on GPUs (100 MB). DeepSpeed's default of 500 million is more than most of
our models have, so nothing would be reduced before the end of backward, and takes 2 GB."""


class DeepSpeedConfig(Section):
    """The ZeRO stage, and DeepSpeed options that no setting of ours decides."""

    zero_stage: Literal[0, 1, 2, 3] = 1
    """What ranks shard: 0 nothing, 1 the optimizer state, 2 also gradients, 3 also parameters."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """What is kept on the host: optimizer state (stages 1-3), or also parameters (stage 3)."""
    extra: dict[str, Any] = Field(default={})
    """Merged into DeepSpeed's JSON. `deepspeed_keys.py` decides which keys are refused."""

    @model_validator(mode="after")
    def _reject_owned_keys(self) -> Self:
        problems = [
            *refused_keys(self.extra),
            *refused_offload(self.offload, zero_stage=self.zero_stage),
        ]
        if problems:
            raise ValueError("\n".join(problems))
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
