"""`txl bench model`: how much of the machine the model uses, and what its state of inference saves.

MFU is useful operations / time / peak. Useful are the matrix products that the numbers need: in
training all of them, the projection of the memory's keys and values included; in evaluation not
that projection, nor that of the distances, because both can be kept. The peak is torch's best
square product, measured between the steps of the same run, in the same type. Beside each figure
stands that of the same products without anything else: no form of the model could pass it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from txl_dist.bench.peak_memory import peak_mib
from txl_dist.bench.products import products_alone
from txl_dist.bench.rounds import Figure, Times, take_turns
from txl_dist.model.config import ModelConfig
from txl_dist.model.flops import inference_flops, training_flops
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.model.visibility import mask_scores, visible_keys
from txl_dist.runtime.allocation import keep_freed_memory

# Shapes: B lanes, T segment tokens, M memory tokens, S = M + T keys

LANES = 4
PLAIN = ModelConfig(
    vocab_size=204, n_layer=4, d_model=512, n_head=8, d_head=64, d_inner=2048, mem_len=128
)
"""(a) a plain softmax over characters."""
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
"""(b) words: shapes that are no multiples of anything, and an adaptive softmax."""
OLD = 10**6
"""An age that lets the whole memory be seen."""
PEAK_SIZES = (1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class Work:
    """Something to time, and the useful operations of one run of it."""

    run: Callable[[], object]
    flops: int


def bench_model(*, rounds: int) -> Iterator[Figure]:
    """Every figure, as soon as it is there."""
    keep_freed_memory()
    yield from _training_figures(rounds, torch.float32)
    if has_bf16():
        yield from _training_figures(rounds, torch.bfloat16)
    yield from _evaluation_figures(rounds)
    yield _generation_figure(rounds)
    yield from _memory_figure()


def has_bf16() -> bool:
    """Whether products of bfloat16 have instructions of their own here."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def _training_figures(rounds: int, dtype: torch.dtype) -> Iterator[Figure]:
    short = "bf16" if dtype == torch.bfloat16 else "fp32"
    works = {"(a)": training_step(PLAIN, tgt_len=128, dtype=dtype)}
    limits = {"(a)": 0.52 if dtype == torch.bfloat16 else 0.80, "(b)": 0.70}
    if dtype == torch.float32:
        works["(b)"] = training_step(ADAPTIVE, tgt_len=150, dtype=dtype)
    floors = {f"{name} products": products_alone(work.run) for name, work in works.items()}
    times, peak = _against_peak(works, dtype, rounds, beside=floors)
    for name, work in works.items():
        floor = work.flops / times[f"{name} products"].median / peak
        yield _utilisation(
            f"{name} training step, {short}", work, times[name], peak, limits[name], floor
        )
    if dtype == torch.float32:
        yield _mask_figure(times["(a)"], rounds)


def _evaluation_figures(rounds: int) -> Iterator[Figure]:
    short, long = replace(PLAIN, mem_len=128), replace(PLAIN, mem_len=640)
    works = {
        "tgt = mem = 128": evaluation_segment(short, tgt_len=128),
        "tgt 64, mem 640": evaluation_segment(long, tgt_len=64),
    }
    floors = {f"{name} products": products_alone(work.run) for name, work in works.items()}
    times, peak = _against_peak(works, torch.float32, rounds, beside=floors)
    for (name, work), limit in zip(works.items(), (0.80, 0.68), strict=True):
        floor = work.flops / times[f"{name} products"].median / peak
        yield _utilisation(f"(a) evaluation, {name}", work, times[name], peak, limit, floor)


def _utilisation(
    name: str, work: Work, times: Times, peak: float, limit: float, floor: float
) -> Figure:
    note = f"products alone {floor:.3f}; {times.median * 1e3:.1f} ms; peak {peak / 1e9:.0f} GFLOP/s"
    return Figure(name, work.flops / times.median / peak, "MFU", limit, note=note)


def _against_peak(
    works: dict[str, Work],
    dtype: torch.dtype,
    rounds: int,
    *,
    beside: Mapping[str, Callable[[], object]],
) -> tuple[dict[str, Times], float]:
    """Times of all work, and the best operations a second of square products between them."""
    matrices = {size: torch.randn(size, size).to(dtype) for size in PEAK_SIZES}
    products = {f"product {n}": lambda m=m: m @ m for n, m in matrices.items()}
    runs = {name: work.run for name, work in works.items()}
    times = take_turns({**runs, **beside, **products}, rounds=rounds)
    peak = max(2 * n**3 / times[f"product {n}"].median for n in PEAK_SIZES)
    return times, peak


