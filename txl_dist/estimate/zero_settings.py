"""The settings of DeepSpeed's ZeRO that memory and communication depend on.

Defaults are those of DeepSpeed 0.19.8 (deepspeed/runtime/zero/config.py), and ours for GPUs. Sizes
are numbers of elements, as DeepSpeed counts them.
"""

from dataclasses import dataclass
from typing import Self

from txl_dist.config.deepspeed_config import DeepSpeedConfig, refused_offload


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroSettings:
    """ZeRO of one run."""

    stage: int
    offload: str = "none"
    """As in `deepspeed.offload`."""
    overlap_comm: bool = False
    """Whether gradients are reduced while backward computes."""
    reduce_bucket_size: int = 500_000_000
    """Size of the buffer in which stages 1 to 3 reduce gradients, whatever the model's size."""
    allgather_bucket_size: int = 500_000_000
    """Stages 1 and 2: elements of one all-gather of updated weights."""
    prefetch_bucket_size: int = 50_000_000
    """Stage 3: elements of weights that are gathered before a layer needs them."""
    param_persistence_threshold: int = 100_000
    """Stage 3: smaller parameters stay whole on every rank."""
    max_live_parameters: int = 1_000_000_000
    """Stage 3: elements of weights that may be gathered at the same time."""

    @classmethod
    def of(
        cls, config: DeepSpeedConfig, *, num_ranks: int, on_gpu: bool, stage: int | None = None
    ) -> Self:
        """The settings of a config, with its defaults; `stage` replaces its stage.

        What cannot be offloaded at another stage stays on the device.
        """
        stage = config.zero_stage if stage is None else stage
        zero = config.reduction(stage=stage, num_ranks=num_ranks, on_gpu=on_gpu)
        sizes = {
            name: int(value)
            for name in (
                "reduce_bucket_size",
                "allgather_bucket_size",
                "prefetch_bucket_size",
                "param_persistence_threshold",
                "max_live_parameters",
            )
            if (value := zero.get(f"stage3_{name}", zero.get(name))) is not None
        }
        overlap = zero.get("overlap_comm")
        is_offloaded = not any(refused_offload(config.offload, zero_stage=stage))
        return cls(
            stage=stage,
            offload=config.offload if is_offloaded else "none",
            overlap_comm=stage == 3 if overlap is None else bool(overlap),
            **sizes,
        )
