"""The collectives of one training step by ZeRO stage, and their time on rings and trees.

`scaling_limits.py` computes with it. It was compared with real steps on 2026-11-23
(docs/experiments.md).

With P parameters in fp32, N ranks and K micro-batches, DeepSpeed 0.19.8 runs per step:

    stage 0    all-reduce of 4 P bytes
    stage 1    all-reduce of 4 P, all-gather of 4 P
    stage 2    K all-reduces of 4 P, all-gather of 4 P
    stage 3    K (all-gather of the large parameters, reduce-scatter of 4 P), and after the update
               one all-gather for each parameter that stays whole

Stages 1 and 2 reduce each bucket by an all-reduce, not by a reduce-scatter as in the ZeRO paper.
With gloo, torch runs an all-reduce for each reduce-scatter too; the estimate is for NCCL. Stage 3
gathers twice per micro-batch if the weights exceed `stage3_max_live_parameters`. With
`overlap_comm`, gradients are reduced during backward (at stage 1 in that of the last micro-batch),
except those of the embedding, which backward computes last, and those of a bucket that is not full.

A ring moves 2 (N - 1) / N of the bytes through every link in an all-reduce, half of that in the
other two, in 2 (N - 1) or N - 1 messages one after the other. For short messages a tree is faster:
2 log2 N messages, each byte twice. The slowest link decides; between nodes it is the node's.

Sources: ZeRO, arXiv:1910.02054, section 7. Ring: Thakur, Rabenseifner and Gropp 2005, "Optimization
of Collective Communication Operations in MPICH", IJHPCA 19(1). Tree: Sanders, Speck and Traeff
2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan".
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from txl_dist.estimate.rank_bytes import FP32_BYTES, STAGE_0_BUCKET, ModelNeeds, ZeroSettings

CONTROL_MESSAGES = 2
"""All-reduces of a few numbers per step: loss sums and flags, and the gradient norm."""
BACKWARD_SHARE = 2 / 3
"""Fraction of the operations of forward and backward that are in backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """The network, as every rank sees it. A gigabit is 1e9 bits."""

    gpus_per_node: int = 8
    node_gbit: float = 200.0
    """Gbit/s of one node's links to other nodes, together."""
    intra_node_gbit: float = 2400.0
    """Gbit/s of one GPU's links within its node."""
    latency_seconds: float = 20e-6
    """Latency of one message between nodes."""
    intra_node_latency_seconds: float = 3e-6

    def bytes_per_second(self, num_ranks: int) -> float:
        """Bandwidth of the slowest link of a ring over all ranks."""
        gbit = self.intra_node_gbit
        if num_ranks > self.gpus_per_node:
            gbit = min(gbit, self.node_gbit)
        return gbit * 1e9 / 8

    def ring_latency_seconds(self, num_ranks: int) -> float:
        """Latency of a message that goes around the ring once, from the first rank to the last."""
        between = math.ceil(num_ranks / self.gpus_per_node) - 1
        within = num_ranks - 1 - between
        return between * self.latency_seconds + within * self.intra_node_latency_seconds

    def tree_latency_seconds(self, num_ranks: int) -> float:
        """Latency from the root of a tree over all ranks to its leaves."""
        num_nodes = math.ceil(num_ranks / self.gpus_per_node)
        within = math.log2(min(num_ranks, self.gpus_per_node))
        between = math.log2(num_nodes)
        return between * self.latency_seconds + within * self.intra_node_latency_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """Collectives of one kind in one step."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter"]
    num_bytes: float
    """Size of the whole tensors, summed over all messages."""
    num_messages: int = 1
    overlaps: float = 0.0
    """Share of the step's computation during which it may run; 0: all ranks wait for it."""

    def bytes_sent(self, num_ranks: int) -> float:
        """Bytes that each rank sends in a ring."""
        passes = 2 if self.kind == "all_reduce" else 1
        return passes * (num_ranks - 1) / num_ranks * self.num_bytes

    def seconds(self, num_ranks: int, links: Links) -> float:
        """Time until all messages have arrived, without waiting for slower ranks."""
        if num_ranks == 1:
            return 0.0
        bandwidth = links.bytes_per_second(num_ranks)
        passes = 2 if self.kind == "all_reduce" else 1
        latency = passes * links.ring_latency_seconds(num_ranks) * self.num_messages
        ring = latency + self.bytes_sent(num_ranks) / bandwidth
        if self.kind != "all_reduce":
            return ring
        latency = 2 * links.tree_latency_seconds(num_ranks) * self.num_messages
        return min(ring, latency + 2 * self.num_bytes / bandwidth)


