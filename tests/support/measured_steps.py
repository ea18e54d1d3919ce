"""Real steps of a run on synthetic tokens, measured: what an estimate is compared with.

Engine and step are those of training. The peak is the sum of the tensors that are
alive on this rank, not the RAM of its process: a process also holds Python, libraries and the
allocator's reserve, whose size says nothing about the run.
"""

import gc
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from data_pipeline.streams.segments import Batch
from txl_dist.config.run_config import RunConfig
from txl_dist.estimate.dry_run import LiveBytes
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.device import TORCH_DTYPE
from txl_dist.runtime.world import World
from txl_dist.training.batches import DeviceBatch
from txl_dist.training.engine import create_engine
from txl_dist.training.step import TrainStep

NUM_STEPS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSteps:
    """Steps on this rank."""

    num_parameters: int
    peak_bytes: int
    """Peak over all tensors: weights, optimizer state, buffers, activations. The smallest one of
    the steps after the first, because slow reductions hold their tensors longer."""
    step_seconds: list[float]
    """Of the steps after the first."""


class PeakBytes(LiveBytes):
    """Keeps the largest number of bytes since `reset_peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.on_change = self._update
        self.reset_peak()

    def reset_peak(self) -> None:
        """Let `peak_bytes` start again from what is alive now."""
        self.peak_bytes = self.live_bytes

    def _update(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def measure_steps(config: RunConfig, world: World, *, count_bytes: bool = True) -> MeasuredSteps:
    """Run steps of `config`, whose vocabulary must be set. Collective.

    Counting bytes makes steps slower; without it `peak_bytes` is 0.
    """
    live = PeakBytes()
    with live if count_bytes else nullcontext():
        return _measure(config, world, live)


def _measure(config: RunConfig, world: World, live: PeakBytes) -> MeasuredSteps:
    rows = math.ceil(config.data.num_lanes / world.num_ranks)
    micro_batch_rows = min(rows, config.training.micro_batch_lanes or rows)
    num_micro_batches = math.ceil(rows / micro_batch_rows)
    recompute = config.training.activation_checkpointing
    engine = create_engine(
        TransformerXL(config.model, seed=config.seed, recompute_layers=recompute),
        config,
        world,
        num_micro_batches=num_micro_batches,
        micro_batch_rows=micro_batch_rows,
    )
    step = TrainStep(
        engine,
        world,
        lanes_in_turns=[range(rows * world.rank, rows * (world.rank + 1))],
        seed=config.seed,
        byte_counts_V=np.ones(config.model.vocab_size),
        memory_dtype=TORCH_DTYPE[config.training.memory_dtype],
        num_micro_batches=num_micro_batches,
        micro_batch_rows=micro_batch_rows,
    )
    peaks: list[int] = []
    seconds: list[float] = []
    for number, host_batch in enumerate(_batches(config, rows, world.rank), start=1):
        batch = DeviceBatch.of(host_batch, world.device)
        gc.collect()  # cycles keep parts of the last step until Python happens to look for them
        world.barrier()
        live.reset_peak()
        start = time.perf_counter()
        step.update(step.compute(batch, step=number), lr=1e-3, check=lambda *_: None)
        peaks.append(live.peak_bytes)
        seconds.append(time.perf_counter() - start)
    return MeasuredSteps(
        num_parameters=sum(math.prod(shape) for shape in engine.shapes.values()),
        peak_bytes=min(peaks[1:]),
        step_seconds=seconds[1:],
    )


def _batches(config: RunConfig, rows: int, rank: int) -> Iterator[Batch]:
    """Random tokens, with a full memory."""
    tgt_len, random = config.data.tgt_len, np.random.default_rng(rank)
    for position in range(0, NUM_STEPS * tgt_len, tgt_len):
        token_BT = random.integers(0, config.model.vocab_size, (rows, tgt_len), dtype=np.int64)
        yield Batch(
            input=token_BT,
            target=token_BT,
            age=np.full((rows, tgt_len), config.model.mem_len + tgt_len, dtype=np.int32),
            position=position,
            next_position=position + tgt_len,
            lanes=range(rows * rank, rows * (rank + 1)),
            num_targets=config.data.num_lanes * tgt_len,
            turn=0,
            next_turn=0,
        )