def training_step(config: ModelConfig, *, tgt_len: int, dtype: torch.dtype) -> Work:
    """Forward, backward, clipping and AdamW on segments whose memory is full."""
    model = TransformerXL(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    input_BT, target_BT, age_BT = _segment(config, tgt_len)
    memory = model.empty_memory(LANES)

    def step() -> None:
        nonlocal memory
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            nats_BT, memory = model(input_BT, target_BT, age_BT, memory)
        nats_BT.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25, foreach=False)
        optimizer.step()
        optimizer.zero_grad()

    flops = training_flops(
        config, num_lanes=LANES, tgt_len=tgt_len, tail_rows=_tail_rows(config, target_BT)
    )
    return Work(step, flops)


def evaluation_segment(config: ModelConfig, *, tgt_len: int) -> Work:
    """Score one segment with the state of inference, memory full."""
    model, (input_BT, target_BT, age_BT) = TransformerXL(config), _segment(config, tgt_len)
    state = model.empty_state(LANES)

    @torch.no_grad()
    def score() -> None:
        model(input_BT, target_BT, age_BT, state)

    return Work(score, inference_flops(config, num_lanes=LANES, tgt_len=tgt_len))


def _generation_figure(rounds: int, *, mem_len: int = 1600, tokens: int = 4) -> Figure:
    """One token at a time with keys and values kept, against projecting the memory every time."""
    config = replace(PLAIN, mem_len=mem_len)
    model, (input_BT, _, age_BT) = TransformerXL(config), _segment(config, 1, lanes=1)
    state, memory = model.empty_state(1), model.empty_memory(1)

    @torch.no_grad()
    def read(past: object) -> None:
        for _ in range(tokens):
            hidden_BTD, _ = model.hidden(input_BT, age_BT, past)  # type: ignore[arg-type]
            model.logits(hidden_BTD)

    times = take_turns({"kept": lambda: read(state), "again": lambda: read(memory)}, rounds=rounds)
    note = f"{times['kept'].median / tokens * 1e3:.2f} ms a token"
    ratio = times["again"].median / times["kept"].median
    return Figure(
        f"generation, mem {mem_len}, one token at a time", ratio, "x re-projecting", 6.0, note=note
    )


def _mask_figure(step: Times, rounds: int) -> Figure:
    """What it costs that every token has a reach of its own: making the mask and adding it."""
    _, _, age_BT = _segment(PLAIN, 128)
    score_HBTS = torch.zeros(PLAIN.n_head, LANES, 128, 128 + PLAIN.mem_len)

    def mask() -> Tensor:
        visible_BTS = visible_keys(age_BT, mem_len=PLAIN.mem_len, same_length=False)
        mask_BTS = mask_scores(visible_BTS, torch.float32)
        for _ in range(PLAIN.n_layer):
            masked = score_HBTS + mask_BTS
        return masked

    times = take_turns({"mask": mask}, rounds=rounds)
    share = times["mask"].median / step.median
    return Figure("(a) age masks, share of the fp32 training step", share * 100, "%")


def _memory_figure() -> Iterator[Figure]:
    mib = peak_mib(_step_of_twelve_layers)
    if mib is not None:
        name = "peak training memory above the built model, 12 layers of (a)"
        yield Figure(name, mib, "MiB", 856, at_most=True)


def _step_of_twelve_layers() -> Callable[[], object]:
    return training_step(replace(PLAIN, n_layer=12), tgt_len=128, dtype=torch.float32).run


def _segment(
    config: ModelConfig, tgt_len: int, *, lanes: int = LANES
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens whose ids are rarer the higher they are, as in a sorted vocabulary, and old ages."""
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(lanes, tgt_len + 1, generator=generator)
    text = (config.vocab_size**uniform - 1).long().clamp(max=config.vocab_size - 1)
    age_BT = torch.full((lanes, tgt_len), OLD)
    return text[:, :-1], text[:, 1:], age_BT


def _tail_rows(config: ModelConfig, target_BT: Tensor) -> list[int]:
    """Targets in each cluster beside the shortlist."""
    return [
        int(((target_BT >= low) & (target_BT < high)).sum())
        for low, high in config.cluster_bounds[1:]
    ]
