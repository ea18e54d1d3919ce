"""Device memory of one rank: what a training step holds at its peak, by ZeRO stage.

With P parameters, T of them trained, O elements of optimizer state (Adam: 2 T), N ranks and fp32
numbers of 4 bytes:

    stage    weights               gradients    optimizer state    (bytes on every rank)
    0        4 P                   4 T          4 O
    1        4 P + 4 T / N         4 T          4 O / N
    2        4 P + 4 T / N         4 T / N      4 O / N
    3        4 P / N + 4 T / N     4 T / N      4 O / N

The second term of stages 1 to 3 are fp32 masters, which DeepSpeed keeps next to the weights even
if these are fp32 too. A frozen weight has no gradient and no master. To that come the activations
(dry_run.py), the memory of the lanes, the weights that stage 3 gathers, and DeepSpeed's buffers:
those for reduction have a fixed size (100 MB on GPUs). At stages 1 and 2 a rank keeps the reduced
gradients of all parameters of which it owns a part, and keeps them whole.

A step has three intervals, and its peak is the largest of them:

    forward and backward    activations, gathered weights, gradients of earlier micro-batches
    reduction               all gradients, and a flat copy of one bucket
    optimizer               the gradients of this rank's partition twice, one of them flat

Sources: ZeRO, Rajbhandari et al. 2020, arXiv:1910.02054, section 5 and figure 1 (there weights and
gradients are fp16). Copies and buffers: DeepSpeed 0.19.8, stage_1_and_2.py and stage3.py.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from typing import Any, NamedTuple, Self

from txl_dist.config.training_config import DeepSpeedConfig

FP32_BYTES = 4
STAGE_0_BUCKET = 500_000_000
"""Elements of a flat copy at stage 0: MEMORY_OPT_ALLREDUCE_SIZE of DeepSpeed's engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroSettings:
    """The settings of DeepSpeed's ZeRO that these bytes depend on.

    Defaults are those of DeepSpeed 0.19.8 (deepspeed/runtime/zero/config.py), and ours for GPUs.
    Sizes are numbers of elements, as DeepSpeed counts them.
    """

    stage: int
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
        """The settings of a config, with its defaults; `stage` replaces its stage."""
        stage = config.zero_stage if stage is None else stage
        zero = config.reduction(stage=stage, num_ranks=num_ranks, on_gpu=on_gpu)
        given = {
            key.removeprefix("stage3_"): int(zero[key]) for key in zero if zero[key] is not None
        }
        settings: dict[str, Any] = {"overlap_comm": stage == 3, **given, "stage": stage}
        names = {each.name for each in fields(cls)}
        return cls(**{name: settings[name] for name in names & settings.keys()})


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    name: str
    num_elements: int
    num_states: int
    """Optimizer states of the same size: 2 for Adam, 1 for Muon; 1 more for an average."""
    is_trained: bool = True
    """A frozen one has no gradient, master or state, and no place in the buckets."""


