"""Builds what computes and saves: step, stream of segments, saver and recovery.

Called by `build.py`. `build_step` and `build_saver` are collective.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path

import torch

from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.pipeline import segment_pipeline
from data_pipeline.streams.segment_stream import SegmentStream
from data_pipeline.streams.segments import Segment
from txl_dist.checkpoint.copies import CopyUploader
from txl_dist.checkpoint.writer import CheckpointHeader
from txl_dist.config.config_file import flatten_config
from txl_dist.errors import ConfigError
from txl_dist.model.config import ModelConfig
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.model.triton_support import triton_unavailable_reason
from txl_dist.model.variants import ATTENTION_FORMS
from txl_dist.runtime.precision import TORCH_DTYPE
from txl_dist.runtime.source_digest import code_description
from txl_dist.tracking.process import TrackingProcess
from txl_dist.training.compilation import compile_layers
from txl_dist.training.device_segments import DeviceSegments
from txl_dist.training.divergence_dump import DivergenceDump
from txl_dist.training.engine import create_engine
from txl_dist.training.rank_context import RankContext
from txl_dist.training.recovery import Recovery
from txl_dist.training.replay import replay, segments_to_replay
from txl_dist.training.report import Report
from txl_dist.training.resume_point import ResumePoint, restore
from txl_dist.training.saving import RunSaver, retention_of
from txl_dist.training.start_state import initial_state
from txl_dist.training.state import TrainState
from txl_dist.training.step import TrainStep

DATA_TIMEOUT_SHARE = 0.9
"""Time limit for one read of the data, as a fraction of training.rank_timeout_seconds."""


def build_step(rank: RankContext) -> TrainStep:
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


def open_stream(rank: RankContext, step: TrainStep, state: TrainState) -> SegmentStream:
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


def refill_memory(rank: RankContext, step: TrainStep, point: ResumePoint, state: TrainState) -> int:
    """Rebuild the memory of all lanes if that of the checkpoint does not fit. Collective.

    Returns the number of tokens per lane that were replayed for it.
    """
    num_segments = segments_to_replay(rank.config, point, state)
    if num_segments:
        with closing(open_stream(rank, step, state)) as stream:
            replay(step, stream, num_segments, config=rank.config)
    return num_segments * rank.config.data.tgt_len


def build_recovery(
    rank: RankContext, step: TrainStep, report: Report, saver: RunSaver, *, last_step: int
) -> Recovery:
    config, data = rank.config, rank.data
    streams = rank.stack.enter_context(ExitStack())

    def read_from(state: TrainState) -> tuple[LanePlan, Iterator[Segment]]:
        streams.close()  # that of the abandoned trajectory
        stream = streams.enter_context(closing(open_stream(rank, step, state)))
        segments = segment_pipeline(stream)
        if rank.world.device.type != "cpu":
            segments = DeviceSegments(
                segments, rank.world.device, is_ready=lambda: stream.has_segment
            )
            step.while_computing = segments.prefetch
        return data.plan_of(state.phases[-1]), segments

    def load(point: ResumePoint) -> None:
        restore(point, config, step.engine, step)
        refill_memory(rank, step, point, initial_state(rank, point))

    return Recovery(
        config=config,
        step=step,
        report=report,
        saver=saver,
        dump=DivergenceDump(rank.directory.events, rank.world.rank, step.lanes, data, config),
        checkpoints=rank.directory.checkpoints,
        last_step=last_step,
        restore=load,
        state_at=lambda point: initial_state(rank, point),
        read_from=read_from,
    )


def build_saver(
    rank: RankContext,
    step: TrainStep,
    tracker: TrackingProcess | None,
    point: ResumePoint | None,
    *,
    is_new_attempt: bool,
) -> RunSaver:
    """Also records a new attempt at `training.checkpoint_url`."""
    config, data, checkpoints = rank.config, rank.data, rank.directory.checkpoints
    header = CheckpointHeader(
        written_by=code_description(),
        model=asdict(data.model_config),
        run=flatten_config(config),
        run_id=rank.run_id,
        attempt=checkpoints.attempt.record.number if checkpoints.attempt else 0,
        tokenizer_json=data.tokenizer.to_json(),
        tokenizer_digest=data.tokenizer.digest,
        data_digest=data.digest,
        vocab_size=data.vocabulary.vocab_size,
        zero_stage=config.deepspeed.zero_stage,
        num_lanes=config.data.num_lanes,
    )
    saver = RunSaver(
        checkpoints,
        header=header,
        step=step,
        tracker=tracker,
        uploader=_create_uploader(rank, is_new_attempt=is_new_attempt),
        config=config.training,
        saved_file=Path(rank.job.saved_file) if rank.job.saved_file else None,
        saved_step=point.kept_step if point and not point.is_fork else None,
    )
    return rank.stack.enter_context(closing(saver))


def _create_uploader(rank: RankContext, *, is_new_attempt: bool) -> CopyUploader | None:
    """On rank 0, if checkpoints are copied. Collective."""
    config, checkpoints = rank.config.training, rank.directory.checkpoints
    uploader = None
    if config.checkpoint_url and rank.world.is_rank_zero:
        uploader = CopyUploader(
            config.checkpoint_url,
            checkpoints,
            retention=retention_of(config),
            attempt=checkpoints.attempt,
        )
    rank.world.run_on_rank_zero(lambda: uploader.open() if uploader and is_new_attempt else None)
    return uploader
