"""One training step: a batch through the model, in micro-batches over its lanes.

    compute   forward and backward of all micro-batches, and their sums over the ranks
    update    check the sums, then update the weights, and the memory of the lanes

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

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline.streams.segments import NO_LANE
from txl_dist.config.run_config import Precision
from txl_dist.config.training_config import OptimizerConfig
from txl_dist.evaluation.scores import LossSums
from txl_dist.model.devices import to_device
from txl_dist.model.dropout import LaneDropoutMasks
from txl_dist.model.memory import SequenceState
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.fault_injection import fault_point
from txl_dist.runtime.process import Span
from txl_dist.runtime.world import World
from txl_dist.sequence import SequenceReader
from txl_dist.training.batches import DeviceBatch
from txl_dist.training.engine import Decision, Engine

# Shapes: R rows of a micro-batch, T segment tokens, V vocabulary


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of one step over all ranks; equal on every rank."""

    sums: LossSums
    gradient_norm: float
    memory_valid: float
    """Share of the memory of this step's lanes that the segment's first tokens may read."""
    raised: frozenset[str]
    """Flags that are true on at least one rank."""
    event: str | None = None
    """Why the step has diverged. Its sums and norm are those that were rejected."""
    is_update: bool = True
    """Whether the weights were updated and the memory advanced."""
    lane_sums: Mapping[int, LossSums] = field(default_factory=dict)
    """Loss sums of each lane of this rank, of a step that has diverged; else empty."""


DivergenceCheck = Callable[[LossSums, float, float], str | None]
"""From loss sums, gradient norm and `memory_valid`, over all ranks: why the step has diverged, or
None."""


class _MicroBatch(NamedTuple):
    nats_RT: Tensor
    target_RT: Tensor
    """On the host."""
    memory: SequenceState
    """The next memory, which is used once the step is accepted."""


class ComputedStep(NamedTuple):
    """A step before its update: the weights and the memory have not changed."""

    batch: DeviceBatch
    micro_batches: list[_MicroBatch]
    agreed: Tensor
    """`_local_values`, summed over the ranks; not read by the host yet."""
    flags: Mapping[str, bool]