def collectives_of_step(
    model: ModelNeeds, zero: ZeroSettings, *, num_micro_batches: int
) -> Iterator[Collective]:
    """What one step of DeepSpeed and of our own loop communicates."""
    yield Collective(kind="all_reduce", num_bytes=64, num_messages=CONTROL_MESSAGES)
    yield from _reductions(model, zero, num_micro_batches)
    if zero.stage == 3:
        yield from _gathers_of_stage_3(model, zero, num_micro_batches)
    elif zero.stage > 0:
        num_messages = math.ceil(model.num_parameters / max(1, zero.allgather_bucket_size))
        yield Collective(
            kind="all_gather",
            num_bytes=FP32_BYTES * model.num_parameters,
            num_messages=num_messages,
        )


def _reductions(model: ModelNeeds, zero: ZeroSettings, micro_batches: int) -> Iterator[Collective]:
    """Reductions of the gradients. Stages 0 and 1 reduce once, with the last micro-batch."""
    times = micro_batches if zero.stage >= 2 else 1
    bucket_size = zero.reduce_bucket_size if zero.stage else STAGE_0_BUCKET
    during = 0
    if zero.stage > 0 and zero.overlap_comm:
        # A bucket is reduced when it is full; the embedding's gradients are complete at the end.
        layers = (each for each in model.parameters if not each.name.startswith("table."))
        during = sum(each.num_elements for each in layers) // bucket_size * bucket_size
    share = BACKWARD_SHARE * times / micro_batches
    for num_elements, overlaps in ((during, share), (model.num_parameters - during, 0.0)):
        if num_elements:
            yield Collective(
                kind="reduce_scatter" if zero.stage == 3 else "all_reduce",
                num_bytes=FP32_BYTES * num_elements * times,
                num_messages=times * math.ceil(num_elements / bucket_size),
                overlaps=overlaps,
            )


def _gathers_of_stage_3(
    model: ModelNeeds, zero: ZeroSettings, micro_batches: int
) -> Iterator[Collective]:
    sizes = [parameter.num_elements for parameter in model.parameters]
    small = [size for size in sizes if size <= zero.param_persistence_threshold]
    large = sum(sizes) - sum(small)
    gathers = micro_batches * (1 if large <= zero.max_live_parameters else 2)
    if large:
        fetch_size = max(1, min(zero.prefetch_bucket_size, large))
        yield Collective(
            kind="all_gather",
            num_bytes=FP32_BYTES * large * gathers,
            num_messages=gathers * math.ceil(large / fetch_size),
            overlaps=1.0,
        )
    if small:
        yield Collective(
            kind="all_gather", num_bytes=FP32_BYTES * sum(small), num_messages=len(small)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one step."""

    compute: float
    communication: float
    """Time of all collectives if nothing overlapped."""
    exposed: float
    """The part of `communication` that does not overlap with computation."""

    @property
    def total(self) -> float:
        return self.compute + self.exposed


def step_time(
    collectives: list[Collective], *, compute_seconds: float, num_ranks: int, links: Links
) -> StepTime:
    """Compute time plus the communication time that is not hidden by overlap.

    Overlapped collectives share the time of the compute; it does not become slower by them.
    """
    seconds = [(each.overlaps, each.seconds(num_ranks, links)) for each in collectives]

    def excess(share: float) -> float:
        """Excess time of the collectives that may overlap with at most this share of compute."""
        return sum(time for other, time in seconds if other <= share) - share * compute_seconds

    return StepTime(
        compute=compute_seconds,
        communication=sum(time for _, time in seconds),
        exposed=max(0.0, *(excess(share) for share, _ in seconds)),
    )
