"""Model FLOPs utilisation (MFU), the speed-up of the KV cache, and peak RAM, on CPUs.

    python benchmarks/model_speed.py [--rounds 10]

MFU = useful operations / time / peak. Useful operations are matrix products: in training all of
them, including the projection of the memory's keys and values; in evaluation neither that
projection nor that of the distances, because a KVCache holds both. The peak is the fastest square
matrix product, measured between the steps of the same run, with the same dtype.
generation_time.py measures what the matrix products of a function take alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from figures import Figure, peak_mib, run_script
from training_step import OLD, TrainingStep, zipf_segment

from txl_dist.analysis.bench import MODEL, time_rounds
from txl_dist.config.run_config import Precision
from txl_dist.model.config import ModelConfig
from txl_dist.model.flops import inference_flops
from txl_dist.model.memory import SequenceState
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.process import keep_freed_memory

# Shapes: B lanes, T segment tokens, D d_model

LANES = 4
PLAIN = replace(MODEL, mem_len=128)
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
    """Whether this CPU has instructions for bfloat16 matrix products."""
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
    peak = max(2 * n**3 / times[f"square {n}"] for n in PEAK_SIZES)
    for name, work in works.items():
        seconds = times[name]
        note = f"{seconds * 1e3:.1f} ms; peak {peak / 1e9:.0f} GFLOP/s"
        yield Figure(name, work.flops / seconds / peak, "MFU", MFU_LIMITS[name], note=note)


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
    note = f"{times['cache'] / GENERATED_TOKENS * 1e3:.2f} ms per token"
    ratio = times["memory"] / times["cache"]
    name = f"generation, mem {GENERATION_MEM_LEN}, one token at a time"
    return Figure(name, ratio, "x re-projecting", 6.0, note=note)


def _peak_ram_figure() -> Iterator[Figure]:
    mib = peak_mib(_step_of_twelve_layers)
    if mib is not None:
        name = "peak RAM of training above the built model, 12 layers of (a)"
        yield Figure(name, mib, "MiB", 856, at_most=True)


def _step_of_twelve_layers() -> Callable[[], object]:
    return TrainingStep(replace(PLAIN, n_layer=12), num_lanes=LANES, tgt_len=128)


if __name__ == "__main__":
    run_script(__doc__, bench_model, rounds=10)