@dataclass(kw_only=True, slots=True)
class ActivationPeaks:
    """Largest bytes of tensors during forward and backward of one micro-batch.

    Weights and the memory that enters are not in it; the next memory is.
    """

    after_forward: int = 0
    """Bytes stored for backward; not a peak."""
    before_gradients: int = 0
    """Peak until the first gradient of a parameter is complete."""
    with_gradients: int = 0
    """After that, if the gradients of all parameters are kept."""
    without_gradients: int = 0
    """After that, if every gradient of a parameter is removed when it is complete."""
    after_first_bucket: int = 0
    """As `without_gradients`, once the first bucket is full of gradients; 0 if none gets full."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelNeeds:
    """What a model needs on one rank before anything is sharded."""

    parameters: tuple[Parameter, ...]
    activations: ActivationPeaks
    groups: tuple[tuple[int, ...], ...] = ()
    """Sizes of the parameters of each group of the optimizer, in order; () is one group of all that
    are trained."""
    needs_whole_matrices: bool = False
    """Whether an optimizer step gathers the updates of matrices whole."""
    has_foreach_updates: bool = False
    """Whether it computes the updates of all parameters of a group together."""

    @property
    def num_parameters(self) -> int:
        """P."""
        return sum(parameter.num_elements for parameter in self.parameters)

    @property
    def trained(self) -> dict[str, int]:
        """Elements of every trained parameter, by name."""
        return {each.name: each.num_elements for each in self.parameters if each.is_trained}

    @property
    def num_states(self) -> int:
        """O."""
        return sum(each.num_elements * each.num_states for each in self.parameters)

    def num_partly_owned(self, num_ranks: int) -> int:
        """Most elements in parameters of which one rank owns a part, at stages 1 and 2.

        Each group of the optimizer is cut into equal parts, wherever parameters begin.
        """
        changes = [0] * (num_ranks + 1)
        for sizes in self.groups or (tuple(self.trained.values()),):
            part, start = math.ceil(sum(sizes) / num_ranks), 0
            for size in sizes:
                stop = start + size
                changes[start // part] += size
                changes[(stop - 1) // part + 1] -= size
                start = stop
        return max(itertools.accumulate(changes))


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBytes:
    """Bytes of tensors on one rank at one interval."""

    weights: int
    """Weights and their fp32 masters."""
    gradients: int
    optimizer: int
    buffers: int
    """DeepSpeed's buckets, flat copies and gathered weights."""
    lanes: int
    """The recurrent memory of this rank's lanes, before and after the step."""
    activations: int
    """Activations of one micro-batch, and its gradients if they are kept."""

    @property
    def device(self) -> int:
        return sum(astuple(self))


class IntervalBytes(NamedTuple):
    """Bytes on the device that are there in one interval of a step only."""

    gradients: int
    buffers: int
    activations: int = 0


