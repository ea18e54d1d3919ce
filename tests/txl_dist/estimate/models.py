"""Small runs and models for the tests of estimates."""

from typing import Any

from txl_dist.config.run_config import RunConfig
from txl_dist.estimate.rank_bytes import ActivationPeaks, ModelNeeds, Parameter

MODEL = {
    "vocab_size": 1000, "n_layer": 3, "d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 256,
    "mem_len": 32,
}  # fmt: skip
BUCKET_SIZE = 300_000
"""Elements. DeepSpeed's default of 2 GB would hide every error of such models."""


def run_config(
    *, zero_stage: int = 1, num_lanes: int = 4, tgt_len: int = 32, zero: Any = None, **options: Any
) -> RunConfig:
    """`options` are sections; `model` and `training` are merged into the defaults."""
    return RunConfig.model_validate(
        {
            "directory": "run",
            "data": {"path": "data", "num_lanes": num_lanes, "tgt_len": tgt_len},
            "deepspeed": {
                "zero_stage": zero_stage,
                "extra": {"zero_optimization": {"reduce_bucket_size": BUCKET_SIZE, **(zero or {})}},
            },
            "model": MODEL | options.pop("model", {}),
            "training": {"num_steps": 10} | options.pop("training", {}),
            **options,
        }
    )


def model_of(*sizes: int, frozen: tuple[int, ...] = (), activations: int = 0) -> ModelNeeds:
    """A model with trained parameters of these sizes and Adam's two states, and frozen ones."""
    trained = (
        Parameter(name=f"layers.{number}.weight", num_elements=size, num_states=2)
        for number, size in enumerate(sizes)
    )
    others = (
        Parameter(name=f"frozen.{number}", num_elements=size, num_states=0, is_trained=False)
        for number, size in enumerate(frozen)
    )
    return ModelNeeds(
        parameters=(*trained, *others),
        activations=ActivationPeaks(
            after_forward=activations,
            before_gradients=activations,
            with_gradients=activations,
            without_gradients=activations,
            after_first_bucket=0,
        ),
    )
