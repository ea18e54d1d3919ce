"""What an estimate assumes about machines. None of it is measured by `txl estimate`."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from txl_dist.estimate.communication import Links

Device = Literal["cuda", "cpu"]

PEAK_TFLOPS = {"bf16": 312.0, "fp32": 19.5}
"""By `precision`: one NVIDIA A100, from its data sheet (dense bf16; fp32 without TF32)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumptions:
    """One kind of machine, its network and its storage. A gigabyte is 1e9 bytes."""

    device: Device = "cuda"
    peak_tflops: float | None = None
    """Peak of one GPU; None: `PEAK_TFLOPS` of the run's precision."""
    utilisation: float = 0.3
    """Share of the peak that a step reaches while it computes: MFU without communication."""
    kernel_seconds: float = 8e-6
    """Time to launch one kernel. A small micro-batch takes this time for each of its kernels."""
    links: Links = field(default_factory=Links)
    storage_gbytes_per_second: float = 2.0
    """Rate at which all ranks together write checkpoints."""
    copy_gbytes_per_second: float = 10.0
    """Copy rate from a GPU to host memory; a save stops training for this copy."""
    node_mtbf_hours: float = 6000.0
    """Mean time between failures of one node. Llama 3 had 419 unexpected interruptions in 54 days
    on 2,048 nodes: 6,300 hours (arXiv:2407.21783, section 3.3.4)."""
    restart_seconds: float = 120.0
    """Time from a failure to the first step after it."""
    lanes_per_gpu: int | None = None
    """The batch grows with the GPUs; None: `data.num_lanes` is the same for all."""

    def peak_flops(self, precision: str) -> float:
        """FLOP/s of one GPU."""
        return (self.peak_tflops or PEAK_TFLOPS[precision]) * 1e12

    def to_json(self, precision: str) -> dict[str, Any]:
        """All assumptions, defaults resolved."""
        return asdict(self) | {"peak_tflops": self.peak_flops(precision) / 1e12}