@dataclass(kw_only=True)
class RankPeak:
    model: ModelNeeds
    zero: ZeroSettings
    num_ranks: int
    num_micro_batches: int
    lane_bytes: int
    """Recurrent memory of all lanes of this rank."""
    num_turns: int = 1
    """Steps in which every lane is read once; a step replaces the memory of its lanes."""
    copies_to_reduce: bool = False
    """Whether a reduce-scatter copies its input, as torch's for gloo does."""

    def __post_init__(self) -> None:
        zero, sizes = self.zero, self.model.trained
        self._num_trained = sum(sizes.values())
        self._whole = FP32_BYTES * self._num_trained  # 4 T: of the gradients, masters and updates
        self._part = self._whole // self.num_ranks
        self._largest = FP32_BYTES * max(sizes.values())
        # Of the parameters of which this rank owns a part, at stages 1 and 2.
        self._partly_owned = FP32_BYTES * self.model.num_partly_owned(self.num_ranks)
        # The buffers for reduction.
        num_buffers = 2 if zero.overlap_comm and zero.stage < 3 else 1
        self._bucket = num_buffers * FP32_BYTES * zero.reduce_bucket_size
        self._fits_bucket = self._num_trained <= zero.reduce_bucket_size
        # Of the gradients in the bucket; a single rank reduces without a copy.
        self._flat_copy = FP32_BYTES * min(self._num_trained, zero.reduce_bucket_size)
        # A gradient of a layer that is larger than the bucket is kept until that is reduced.
        layers = [size for name, size in sizes.items() if not name.startswith("table.")]
        outside = max(layers, default=0)
        self._outside_bucket = FP32_BYTES * outside * (outside > zero.reduce_bucket_size)

    def peak(self) -> RankBytes:
        """The interval of a step that needs most device memory."""
        intervals = (self._stage_0, self._stage_1, self._stage_2, self._stage_3)[self.zero.stage]
        if self.zero.stage == 1 and self.zero.overlap_comm and self.num_micro_batches == 1:
            intervals = self._stage_2  # gradients are freed during backward too
        return max((self._use(interval) for interval in intervals()), key=lambda use: use.device)

    def _use(self, interval: IntervalBytes) -> RankBytes:
        stage, states = self.zero.stage, FP32_BYTES * self.model.num_states
        weights = FP32_BYTES * self.model.num_parameters
        masters = self._part if stage > 0 else 0
        # The new memory of the lanes is complete before the old one is given up. The activations
        # include that of one micro-batch.
        new_bytes = self.lane_bytes // self.num_turns
        activations = max(0, interval.activations - new_bytes // self.num_micro_batches)
        return RankBytes(
            weights=(weights // self.num_ranks if stage == 3 else weights) + masters,
            gradients=interval.gradients,
            optimizer=states // self.num_ranks if stage > 0 else states,
            buffers=interval.buffers,
            lanes=self.lane_bytes + new_bytes,
            activations=activations,
        )

    # --- the intervals of a step, by stage --------------------------------------------------------

    def _stage_0(self) -> Iterator[IntervalBytes]:
        yield from self._with_kept_gradients(bucket=0)
        if self.num_ranks > 1:
            copy = FP32_BYTES * min(self._num_trained, STAGE_0_BUCKET)
            yield IntervalBytes(self._whole, copy)
        yield IntervalBytes(self._whole, 2 * self._whole if self.model.has_foreach_updates else 0)

    def _stage_1(self) -> Iterator[IntervalBytes]:
        yield from self._with_kept_gradients(bucket=self._bucket)
        if self.zero.overlap_comm and not self._fits_bucket:  # the last micro-batch
            kept = self._whole - FP32_BYTES * self.zero.reduce_bucket_size
            activations = self.model.activations.after_first_bucket
            yield IntervalBytes(kept + self._partly_owned, self._bucket, activations)
        # While the bucket is filled, the gradients that it takes over are freed.
        reduced = 0 if self._fits_bucket else self._partly_owned
        yield IntervalBytes(self._whole + reduced, self._bucket)
        yield from self._partitioned_update()

    def _with_kept_gradients(self, *, bucket: int) -> Iterator[IntervalBytes]:
        peaks = self.model.activations
        if self.num_micro_batches == 1:
            yield IntervalBytes(0, 0, peaks.before_gradients)
            yield IntervalBytes(0, bucket, peaks.with_gradients)
        else:
            yield IntervalBytes(self._whole, bucket, peaks.before_gradients)
            yield IntervalBytes(self._whole, bucket, peaks.without_gradients)

    def _stage_2(self) -> Iterator[IntervalBytes]:
        peaks = self.model.activations
        earlier = 0 if self.num_micro_batches == 1 else self._partly_owned
        yield IntervalBytes(earlier, 0, peaks.before_gradients)
        yield IntervalBytes(earlier, self._bucket, peaks.without_gradients)
        if not self._fits_bucket:
            reduced = self._partly_owned + self._outside_bucket
            yield IntervalBytes(earlier + reduced, self._bucket, peaks.after_first_bucket)
        flat_copy = self._flat_copy if self.num_ranks > 1 else 0
        yield IntervalBytes(earlier, self._bucket + max(flat_copy, self._partly_owned))
        if not self._fits_bucket:  # a full bucket is reduced before the next gradient enters it
            yield IntervalBytes(earlier, self._bucket + flat_copy + self._largest)
        yield from self._partitioned_update()

    def _partitioned_update(self) -> Iterator[IntervalBytes]:
        gradients = self._partly_owned + self._part  # and a flat copy of this rank's part
        yield IntervalBytes(gradients, self._whole if self.model.needs_whole_matrices else 0)

    def _stage_3(self) -> Iterator[IntervalBytes]:
        peaks, is_sharded, gradients = self.model.activations, self.num_ranks > 1, self._part
        small = sum(
            each.num_elements
            for each in self.model.parameters
            if each.num_elements <= self.zero.param_persistence_threshold
        )
        large = self.model.num_parameters - small
        # What is gathered, and the flat output of the all-gather that fetches ahead.
        gathered = min(large, self.zero.max_live_parameters)
        fetched = min(large, self.zero.prefetch_bucket_size)
        bucket = self._bucket + FP32_BYTES * small * is_sharded
        weights, ahead = (FP32_BYTES * size * is_sharded for size in (gathered, fetched))
        activations = max(peaks.before_gradients, peaks.without_gradients)
        yield IntervalBytes(gradients, bucket + weights, activations)
        yield IntervalBytes(gradients, bucket + weights + ahead, peaks.after_forward)
        reduced = self._flat_copy * (1 + self.copies_to_reduce)
        yield IntervalBytes(gradients, bucket + reduced)
        if not self._fits_bucket:  # a bucket is reduced before the next gradient enters it
            largest = self._largest * is_sharded
            yield IntervalBytes(gradients, bucket + reduced + largest, peaks.after_first_bucket)
        yield IntervalBytes(2 * gradients, bucket)
