"""The section `deepspeed`: the ZeRO stage, and options that are passed to DeepSpeed."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from txl_dist.config.deepspeed_keys import refused_keys, refused_offload
from txl_dist.config.section import Section


class DeepSpeedConfig(Section):
    """The ZeRO stage, and DeepSpeed options that no setting of ours decides."""

    zero_stage: Literal[0, 1, 2, 3] = 1
    """What ranks shard: 0 nothing, 1 the optimizer state, 2 also gradients, 3 also parameters."""
    extra: dict[str, Any] = Field(default={})
    """Merged into DeepSpeed's JSON. `deepspeed_keys.py` decides which keys are refused."""

    @model_validator(mode="after")
    def _reject_owned_keys(self) -> Self:
        problems = list(refused_keys(self.extra))
        if isinstance(self.extra.get("zero_optimization", {}), dict):
            problems += refused_offload(self.extra, zero_stage=self.zero_stage)
        if problems:
            raise ValueError("\n".join(problems))
        return self