class TrainStep:
    """Computes steps on this rank's lanes and keeps their memory between steps."""

    def __init__(
        self, engine: Engine, world: World, *, lanes_in_turns: Sequence[Sequence[int]],
        micro_batch_rows: int, num_micro_batches: int, seed: int, byte_counts_V: NDArray[Any],
        memory_dtype: torch.dtype | None = None, num_segments: int = 1,
    ) -> None:  # fmt: skip
        """`lanes_in_turns`: the lanes of this rank, by the turn in which a batch has them."""
        self.engine, self.world, self.seed = engine, world, seed
        self.num_segments = num_segments
        self.micro_batch_rows = micro_batch_rows
        self.num_rows = micro_batch_rows * num_micro_batches
        self.lanes_in_turns = lanes_in_turns
        self._byte_counts_V = byte_counts_V
        self.memories = [
            [
                engine.model.empty_memory(micro_batch_rows, dtype=memory_dtype)
                for _ in range(num_micro_batches)
            ]
            for _ in lanes_in_turns
        ]
        """`memories[turn][micro_batch]` is the memory of the lanes of these rows."""

    @property
    def lanes(self) -> list[int]:
        return sorted(lane for lanes in self.lanes_in_turns for lane in lanes)

    def compute(
        self,
        batch: DeviceBatch,
        *,
        step: int,
        contiguous_from: int = 0,
        flags: Mapping[str, bool] = MappingProxyType({}),
    ) -> ComputedStep:
        """Compute the losses and gradients of step number `step`, from 1. Collective.

        On a GPU, this only gives it the work. No token attends to tokens before lane position
        `contiguous_from`. `flags` are local to the rank, with the same names on all ranks: the
        ranks agree on them in the collective of the step, so that they act on them after the same
        step.
        """
        self.world.activity.name = f"step {step}"
        fault_point("step")
        batch = self._without_gap(batch, contiguous_from)
        micro_batches = self._micro_batches(batch, step=step)
        self.world.activity.enter(Span.REDUCE)
        # One collective for everything the ranks have to agree on.
        agreed = self.world.all_reduce_sum(self._local_values(batch, micro_batches, flags))
        self.world.activity.enter(Span.OPTIMIZER)
        return ComputedStep(batch, micro_batches, agreed, flags)

    def update(self, computed: ComputedStep, *, lr: float, check: DivergenceCheck) -> StepResult:
        """Update weights and memory, unless `check` finds that the step has diverged. Collective.

        `check` must decide the same on every rank.
        """
        batch, micro_batches, agreed, flags = computed
        results: list[StepResult] = []

        def accept(norm: Tensor) -> Decision:
            norm_1 = norm.to(agreed).reshape(1)
            # Our only operation of a step that waits for a GPU.
            *values, gradient_norm = torch.cat([agreed, norm_1]).tolist()
            nats, num_tokens, num_bytes, visible, size, *counts_of_flags = values
            sums = LossSums(nats, int(num_tokens), int(num_bytes))
            memory_valid = visible / size if size else 0.0
            event = check(sums, gradient_norm, memory_valid)
            is_update = event is None
            results.append(
                StepResult(
                    sums,
                    gradient_norm=gradient_norm,
                    memory_valid=memory_valid,
                    raised=_raised(flags, counts_of_flags),
                    event=event,
                    is_update=is_update,
                    lane_sums={} if is_update else self._lane_sums(batch, micro_batches),
                )
            )
            return Decision(gradient_norm, is_update)

        self.engine.step(lr, accept)
        if results[0].is_update:
            self.memories[batch.turn] = [each.memory for each in micro_batches]
        return results[0]

    def skip(self, *, step: int, flags: Mapping[str, bool]) -> StepResult:
        """A step that no rank computes: nothing changes, and the ranks agree on `flags`."""
        self.world.activity.name = f"step {step}"
        counts = self.world.all_reduce_sum(torch.tensor([*flags.values()], dtype=torch.float64))
        raised = _raised(flags, counts.tolist())
        return StepResult(
            LossSums(), gradient_norm=0.0, memory_valid=0.0, raised=raised, is_update=False
        )

    def _without_gap(self, batch: DeviceBatch, contiguous_from: int) -> DeviceBatch:
        """The batch with ages that limit attention to tokens from `contiguous_from` on."""
        if not contiguous_from:
            return batch  # no gap; a replayed memory may begin before position 0
        # 0 if lanes of an earlier turn have skipped this segment: these lanes may have a gap of the
        # round before, of which `contiguous_from` says nothing then.
        num_contiguous = max(0, batch.position - contiguous_from)
        # The first segment after a gap must not read the state; later ones only keys after the gap.
        if num_contiguous > 0 and num_contiguous >= self.memories[batch.turn][0].num_past_tokens:
            return batch
        tgt_len = batch.age.shape[1]
        limit_T = np.arange(num_contiguous, num_contiguous + tgt_len, dtype=np.int32)
        limited = replace(batch, age=np.minimum(batch.age, limit_T))
        return DeviceBatch.of(limited, self.world.device)

    def _micro_batches(self, batch: DeviceBatch, *, step: int) -> list[_MicroBatch]:
        micro_batches, memories = [], self.memories[batch.turn]
        for index, memory in enumerate(memories):
            rows = self._rows_of(index)
            target_RT = torch.from_numpy(batch.target[rows])
            self.world.activity.enter(Span.FORWARD)
            self.engine.begin_micro_batch(is_last=index == len(memories) - 1)
            # Masks depend on the lane, not on the row or rank: any split into micro-batches is
            # equal.
            masks = LaneDropoutMasks(seed=self.seed, step=step, lanes=batch.lanes[rows])
            nats_RT, next_memory = self.engine.forward(
                batch.input_BT[rows],
                target_RT,
                batch.age_BT[rows],
                memory,
                masks,
                self.num_segments,
            )
            self.world.activity.enter(Span.BACKWARD)
            # max: a segment of one token at the end of an epoch has no target. Its gradients are
            # zero.
            self.engine.backward(nats_RT.sum() / max(1, batch.num_targets))
            micro_batches.append(_MicroBatch(nats_RT.detach(), target_RT, next_memory))
        return micro_batches

    def _rows_of(self, index: int) -> slice:
        return slice(index * self.micro_batch_rows, (index + 1) * self.micro_batch_rows)

    def _local_values(
        self, batch: DeviceBatch, micro_batches: Sequence[_MicroBatch], flags: Mapping[str, bool]
    ) -> Tensor:
        """What is summed over ranks: LossSums, visible memory, all memory, flags."""
        nats = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for each in micro_batches:
            nats = nats + each.nats_RT.double().sum()
        scored_N = batch.target[batch.target >= 0]
        num_bytes = int(self._byte_counts_V[scored_N].sum())
        # Of the memory of these lanes: what the first tokens may read of it, and all.
        ages = zip(batch.lanes, batch.age[:, 0].tolist(), strict=True)
        visible, size = self.memories[batch.turn][0].visible_share(
            [age for lane, age in ages if lane != NO_LANE]
        )
        sums = LossSums(0.0, len(scored_N), num_bytes)
        counts = [*astuple(sums), visible, size, *flags.values()]
        # float64 is exact for counts up to 2**53.
        values = to_device(torch.tensor(counts, dtype=torch.float64), self.world.device)
        values[0] = nats
        return values

    def _lane_sums(
        self, batch: DeviceBatch, micro_batches: Sequence[_MicroBatch]
    ) -> dict[int, LossSums]:
        byte_counts_V = torch.from_numpy(self._byte_counts_V)
        return {
            lane: LossSums.of(
                micro_batches[index].nats_RT[row],
                micro_batches[index].target_RT[row],
                byte_counts_V,
            )
            for turn, index, row, lane in self._rows_with_lanes()
            if turn == batch.turn
        }

    def replay(self, batch: DeviceBatch, model: TransformerXL, precision: Precision) -> None:
        """Replace the memories by those after `batch`, without loss, gradient or dropout.

        `model` is the whole model (`Engine.whole_model`), in evaluation mode.
        """
        tgt_len, memories = batch.input.shape[1] // self.num_segments, self.memories[batch.turn]
        for index, memory in enumerate(memories):
            rows = self._rows_of(index)
            reader = SequenceReader(model, state=memory, tgt_len=tgt_len, precision=precision)
            parts = (x[rows].split(tgt_len, dim=1) for x in (batch.input_BT, batch.age_BT))
            for part_BT, part_age_BT in zip(*parts, strict=True):
                reader.read(part_BT, part_age_BT)
            memories[index] = reader.state

    def memory_of_lanes(self) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        """Each lane and its memory: views of its tensors by name."""
        for turn, index, row, lane in self._rows_with_lanes():
            yield lane, self.memories[turn][index].row(row)

    def load_memory(self, memory_of_lane: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Copy the memory of each of this rank's lanes from a checkpoint."""
        for turn, index, row, lane in self._rows_with_lanes():
            self.memories[turn][index].load_row(row, memory_of_lane[lane])

    def _rows_with_lanes(self) -> list[tuple[int, int, int, int]]:
        """(turn, micro-batch, row in it, lane) of every lane of this rank."""
        return [
            (turn, *divmod(row, self.micro_batch_rows), lane)
            for turn, lanes in enumerate(self.lanes_in_turns)
            for row, lane in enumerate(lanes)
        ]


def _raised(flags: Mapping[str, bool], counts: Sequence[float]) -> frozenset[str]:
    """The flags that at least one rank has raised; `counts` are the sums over ranks."""
    return frozenset(name for name, count in zip(flags, counts, strict=True) if count > 0)


# --- the learning rate ----------------------------------------------------------------------------


def lr_at(step: int, config: OptimizerConfig, *, num_steps: int) -> float:
    """Learning rate of optimizer step `step`, counted from 1. A resume has no state to restore.

    The warm-up is a line from 0 to `lr`, which step `warmup_steps` reaches. With
    `schedule_of_paper_code` the rates are those of the training script of the paper
    (arXiv:1901.02860), which differ: docs/decisions/0021.
    """
    if config.schedule_of_paper_code:
        return _rate_of_paper_code(step - 1, config, num_steps=num_steps)
    lr, min_lr, warmup = config.lr, config.min_lr, config.warmup_steps
    if step <= warmup:
        return lr * step / warmup
    match config.schedule:
        case "constant":
            return lr
        case "inverse_sqrt":
            return lr * math.sqrt(max(1, warmup) / step)
        case "cosine":
            progress = (step - warmup) / max(1, num_steps - warmup)
            cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
            return min_lr + (lr - min_lr) * cosine
        case "linear" | "wsd":
            start = warmup if config.decay_steps is None else num_steps - config.decay_steps
            progress = (step - start) / max(1, num_steps - start)
            return lr + (min_lr - lr) * min(1.0, max(0.0, progress))


def _rate_of_paper_code(done: int, config: OptimizerConfig, *, num_steps: int) -> float:
    """Rate of the update after `done` steps. The script sets a new rate after each update.

    So the first update has the initial rate: 0 for `inverse_sqrt` with a warm-up, otherwise `lr`.
    """
    lr, warmup = config.lr, config.warmup_steps
    if config.schedule == "inverse_sqrt":
        return lr * done / warmup**1.5 if done < warmup else lr / math.sqrt(max(1, done))
    if 0 < done < warmup:
        return lr * done / warmup
    if config.schedule == "constant":
        # The script sets no rate after the warm-up: the last one of the warm-up stays.
        return lr * (warmup - 1) / warmup if done and warmup > 1 else lr
    cosine = 0.5 * (1 + math.cos(math.pi * done / num_steps))
    return config.min_lr + (lr - config.min_lr) * cosine
