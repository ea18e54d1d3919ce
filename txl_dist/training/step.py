"""One training step: a segment of its lanes through the model, in micro-batches over lanes.

These are all lanes, or with `data.lanes_per_step` those whose turn it is: every `num_turns`-th one.

Gradients are accumulated over lanes, never over steps, and each micro-batch has its own rows of the
memory. The loss is the sum of nats divided by the global number of targets, which is known before
the first micro-batch. So the result does not depend on the number of ranks or the size of
micro-batches, except for the order of floating-point sums.

Before the optimizer step, all ranks check the loss and the gradient norm of all ranks. A rejected
step changes nothing: neither weights, nor optimizer state, nor memory.

On a GPU the host waits when it reads these, and with several ranks DeepSpeed waits at the end of
backward; docs/decisions/0039 lists what else waits at each ZeRO stage. Micro-batches have no
operation whose result the host needs: what depends on tokens and ages is computed from the
segment's arrays on the host.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline.streams.segments import Segment
from txl_dist.config.run_config import Precision
from txl_dist.evaluation.scores import LossSums
from txl_dist.model.devices import to_device
from txl_dist.model.dropout import DropoutMasks, LaneDropoutMasks
from txl_dist.model.memory import SequenceState
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.activity import Span
from txl_dist.runtime.fault_injection import fault_point
from txl_dist.runtime.world import World
from txl_dist.sequence import SequenceReader
from txl_dist.training.engine import Decision, Engine

# Shapes: R rows of a micro-batch, T segment tokens, V vocabulary

NO_LANE = -1
"""Marks padding rows: all ranks compute as many rows as the rank with the most lanes."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of one step over all ranks; equal on every rank."""

    sums: LossSums
    gradient_norm: float
    memory_valid: float
    """Share of the memory of all lanes that the segment's first tokens may read."""
    raised: frozenset[str]
    """Flags that are true on at least one rank."""
    event: str | None = None
    """Why the step has diverged. Its sums and norm are those that were rejected."""
    is_update: bool = True
    """Whether the weights were updated and the memory advanced."""
    lane_sums: Mapping[int, LossSums] = field(default_factory=dict)
    """Loss sums of each lane of this rank, of a step that has diverged; else empty."""


DivergenceCheck = Callable[[LossSums, float], str | None]
"""From the loss sums and the gradient norm over all ranks: why the step has diverged, or None."""


class _MicroBatch(NamedTuple):
    nats_RT: Tensor
    target_RT: Tensor
    """On the host."""
    memory: SequenceState
    """The next memory, which is used once the step is accepted."""


