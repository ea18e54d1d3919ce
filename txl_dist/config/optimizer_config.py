"""The section `optimizer`: the update rule and the schedule of its learning rate."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from txl_dist.config.data_config import Section

SCRIPT_SCHEDULES = ("cosine", "inverse_sqrt", "constant")
"""Schedules that the training script of the paper also has."""
Role = Literal["hidden", "embedding", "head", "other"]
"""Of a parameter: weights of linear layers in layers; tables of the embedding and its projections;
weights and projections that only the softmax has; the rest, such as biases and norms."""
RECIPES: dict[str, dict[str, Any]] = {
    "paper": {},
    "modern": {
        "name": "muon",
        "lr": 8e-3,
        "schedule": "linear",
        "gradient_clipping": 0.0,
    },
}
"""Defaults of this section by the value of `model.recipe`, where they differ from the paper's."""


class OptimizerConfig(Section):
    """The optimizer and the schedule of its learning rate."""

    name: Literal["adamw", "adam", "lamb", "muon"] = "adamw"
    """`adamw`; `adam`: weight decay is part of the gradient; `lamb`: ZeRO stage 0 only; `muon`:
    orthogonalised momentum for hidden matrices, AdamW for the rest, ZeRO stages 0 to 2 only."""
    # Defaults are those of the paper's base models: Adam, lr 2.5e-4, clipping at 0.25.
    lr: float = Field(default=2.5e-4, gt=0)
    """Learning rate after the warm-up, the highest of the run. With AdamW small models learn faster
    with 1e-3 or more, and need a warm-up then."""
    lr_factors: dict[Role, Annotated[float, Field(ge=0)]] = Field(default={})
    """Multiplies the learning rate of parameters by their role: `hidden`, `embedding`, `head` or
    `other`. A role that is not named has 1. With 0 its weights stay as they are: they have no
    gradient and no optimizer state. A table that is tied with the softmax is `embedding`."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay per step of the running mean of gradients."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay per step of the running mean of squared gradients."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator of the update, so that it is never 0."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of the matrices of linear layers and projections; not of embeddings, cluster
    weights of the softmax, position biases, LayerNorms and biases. Decoupled from the gradient,
    except with `adam`."""
    gradient_clipping: float = Field(default=0.25, ge=0)
    """Largest global L2 norm of the gradient; 0 does not clip."""
    averaging: Literal["asgd"] | None = None
    """`asgd`: evaluation uses, and checkpoints also contain, the mean of all weights since
    `averaging_start_step`. null: no average."""
    averaging_start_step: int = Field(default=1, ge=1)
    """The average begins with the weights after this update; skipped steps do not count."""
    schedule: Literal["cosine", "inverse_sqrt", "constant", "linear", "wsd"] = "cosine"
    """Learning rate after the warm-up. `cosine`: half a period down to `min_lr`. `linear`: a line
    down to `min_lr`. `inverse_sqrt`: `lr` x sqrt(warm-up steps / step). `constant`: `lr`. `wsd`:
    `lr`, then in the last `decay_steps` a line down to `min_lr` (warm-up, stable, decay)."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps at the start in which the learning rate rises linearly from 0 to `lr`. With a high rate
    and a short warm-up a model learns nothing: with AdamW take 200 for rates from 1e-3 on."""
    decay_steps: int | None = Field(default=None, ge=1)
    """`wsd` only: steps at the end of the run in which the learning rate falls to `min_lr`."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate of the last step with `cosine`, `linear` and `wsd`."""
    schedule_of_paper_code: bool = False
    """Set the rate exactly as the training script of the paper does: update n has the rate of step
    n - 1, the first one the full `lr` even with a warm-up, the cosine spans all steps including the
    warm-up, and `inverse_sqrt` is `lr` / sqrt(step)."""

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        problems = []
        if self.schedule == "wsd" and self.decay_steps is None:
            problems.append(
                "schedule=wsd needs decay_steps, the steps at the end in which the rate falls; a "
                "fifth of the run is usual"
            )
        if self.schedule != "wsd" and self.decay_steps is not None:
            problems.append(
                f"decay_steps={self.decay_steps} has no effect with schedule={self.schedule}; "
                "remove it, or use schedule=wsd"
            )
        if self.schedule_of_paper_code and self.schedule not in SCRIPT_SCHEDULES:
            problems.append(
                f"schedule={self.schedule} is not in the paper's code, so "
                "schedule_of_paper_code=true has no meaning; use "
                f"{', '.join(SCRIPT_SCHEDULES)}, or remove it"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def problems_with(self, *, num_steps: int) -> Iterator[str]:
        """Messages about a schedule that does not fit into a run of `num_steps`."""
        warmup, decay = self.warmup_steps, self.decay_steps or 0
        if warmup > num_steps:
            yield (
                f"optimizer.warmup_steps={warmup} is longer than training.num_steps={num_steps}; "
                "lower it"
            )
        elif warmup + decay > num_steps:
            yield (
                f"optimizer.warmup_steps={warmup} and optimizer.decay_steps={decay} are together "
                f"longer than training.num_steps={num_steps}; lower one"
            )
        if self.min_lr > self.lr:
            yield f"optimizer.min_lr={self.min_lr} is above optimizer.lr={self.lr}; lower it"
        if self.averaging and self.averaging_start_step > num_steps:
            yield (
                f"optimizer.averaging_start_step={self.averaging_start_step} is after the end of "
                f"the run (training.num_steps={num_steps}), which would have no average; lower it"
            )

    def problems_at_stage(self, zero_stage: int) -> Iterator[str]:
        """A message if the optimizer cannot run at this ZeRO stage."""
        if self.name == "lamb" and zero_stage > 0:
            yield (
                f"optimizer.name=lamb at deepspeed.zero_stage={zero_stage} is not supported: LAMB "
                "needs the norms of whole parameters, and ZeRO gives a rank only parts of them. "
                "Use deepspeed.zero_stage=0, or another optimizer"
            )
        if self.name == "muon" and zero_stage > 2:
            yield (
                f"optimizer.name=muon at deepspeed.zero_stage={zero_stage} is not supported: Muon "
                "needs whole matrices, and stage 3 cuts every one of them. Use "
                "deepspeed.zero_stage=2, or another optimizer"
            )

    def rate_warnings(self, *, d_model: int) -> Iterator[str]:
        """A message if the rate is of the size that another optimizer needs.

        It then probably comes from a file for that one. Shipped configs have rates of 1.0 to 1.5 /
        d_model with Muon, and up to 0.26 / d_model with AdamW.
        """
        if self.name == "muon" and self.lr < 0.4 / max(d_model, 128):
            advice = "a rate of AdamW's size: Muon learns little with it. Its rate is about"
        elif self.name in ("adam", "adamw") and self.lr > 0.64 / min(d_model, 128):
            advice = f"a rate of Muon's size: with it, {self.name} often learns nothing. Take a"
            advice += " quarter of it, or optimizer.name=muon. Muon's rate is about"
        else:
            return
        yield (
            f"optimizer.lr={self.lr:g} with optimizer.name={self.name} and model.d_model={d_model} "
            f"is {advice} 1 / d_model. A rate that the file leaves out is that of model.recipe"
        )
