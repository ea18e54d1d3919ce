"""The section `deepspeed`: the ZeRO stage, and options that are passed to DeepSpeed."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from txl_dist.config.deepspeed_keys import refused_keys, refused_offload
from txl_dist.config.section import Section

GPU_REDUCTION = {"overlap_comm": True, "reduce_bucket_size": 25_000_000}
"""Defaults of `extra.zero_optimization` at stages 1 to 3 on GPUs: gradients are reduced during
backward, 25 million elements (100 MB) at a time. DeepSpeed waits for 500 million, more than most of
our models have, and allocates 2 GB for them."""


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

    def reduction(self, *, stage: int, on_gpu: bool) -> dict[str, Any]:
        """`extra.zero_optimization`, with our defaults for GPUs."""
        defaults = GPU_REDUCTION if on_gpu and stage > 0 else {}
        return {**defaults, **self.extra.get("zero_optimization", {})}