class TrainStep:
    """Computes steps on this rank's lanes and keeps their memory between steps."""

    def __init__(
        self, engine: Engine, world: World, *, lanes: Sequence[int], micro_batch_rows: int,
        num_micro_batches: int, seed: int, byte_counts_V: NDArray[Any],
        memory_dtype: torch.dtype | None = None, num_segments: int = 1, num_turns: int = 1,
    ) -> None:  # fmt: skip
        self.engine, self.world, self.seed, self.lanes = engine, world, seed, lanes
        self.num_segments = num_segments
        self.micro_batch_rows = micro_batch_rows
        num_rows = micro_batch_rows * num_micro_batches
        in_turns = [
            [row for row, lane in enumerate(lanes) if lane % num_turns == turn]
            for turn in range(num_turns)
        ]
        # Rows of padding are last, in segments and in steps.
        self._rows_of_turns = [
            [*rows, *range(len(lanes), len(lanes) + num_rows - len(rows))] for rows in in_turns
        ]
        """The rows of a segment that a step reads, by turn."""
        self.num_rows = 1 + max(map(max, self._rows_of_turns))
        """Rows of the segments: those of all lanes in order, and rows of padding."""
        lane_of_row = [*lanes, *[NO_LANE] * (self.num_rows - len(lanes))]
        self._lanes_of_turns = [[lane_of_row[row] for row in rows] for rows in self._rows_of_turns]
        """The lane of each row of a step, by turn."""
        self._byte_counts_V = byte_counts_V
        self.while_computing: Callable[[], None] = lambda: None
        """Called when a GPU has all work of the micro-batches, before the host waits for it."""
        self.memories = [
            [
                engine.model.empty_memory(micro_batch_rows, dtype=memory_dtype)
                for _ in range(num_micro_batches)
            ]
            for _ in range(num_turns)
        ]
        """`memories[turn][micro_batch]` is the memory of the lanes of these rows."""

    def __call__(
        self, segment: Segment, *, step: int, num_targets: int, lr: float, check: DivergenceCheck,
        turn: int = 0, contiguous_from: int = 0, flags: Mapping[str, bool] = MappingProxyType({}),
    ) -> StepResult:  # fmt: skip
        """Train one step: number `step`, from 1. `num_targets` counts its targets on all ranks.

        `segment` is of all lanes of this rank, of which the step reads those of `turn`. `check`
        must decide the same on every rank. No token attends to tokens before lane position
        `contiguous_from`.

        `flags` are local to the rank, with the same names on all ranks: the ranks agree on them in
        the collective of the step, so that they act on them after the same step.
        """
        self.world.activity.name = f"step {step}"
        fault_point("step")
        segment = self._without_gap(self._of_turn(segment, turn), turn, contiguous_from)
        batches = self._micro_batches(segment, turn, step=step, num_targets=num_targets)
        self.world.activity.enter(Span.REDUCE)
        # One collective for everything the ranks have to agree on.
        agreed = self.world.all_reduce_sum(self._local_values(segment, turn, batches, flags))
        self.world.activity.enter(Span.OPTIMIZER)
        self.while_computing()
        sums, memory_valid, raised = LossSums(), 0.0, frozenset[str]()
        event: str | None = None

        def accept(norm: Tensor) -> Decision:
            nonlocal sums, memory_valid, raised, event
            norm_1 = norm.to(agreed).reshape(1)
            # Our only operation of a step that waits for a GPU.
            nats, num_tokens, num_bytes, visible, size, *counts, gradient_norm = torch.cat(
                [agreed, norm_1]
            ).tolist()
            sums = LossSums(nats, int(num_tokens), int(num_bytes))
            memory_valid, raised = visible / size if size else 0.0, _raised(flags, counts)
            event = check(sums, gradient_norm)
            return Decision(gradient_norm, is_accepted=event is None)

        gradient_norm = self.engine.step(lr, accept)
        if event is None:
            self.memories[turn] = [batch.memory for batch in batches]
        return StepResult(
            sums,
            gradient_norm=gradient_norm,
            memory_valid=memory_valid,
            raised=raised,
            event=event,
            is_update=event is None,
            lane_sums={} if event is None else self._lane_sums(batches, turn),
        )

    def skip(self, *, step: int, flags: Mapping[str, bool]) -> StepResult:
        """A step that no rank computes: nothing changes, and the ranks agree on `flags`."""
        self.world.activity.name = f"step {step}"
        counts = self.world.all_reduce_sum(torch.tensor([*flags.values()], dtype=torch.float64))
        raised = _raised(flags, counts.tolist())
        return StepResult(
            LossSums(), gradient_norm=0.0, memory_valid=0.0, raised=raised, is_update=False
        )

    def _of_turn(self, segment: Segment, turn: int) -> Segment:
        """The rows of the segment that are read in this turn."""
        if len(self.memories) == 1:
            return segment
        rows = self._rows_of_turns[turn]
        parts = (segment.input[rows], segment.target[rows], segment.age[rows])
        return Segment(*parts, segment.position, segment.next_position)

    def _without_gap(self, segment: Segment, turn: int, contiguous_from: int) -> Segment:
        """The segment with ages that limit attention to tokens from `contiguous_from` on."""
        # 0 if lanes of an earlier turn have skipped this segment: these lanes may have a gap of the
        # round before, of which `contiguous_from` says nothing then.
        num_contiguous = max(0, segment.position - contiguous_from)
        # The first segment after a gap must not read the state; later ones only keys after the gap.
        if num_contiguous > 0 and num_contiguous >= self.memories[turn][0].num_past_tokens:
            return segment
        tgt_len = segment.age.shape[1]
        limit_T = np.arange(num_contiguous, num_contiguous + tgt_len, dtype=np.int32)
        age = np.minimum(segment.age, limit_T)
        # Not `replace`: the ages of a DeviceSegment are also on the GPU.
        return Segment(segment.input, segment.target, age, segment.position, segment.next_position)

    def _micro_batches(
        self, segment: Segment, turn: int, *, step: int, num_targets: int
    ) -> list[_MicroBatch]:
        """Forward and backward of all micro-batches."""
        input_BT, age_BT = self._on_device(segment)
        batches = []
        for index, memory in enumerate(self.memories[turn]):
            rows = self._rows_of(index)
            target_RT = torch.from_numpy(segment.target[rows])
            self.world.activity.enter(Span.FORWARD)
            self.engine.begin_micro_batch(is_last=index == len(self.memories[turn]) - 1)
            masks = self._dropout_masks(index, turn, step)
            nats_RT, next_memory = self.engine.forward(
                input_BT[rows], target_RT, age_BT[rows], memory, masks, self.num_segments
            )
            self.world.activity.enter(Span.BACKWARD)
            # max: a segment of one token at the end of an epoch has no target. Its gradients are
            # zero.
            self.engine.backward(nats_RT.sum() / max(1, num_targets))
            batches.append(_MicroBatch(nats_RT.detach(), target_RT, next_memory))
        return batches

    def _dropout_masks(self, index: int, turn: int, step: int) -> DropoutMasks:
        # Masks depend on the lane, not on the row or rank: any split into micro-batches is equal.
        lanes = self._lanes_of_turns[turn][self._rows_of(index)]
        return LaneDropoutMasks(seed=self.seed, step=step, lanes=lanes)

    def _on_device(self, segment: Segment) -> tuple[Tensor, Tensor]:
        """Input and age [B, T] of all rows."""
        if isinstance(segment, DeviceSegment):
            return segment.input_BT, segment.age_BT
        input_BT, age_BT = torch.from_numpy(segment.input), torch.from_numpy(segment.age)
        return to_device(input_BT, self.world.device), to_device(age_BT, self.world.device)

    def _rows_of(self, index: int) -> slice:
        return slice(index * self.micro_batch_rows, (index + 1) * self.micro_batch_rows)

    def _local_values(
        self,
        segment: Segment,
        turn: int,
        batches: Sequence[_MicroBatch],
        flags: Mapping[str, bool],
    ) -> Tensor:
        """What is summed over ranks: nats, targets, bytes, visible memory, all memory, flags."""
        nats = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for batch in batches:
            nats = nats + batch.nats_RT.double().sum()
        scored_N = segment.target[segment.target >= 0]
        num_bytes = int(self._byte_counts_V[scored_N].sum())
        visible = self._visible_memory(segment, turn)
        counts = [len(scored_N), num_bytes, *visible, *flags.values()]
        # float64 is exact for counts up to 2**53.
        values = to_device(torch.tensor([0, *counts], dtype=torch.float64), self.world.device)
        values[0] = nats
        return values

    def _lane_sums(self, batches: Sequence[_MicroBatch], turn: int) -> dict[int, LossSums]:
        byte_counts_V = torch.from_numpy(self._byte_counts_V)
        return {
            lane: LossSums.of(
                batches[index].nats_RT[row], batches[index].target_RT[row], byte_counts_V
            )
            for index, row, lane in self._rows_with_lanes(turn)
        }

    def replay(self, segment: Segment, model: TransformerXL, precision: Precision) -> None:
        """Replace the memories by those after `segment`, without loss, gradient or dropout.

        `model` is the whole model (`Engine.whole_model`), in evaluation mode.
        """
        for turn, memories in enumerate(self.memories):
            input_BT, age_BT = self._on_device(self._of_turn(segment, turn))
            tgt_len = input_BT.shape[1] // self.num_segments
            for index, memory in enumerate(memories):
                rows = self._rows_of(index)
                reader = SequenceReader(model, state=memory, tgt_len=tgt_len, precision=precision)
                parts = (x[rows].split(tgt_len, dim=1) for x in (input_BT, age_BT))
                for part_BT, part_age_BT in zip(*parts, strict=True):
                    reader.read(part_BT, part_age_BT)
                memories[index] = reader.state

    def _visible_memory(self, segment: Segment, turn: int) -> tuple[int, int]:
        """The memory of this rank's lanes: what the first tokens may read of it, and all."""
        lanes = enumerate(self._lanes_of_turns[turn])
        ages = [segment.age[row, 0] for row, lane in lanes if lane != NO_LANE]
        return self.memories[turn][0].visible_share([int(age) for age in ages])

    def memory_of_lanes(self) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        """Each lane and its memory: views of its tensors by name."""
        for turn, memories in enumerate(self.memories):
            for index, row, lane in self._rows_with_lanes(turn):
                yield lane, memories[index].row(row)

    def load_memory(self, memory_of_lane: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Copy the memory of each of this rank's lanes from a checkpoint."""
        for turn, memories in enumerate(self.memories):
            for index, row, lane in self._rows_with_lanes(turn):
                memories[index].load_row(row, memory_of_lane[lane])

    def _rows_with_lanes(self, turn: int) -> list[tuple[int, int, int]]:
        """(micro-batch, row in it, lane) of every lane of this rank that is read in this turn."""
        return [
            (*divmod(row, self.micro_batch_rows), lane)
            for row, lane in enumerate(self._lanes_of_turns[turn])
            if lane != NO_LANE
        ]


def _raised(flags: Mapping[str, bool], counts: Sequence[float]) -> frozenset[str]:
    """The flags that at least one rank has raised; `counts` are the sums over ranks."""
    return frozenset(name for name, count in zip(flags, counts, strict=True) if count > 0)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSegment(Segment):
    """A segment whose input and ages are also on a device. Targets are used on the host only."""

    input_BT: Tensor
    age_BT: Tensor

    @classmethod
    def of(cls, segment: Segment, device: torch.device) -> Self:
        """Start the copies; the host does not wait for them."""
        return cls(
            **{field.name: getattr(segment, field.name) for field in fields(Segment)},
            input_BT=to_device(torch.from_numpy(segment.input), device),
            age_BT=to_device(torch.from_numpy(segment.age), device),
        )


class DeviceSegments:
    """The segments of `source` as DeviceSegments, the next one copied while a step is computed.

    Only on GPUs: on a CPU, the step reads the arrays of the stream itself. `is_ready`: whether
    `next(source)` has a segment without waiting.
    """

    def __init__(
        self, source: Iterator[Segment], device: torch.device, *, is_ready: Callable[[], bool]
    ) -> None:
        self._source, self._device, self._is_ready = source, device, is_ready
        self._next: DeviceSegment | Exception | None = None

    def prefetch(self) -> None:
        """Take the next segment and start its copies, if the stream has read it already."""
        if self._next is None and self._is_ready():
            try:
                self._next = self._take()
            except Exception as error:  # damaged data; the step that is running does not need it
                self._next = error

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> DeviceSegment:
        segment, self._next = self._next, None
        if isinstance(segment, Exception):
            raise segment
        return self._take() if segment is None else segment

    def _take(self) -> DeviceSegment:
        return DeviceSegment.of(next(self._source), self._device)
