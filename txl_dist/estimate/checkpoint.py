"""Checkpoints of a run: their size and time, how often to save, and the goodput with failures.

With P parameters, O elements of optimizer state and the memory of all lanes, a checkpoint holds
4 P + 4 O bytes and the memory in fp32, whatever the number of ranks; every rank copies and writes
an equal part. Training waits for the copy to the host only. The files are written in the
background, and the next save waits for them.

Sources: J. W. Young 1974, "A first order approximation to the optimum checkpoint interval", CACM
17(9); J. T. Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart
dumps", FGCS 22(3), equations 20 (wall time) and 37 (interval).
"""

import math
from dataclasses import dataclass

from txl_dist.estimate.memory import FP32_BYTES, ModelNeeds

# Bytes of the JSON entries of a manifest without their numbers and names, as `manifest_bytes`
# indents them.
SLICE_BYTES = 55
PARAMETER_BYTES = 70
FILE_BYTES = 141
LANE_BYTES = 4
HEADER_BYTES = 6_000
"""Settings, state and digests, about; they do not grow with the ranks."""
FILES_PER_RANK = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSize:
    """One checkpoint."""

    num_bytes: int
    bytes_per_rank: int
    """Copied to the memory of the host and written, by the rank with most lanes."""
    num_files: int
    num_slices: int
    """Entries of the manifest: parts of parameters."""
    manifest_bytes: int
    """Written and read by rank 0 alone."""


def checkpoint_size(
    model: ModelNeeds,
    *,
    zero_stage: int,
    num_ranks: int,
    num_lanes: int,
    memory_elements_per_lane: int,
) -> CheckpointSize:
    """Size of a checkpoint. Raises nothing; `num_lanes` is at least `num_ranks`."""
    model_bytes = FP32_BYTES * (model.num_parameters + model.num_states)
    lane_bytes = FP32_BYTES * memory_elements_per_lane
    lanes_per_rank = math.ceil(num_lanes / num_ranks)
    slices = _num_slices(model, zero_stage=zero_stage, num_ranks=num_ranks)
    return CheckpointSize(
        num_bytes=model_bytes + lane_bytes * num_lanes,
        bytes_per_rank=math.ceil(model_bytes / num_ranks) + lane_bytes * lanes_per_rank,
        num_files=FILES_PER_RANK * num_ranks + 2,
        num_slices=slices,
        manifest_bytes=_manifest_bytes(model, slices, num_ranks=num_ranks, num_lanes=num_lanes),
    )


def _num_slices(model: ModelNeeds, *, zero_stage: int, num_ranks: int) -> int:
    if zero_stage in (1, 2):  # one cut between two ranks, in each of the flat groups
        return len(model.parameters) + num_ranks - 1
    # Every parameter is cut into a part for every rank.
    return sum(min(num_ranks, parameter.num_elements) for parameter in model.parameters)


def _manifest_bytes(model: ModelNeeds, slices: int, *, num_ranks: int, num_lanes: int) -> int:
    rank_digits = len(str(num_ranks - 1))
    mean_elements = model.num_parameters / len(model.parameters)
    offset_digits = len(str(int(mean_elements / 2)))
    names = sum(len(parameter.name) for parameter in model.parameters)
    return (
        HEADER_BYTES
        + slices * (SLICE_BYTES + rank_digits + 2 * offset_digits)
        + len(model.parameters) * PARAMETER_BYTES
        + names
        + num_ranks * FILES_PER_RANK * FILE_BYTES
        + num_lanes * (LANE_BYTES + rank_digits)
    )


def best_interval_seconds(*, save_seconds: float, mtbf_seconds: float) -> float:
    """Seconds of training between two saves that lose least time (Daly, equation 37).

    `save_seconds`: for which one save stops training; `mtbf_seconds`: mean time between failures
    of the whole run. Young's sqrt(2 save mtbf) is its first term.
    """
    if save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = math.sqrt(save_seconds / (2 * mtbf_seconds))
    first = math.sqrt(2 * save_seconds * mtbf_seconds)
    return first * (1 + ratio / 3 + ratio**2 / 9) - save_seconds


def goodput(
    *, interval_seconds: float, save_seconds: float, restart_seconds: float, mtbf_seconds: float
) -> float:
    """Share of the wall time that is progress, with failures at random (Daly, equation 20)."""
    wall = (
        mtbf_seconds
        * math.exp(min(700.0, restart_seconds / mtbf_seconds))
        * math.expm1(min(700.0, (interval_seconds + save_seconds) / mtbf_seconds))
    )
    return interval_seconds / wall
