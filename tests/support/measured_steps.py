"""Real steps of a run on synthetic tokens, counted: what an estimate is compared with.

Engine, step and collectives are those of training. The peak is the sum of the tensors that are
alive on this rank, not the RAM of its process: a process also holds Python, libraries and the
allocator's reserve, whose size says nothing about the run.
"""

import gc
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_iter

from data_pipeline.streams.segments import Batch
from txl_dist.config.run_config import RunConfig
from txl_dist.estimate.dry_run import LiveBytes
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.device import TORCH_DTYPE
from txl_dist.runtime.world import World
from txl_dist.training.batches import DeviceBatch
from txl_dist.training.engine import create_engine
from txl_dist.training.step import TrainStep

COLLECTIVES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
}
"""Operations of torch's namespace c10d, and their kinds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSteps:
    """Steps on this rank; the collectives are those of the last."""

    num_parameters: int
    peak_bytes: int
    """Peak over all tensors: weights, optimizer state, buffers, activations. The smallest one of
    the steps after the first, because slow reductions hold their tensors longer."""
    collective_bytes: dict[str, int]
    """Kind -> bytes of the whole tensors."""
    num_messages: dict[str, int]
    """Kind -> number of messages."""
    step_seconds: list[float]
    """Time of every step, including the counting if it was on."""


def measure_steps(
    config: RunConfig, world: World, *, num_steps: int = 3, count: bool = True
) -> MeasuredSteps:
    """Run steps of `config`, whose vocabulary must be set. Collective.

    `count=False`: only measure the time, which counting would double.
    """
    live = _LiveStep()
    if count:
        with live:
            return _measure(config, world, live, num_steps)
    return _measure(config, world, live, num_steps)


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


class _LiveStep(PeakBytes):
    """Also counts collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: Counter[str] = Counter()
        self.num_messages: Counter[str] = Counter()

    def compute(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if getattr(operation, "namespace", "") == "c10d":
            self._count_collective(operation._opname, args)
        return super().compute(operation, args, kwargs)

    def _count_collective(self, name: str, args: tuple[Any, ...]) -> None:
        kind = COLLECTIVES.get(name, name)
        # The first argument is the result; of a reduce-scatter it is the part, of which the second
        # is the whole.
        whole = args[1] if kind == "reduce_scatter" else args[0]
        tensors = [each for each in tree_iter(whole) if isinstance(each, Tensor)]
        self.num_bytes[kind] += sum(each.numel() * each.element_size() for each in tensors)
        self.num_messages[kind] += 1


def _measure(config: RunConfig, world: World, live: _LiveStep, num_steps: int) -> MeasuredSteps:
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
    seconds: list[float] = []
    peaks: list[int] = []
    for number, batch in enumerate(_batches(config, rows, world.rank, num_steps), start=1):
        gc.collect()  # cycles keep parts of the last step until Python happens to look for them
        world.barrier()
        live.reset_peak()
        live.num_bytes.clear()
        live.num_messages.clear()
        start = time.perf_counter()
        step.update(
            step.compute(DeviceBatch.of(batch, world.device), step=number),
            lr=1e-3,
            check=lambda *_: None,
        )
        seconds.append(time.perf_counter() - start)
        peaks.append(live.peak_bytes)
    return MeasuredSteps(
        num_parameters=sum(math.prod(shape) for shape in engine.shapes.values()),
        peak_bytes=min(peaks[1:]),
        collective_bytes=dict(live.num_bytes),
        num_messages=dict(live.num_messages),
        step_seconds=seconds,
    )


def _batches(config: RunConfig, rows: int, rank: int, number: int) -> Iterator[Batch]:
    """Random tokens, with a full memory."""
    tgt_len, random = config.data.tgt_len, np.random.default_rng(rank)
    for position in range(0, number * tgt_len, tgt_len):
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
