"""The section `deepspeed`: the ZeRO stage, and options that are passed to DeepSpeed."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from txl_dist.config.deepspeed_keys import refused_keys, refused_offload
from txl_dist.config.section import Section


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
