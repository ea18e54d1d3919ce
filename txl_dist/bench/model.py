"""`txl bench model`: model FLOPs utilisation (MFU), the speed-up of the KV cache, and peak RAM.

MFU = useful operations / time / peak. Useful operations are matrix products: in training all of
them, including the projection of the memory's keys and values; in evaluation neither that
projection nor that of the distances, because a KVCache holds both. The peak is the fastest square
matrix product, measured between the steps of the same run, with the same dtype.
benchmarks/generation_time.py measures what the matrix products of a function take alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from txl_dist.bench import Figure, peak_mib, time_rounds
from txl_dist.config.run_config import Precision
from txl_dist.model.config import ModelConfig
from txl_dist.model.devices import to_device
from txl_dist.model.dropout import LaneDropoutMasks
from txl_dist.model.flops import inference_flops, training_flops
from txl_dist.model.memory import SequenceState
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.device import autocast
from txl_dist.runtime.process import keep_freed_memory
from txl_dist.training.compilation import compile_model
from txl_dist.training.cuda_graphs import record_layers

# Shapes: B lanes, T segment tokens, M memory tokens, S = M + T keys

CPU = torch.device("cpu")
LANES = 4
PLAIN = ModelConfig(
    vocab_size=204, n_layer=4, d_model=512, n_head=8, d_head=64, d_inner=2048, mem_len=128
)
"""(a) A plain softmax over characters."""
ADAPTIVE = ModelConfig(
    vocab_size=20_000,
    cutoffs=(2_000, 10_000),
    n_layer=4,
    d_model=410,
    n_head=10,
    d_head=41,
    d_inner=2100,
    mem_len=150,
)
"""(b) Words with an adaptive softmax. Few sizes are multiples of a vector register's width."""
OLD = 10**6
"""An age that makes the whole memory visible."""
PEAK_SIZES = (1024, 2048, 4096)
GENERATION_MEM_LEN, GENERATED_TOKENS = 1600, 4

MFU_LIMITS = {
    "(a) training step, fp32": 0.80,
    "(b) training step, fp32": 0.70,
    # In bf16 the peak is six times that of fp32, but other operations take the same time.
    "(a) training step, bf16": 0.52,
    "(a) evaluation, tgt = mem = 128": 0.80,
    "(a) evaluation, tgt 64, mem 640": 0.68,
}
"""The smallest MFU of each work, by name."""


@dataclass(frozen=True, slots=True)
class Work:
    """A function to time, and its useful operations per call."""

    run: Callable[[], object]
    flops: int


def bench_model(*, rounds: int) -> Iterator[Figure]:
    """Yield each figure as soon as it is measured."""
    keep_freed_memory()
    yield from _utilisations(_training_works("fp32"), torch.float32, rounds)
    if has_bf16():
        yield from _utilisations(_training_works("bf16"), torch.bfloat16, rounds)
    yield from _utilisations(_evaluation_works(), torch.float32, rounds)
    yield _generation_figure(rounds)
    yield from _peak_ram_figure()


