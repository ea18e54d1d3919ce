"""The section `optimizer`: the update rule and the schedule of its learning rate."""

from typing import Literal

from pydantic import Field

from txl_dist.config.section import Section


class OptimizerConfig(Section):
    """AdamW and the schedule of its learning rate."""

    # Defaults are those of the paper's base models: Adam, lr 2.5e-4, clipping at 0.25.
    lr: float = Field(default=2.5e-4, gt=0)
    """Learning rate after the warm-up, the highest of the run."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay per step of the running mean of gradients."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay per step of the running mean of squared gradients."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator of the update, so that it is never 0."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay, of all parameters; 0 is Adam."""
    gradient_clipping: float = Field(default=0.25, ge=0)
    """Largest global L2 norm of the gradient; 0 does not clip."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Learning rate after the warm-up: half a cosine period down to `min_lr`, or constant `lr`."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps at the start in which the learning rate rises linearly from 0 to `lr`."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the end of the cosine, at step `training.num_steps`."""
