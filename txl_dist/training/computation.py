"""Builds what computes: the step with its model and engine, and the stream of segments."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, closing

import torch

from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.pipeline import segment_pipeline
from data_pipeline.streams.segment_stream import SegmentStream
from data_pipeline.streams.segments import Segment
from txl_dist.errors import ConfigError
from txl_dist.model.config import ModelConfig
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.model.triton_support import triton_unavailable_reason
from txl_dist.model.variants import ATTENTION_FORMS
from txl_dist.runtime.precision import TORCH_DTYPE
from txl_dist.training.compilation import compile_layers
from txl_dist.training.device_segments import DeviceSegments
from txl_dist.training.engine import create_engine
from txl_dist.training.inputs import RankContext
from txl_dist.training.replay import replay, segments_to_replay
from txl_dist.training.resume_point import ResumePoint
from txl_dist.training.state import TrainState
from txl_dist.training.step import TrainStep

DATA_TIMEOUT_SHARE = 0.9
"""Time limit for one read of the data, as a fraction of training.rank_timeout_seconds."""


def build_step(rank: RankContext) -> TrainStep:
    """The model, its engine, and the memory of this rank's lanes. Collective."""
    config, data, world = rank.config, rank.data, rank.world
    num_rows = data.plan.rows_per_rank(world.num_ranks)
    micro_batch_rows = min(num_rows, config.training.micro_batch_lanes or num_rows)
    # Equal on all ranks: at stage 3 every forward and backward is collective, so a rank with fewer
    # lanes computes padding rows.
    shape = {
        "num_micro_batches": math.ceil(num_rows / micro_batch_rows),
        "micro_batch_rows": micro_batch_rows,
    }
    model = TransformerXL(
        data.model_config,
        seed=config.seed,
        recompute_layers=config.training.activation_checkpointing,
    )
    lanes = data.plan.lanes_of_rank(world.rank, world.num_ranks)
    _require_attention(data.model_config, world.device)
    if config.training.compile:
        compile_layers(model, config, world, lanes=range(micro_batch_rows))
    return TrainStep(
        create_engine(model, config, world, **shape),
        world,
        lanes=lanes,
        seed=config.seed,
        byte_counts_V=data.tokenizer.token_bytes(),
        memory_dtype=TORCH_DTYPE[config.training.memory_dtype],
        memory_on_host=config.training.memory_device == "cpu",
        dropout_rng=config.training.dropout_rng,
        **shape,
    )


def _require_attention(config: ModelConfig, device: torch.device) -> None:
    """Evaluation and generation replace a form that cannot run; training was asked for it."""
    form = ATTENTION_FORMS.get(config.attention)
    reason = triton_unavailable_reason(device)
    if form is None or not form.needs_triton or not reason:
        return
    raise ConfigError(
        f"model.attention={config.attention} needs the package triton and a GPU of compute "
        f"capability 8.0 (A100) or newer, and {reason}. Set model.attention=auto, which takes it "
        "where it can run; or, to test the kernels on a CPU with a small model, set the "
        "environment variable TRITON_INTERPRET=1"
    )


class SegmentSource:
    """Opens the segments of this rank's lanes at a state; at most one stream is open."""

    def __init__(self, rank: RankContext, step: TrainStep) -> None:
        self._rank, self._step = rank, step
        self._streams = rank.stack.enter_context(ExitStack())

    def open_at(self, state: TrainState) -> tuple[LanePlan, Iterator[Segment]]:
        """The lanes of the current phase, and the segments from the position of `state` on."""
        self._streams.close()  # that of an abandoned trajectory
        stream = self._streams.enter_context(closing(_open_stream(self._rank, self._step, state)))
        segments, device = segment_pipeline(stream), self._rank.world.device
        if device.type != "cpu":
            segments = DeviceSegments(segments, device, is_ready=lambda: stream.has_segment)
            self._step.while_computing = segments.prefetch
        return self._rank.data.plan_of(state.phases[-1]), segments


def refill_memory(rank: RankContext, step: TrainStep, point: ResumePoint, state: TrainState) -> int:
    """Rebuild the memory of all lanes if that of the checkpoint does not fit. Collective.

    Returns the number of tokens per lane that were replayed for it.
    """
    num_segments = segments_to_replay(rank.config, point, state)
    if num_segments:
        with closing(_open_stream(rank, step, state)) as stream:
            replay(step, stream, num_segments, config=rank.config)
    return num_segments * rank.config.data.tgt_len


def _open_stream(rank: RankContext, step: TrainStep, state: TrainState) -> SegmentStream:
    data, phase = rank.config.data, state.phases[-1]
    return SegmentStream(
        rank.data.source_of(phase, rank.config),
        rank.data.plan_of(phase),
        lanes=step.lanes,
        num_rows=len(step.lane_of_row),
        reset=data.reset,
        shuffle=data.order,
        seed=rank.config.seed,
        position=state.position,
        prefetch_segments=data.prefetch_segments,
        # Before the other ranks give up: then the error that ends the run names the file.
        timeout_seconds=DATA_TIMEOUT_SHARE * rank.config.training.rank_timeout_seconds,
    )