def has_bf16() -> bool:
    """Whether this machine has instructions for bfloat16 matrix products."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def _training_works(precision: Precision) -> dict[str, Work]:
    models = (
        {"a": (PLAIN, 128), "b": (ADAPTIVE, 150)} if precision == "fp32" else {"a": (PLAIN, 128)}
    )
    works = {}
    for name, (config, tgt_len) in models.items():
        step = TrainingStep(config, num_lanes=LANES, tgt_len=tgt_len, precision=precision)
        works[f"({name}) training step, {precision}"] = Work(step, step.flops)
    return works


def _evaluation_works() -> dict[str, Work]:
    short, long = replace(PLAIN, mem_len=128), replace(PLAIN, mem_len=640)
    return {
        "(a) evaluation, tgt = mem = 128": evaluation_segment(short, tgt_len=128),
        "(a) evaluation, tgt 64, mem 640": evaluation_segment(long, tgt_len=64),
    }


def _utilisations(works: dict[str, Work], dtype: torch.dtype, rounds: int) -> Iterator[Figure]:
    """The MFU of each work, by name. The peak is that of the fastest square matrix product."""
    matrices = {size: torch.randn(size, size).to(dtype) for size in PEAK_SIZES}
    squares = {f"square {n}": lambda m=m: m @ m for n, m in matrices.items()}
    runs = {name: work.run for name, work in works.items()}
    # The squares alternate with the work, so changes of the clock frequency affect both.
    times = time_rounds({**runs, **squares}, rounds=rounds)
    peak = max(2 * n**3 / times[f"square {n}"].median for n in PEAK_SIZES)
    for name, work in works.items():
        seconds = times[name].median
        note = f"{seconds * 1e3:.1f} ms; peak {peak / 1e9:.0f} GFLOP/s"
        yield Figure(name, work.flops / seconds / peak, "MFU", MFU_LIMITS[name], note=note)


class TrainingStep:
    """Forward, backward, clipping and AdamW on one segment, with a full memory. Call it repeatedly.

    `flops` are those of the matrix products of one call.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_lanes: int,
        tgt_len: int,
        device: torch.device = CPU,
        precision: Precision = "fp32",
        compiled: bool = False,
        cuda_graphs: bool = False,
    ) -> None:
        self._device, self._precision, self._lanes = device, precision, range(num_lanes)
        self._model = TransformerXL(config).to(device)
        if compiled:
            compile_model(self._model, device)
        if cuda_graphs:
            record_layers(self._model, device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        self._memory = self._model.empty_memory(num_lanes)
        self._number = 0
        input_BT, self._target_BT = zipf_segment(config.num_ids, (num_lanes, tgt_len))
        self._input_BT = to_device(input_BT.contiguous(), device)
        self._age_BT = torch.full(input_BT.shape, OLD, dtype=torch.int32, device=device)
        tail_rows = [
            int(((self._target_BT >= low) & (self._target_BT < high)).sum())
            for low, high in config.cluster_bounds[1:]
        ]
        self.flops = training_flops(
            config, num_lanes=num_lanes, tgt_len=tgt_len, tail_rows=tail_rows
        )

    def __call__(self) -> None:
        self._number += 1
        masks = LaneDropoutMasks(seed=0, step=self._number, lanes=self._lanes)
        with autocast(self._precision, self._device):
            nats_BT, self._memory = self._model(
                self._input_BT, self._target_BT, self._age_BT, self._memory, masks
            )
        nats_BT.mean().backward()
        # On CPUs `foreach` takes 9 instead of 6 ms per step of (a), so torch decides by device.
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 0.25)
        self._optimizer.step()
        self._optimizer.zero_grad()


def zipf_segment(num_ids: int, shape_BT: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """(input, target) on the host; an id has a probability proportional to about 1 / (id + 1)."""
    num_lanes, tgt_len = shape_BT
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(num_lanes, tgt_len + 1, generator=generator, dtype=torch.float64)
    text = (num_ids**uniform - 1).long().clamp(max=num_ids - 1)
    return text[:, :-1], text[:, 1:].contiguous()


def evaluation_segment(config: ModelConfig, *, tgt_len: int) -> Work:
    """Score one segment with a KV cache, with a full memory."""
    model = TransformerXL(config)
    input_BT, target_BT = zipf_segment(config.num_ids, (LANES, tgt_len))
    age_BT, cache = torch.full_like(input_BT, OLD), model.inference_state(LANES)

    @torch.no_grad()
    def score() -> None:
        model(input_BT, target_BT, age_BT, cache)

    return Work(score, inference_flops(config, num_lanes=LANES, tgt_len=tgt_len))


def _generation_figure(rounds: int) -> Figure:
    """One token at a time: a KVCache against a memory that is projected for every token."""
    config = replace(PLAIN, mem_len=GENERATION_MEM_LEN)
    model, (input_BT, _) = TransformerXL(config), zipf_segment(config.num_ids, (1, 1))
    age_BT = torch.full_like(input_BT, OLD)
    cache, memory = model.inference_state(1), model.empty_memory(1)

    @torch.no_grad()
    def read(memory: SequenceState) -> None:
        for _ in range(GENERATED_TOKENS):
            hidden_BTD, _ = model.hidden(input_BT, age_BT, memory)
            model.logits(hidden_BTD)

    candidates = {"cache": lambda: read(cache), "memory": lambda: read(memory)}
    times = time_rounds(candidates, rounds=rounds)
    note = f"{times['cache'].median / GENERATED_TOKENS * 1e3:.2f} ms per token"
    ratio = times["memory"].median / times["cache"].median
    name = f"generation, mem {GENERATION_MEM_LEN}, one token at a time"
    return Figure(name, ratio, "x re-projecting", 6.0, note=note)


def _peak_ram_figure() -> Iterator[Figure]:
    mib = peak_mib(_step_of_twelve_layers)
    if mib is not None:
        name = "peak RAM of training above the built model, 12 layers of (a)"
        yield Figure(name, mib, "MiB", 856, at_most=True)


def _step_of_twelve_layers() -> Callable[[], object]:
    return TrainingStep(replace(PLAIN, n_layer=12), num_lanes=LANES, tgt_len=128)
