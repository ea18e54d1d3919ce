"""One training step: a segment of every lane through the model, in micro-batches over lanes.

Gradients are accumulated over lanes, never over time, and each micro-batch has its own memory rows.
The loss is the sum of nats divided by the global number of targets, which is known before the first
micro-batch. So the result does not depend on the number of ranks or the size of micro-batches,
except for the order of floating-point sums.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from data_pipeline.streams.segments import Segment
from txl_dist.errors import DivergedError
from txl_dist.evaluation.loss_sums import LossSums
from txl_dist.runtime.fault_injection import fault_point
from txl_dist.runtime.world import World
from txl_dist.training.engine import Engine
from txl_dist.training.lane_dropout import LaneDropoutMasks

# Shapes: R rows of a micro-batch, T segment tokens, M memory tokens, D d_model, L layers,
# V vocabulary

NO_LANE = -1
"""Marks padding rows: all ranks compute as many rows as the rank with the most lanes."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of one step over all ranks; equal on every rank."""

    sums: LossSums
    gradient_norm: float
    memory_valid: float
    """Share of the memory tokens of all lanes that the segment's first tokens may attend to."""
    raised: frozenset[str]
    """Flags that are true on at least one rank."""


class TrainStep:
    """Computes steps on this rank's lanes and keeps their memory between steps."""

    def __init__(
        self, engine: Engine, world: World, *, lanes: Sequence[int], micro_batch_rows: int,
        num_micro_batches: int, seed: int, byte_counts_V: Tensor,
    ) -> None:  # fmt: skip
        self.engine, self.world, self.seed, self.lanes = engine, world, seed, lanes
        self.micro_batch_rows = micro_batch_rows
        num_rows = micro_batch_rows * num_micro_batches
        # Padding rows are last, so row i is lanes[i] for all rows with a lane.
        self.lane_of_row = [*lanes, *[NO_LANE] * (num_rows - len(lanes))]
        self.byte_counts_V = byte_counts_V.to(world.device)
        self.memories = [
            engine.model.empty_memory(micro_batch_rows) for _ in range(num_micro_batches)
        ]

    def __call__(
        self, segment: Segment, *, step: int, num_targets: int, lr: float,
        flags: Mapping[str, bool] = MappingProxyType({}),
    ) -> StepResult:  # fmt: skip
        """Step number `step` (from 1). `num_targets` counts the targets of all ranks' lanes.

        `flags` are local to the rank, with the same names on all ranks: the ranks agree on them in
        the collective of the step, so that they act on them after the same step.

        Raises DivergedError on every rank before the optimizer step if a loss is not finite.
        """
        self.world.activity.name = f"step {step}"
        fault_point("step")
        local = LossSums()
        for index in range(len(self.memories)):
            local += self._micro_batch(index, segment, step=step, num_targets=num_targets)
        visible, size = self._visible_memory(segment)
        # One collective for everything the ranks have to agree on.
        values = [local.nats, local.num_tokens, local.num_bytes, visible, size]
        nats, num_tokens, num_bytes, visible, size, *counts = self.world.all_reduce_sum(
            # float64 is exact for counts up to 2**53.
            torch.tensor([*values, *flags.values()], dtype=torch.float64)
        ).tolist()
        # Checked on the sum of all ranks, so all ranks raise, and before any of them updates.
        if not math.isfinite(nats):
            raise DivergedError(
                f"the loss of step {step} is {nats} (segment position {segment.position}, this "
                f"rank's lanes {self.lane_of_row}); no rank has changed its weights"
            )
        return StepResult(
            LossSums(nats, int(num_tokens), int(num_bytes)),
            gradient_norm=self.engine.step(lr),
            memory_valid=visible / size if size else 0.0,
            raised=frozenset(name for name, count in zip(flags, counts, strict=True) if count > 0),
        )

    def _micro_batch(
        self, index: int, segment: Segment, *, step: int, num_targets: int
    ) -> LossSums:
        rows = slice(index * self.micro_batch_rows, (index + 1) * self.micro_batch_rows)
        input_RT, target_RT, age_RT = (
            torch.from_numpy(array[rows]).to(self.world.device)
            for array in (segment.input, segment.target, segment.age)
        )
        self.engine.begin_micro_batch(is_last=index == len(self.memories) - 1)
        # Masks depend on the lane, not on the row or rank: any split into micro-batches is equal.
        masks = LaneDropoutMasks(seed=self.seed, step=step, lanes=self.lane_of_row[rows])
        nats_RT, self.memories[index] = self.engine.forward(
            input_RT, target_RT, age_RT, self.memories[index], masks
        )
        # max: a segment of one token at the end of an epoch has no target. Its gradients are zero.
        self.engine.backward(nats_RT.sum() / max(1, num_targets))
        return LossSums.of(nats_RT, target_RT, self.byte_counts_V)

    def _visible_memory(self, segment: Segment) -> tuple[int, int]:
        """Memory tokens of this rank's lanes: those the first tokens may attend to, and all."""
        # A first token of age a may attend to a earlier tokens, of which mem_len are in memory.
        mem_len = self.memories[0].layers[0].shape[1]
        ages = [segment.age[row, 0] for row, lane in enumerate(self.lane_of_row) if lane != NO_LANE]
        return sum(min(int(age), mem_len) for age in ages), mem_len * len(ages)

    def memory_of_lanes(self) -> dict[int, Tensor]:
        """Lane -> its memory [L, M, D], for the checkpoint."""
        return {
            lane: torch.stack([layer[row] for layer in self.memories[index].layers])
            for index, row, lane in self._rows_with_lanes()
        }

    def load_memory(self, memory_of_lane: dict[int, Tensor]) -> None:
        """Copy the memory [L, M, D] of each of this rank's lanes from a checkpoint."""
        for index, row, lane in self._rows_with_lanes():
            for saved, layer in zip(memory_of_lane[lane], self.memories[index].layers, strict=True):
                layer[row].copy_(saved)

    def _rows_with_lanes(self) -> list[tuple[int, int, int]]:
        """(micro-batch, row in it, lane) of every lane of this rank."""
        return [
            (*divmod(row, self.micro_batch_rows), lane)
            for row, lane in enumerate(self.lane_of_row)
            if lane != NO_LANE
        ]
