"""What a user measures of a model: speed (`txl bench eval-speed`) and reach (`txl bench recall`).

eval-speed: what reusing states saves over a sliding window, with one set of weights.

For an attention length L, both paths score tokens of which each attends to about L tokens:

    reuse     segments of tgt_len tokens with a KV cache of L tokens, as txl eval reads:
              every token attends to L tokens of memory and the earlier ones of its segment
    window    for every single token, the L tokens before it are read as one segment, and the
              softmax is computed at the last position only (analysis/windows.py)

The window path computes all pairs of query and key, as the model does in a segment, also those that
causality masks. So the ratio is larger than against a window path that skips them. The figure to
compare does not depend on how many operations a window needs:

    share = (window time / reuse time) / (window FLOPs / reuse FLOPs)
          = (FLOP/s of the reuse path) / (FLOP/s of the window path)

It is below 1 if the reuse path uses the machine less well than the window path. FLOPs are those of
the matrix products that each path executes (model/flops.py).

Windows are sampled: one batch of windows per round, alternating with segments of the reuse path in
one process: clock frequency and other load change over minutes, so only ratios of candidates that
alternate are comparable. On a CPU both run on one thread, and times are CPU times, which do not
count while other processes run. Times are medians, which ignore a few disturbed rounds. The paper's
ratios (table 9) are of another model on one GPU.

Sources: Dai et al. 2019, arXiv:1901.02860, section 4.5; the window path of Al-Rfou et al. 2018,
arXiv:1808.04444.

recall: up to which distance does a trained model copy a repeated span? One sequence has
`2 * SPAN + max_distance` tokens, and ends with a span of SPAN tokens:

    control        text ........................................ text SPAN
    distance d     text ........ SPAN ...... d - SPAN tokens .... text SPAN

Both are the same tokens, except that at distance d the span also occurs d tokens earlier, where the
control has text. A model that uses the first occurrence predicts the second one better. The first
CUE tokens of the second span are not scored: before them, nothing indicates a repetition. The
loss of the other `SPAN - CUE` tokens is averaged over all sequences, at each distance and in the
control; the gain is the difference, and its interval is a bootstrap over sequences.

Text and spans are uniformly random token ids, so nothing but the first occurrence helps the
prediction. How much context helps on real text is measured by `txl recl`.

The model reads a sequence from an empty memory, in segments of `tgt_len` tokens with its memory, as
in `txl eval`; the last segment ends with the last scored token (analysis/windows.py). It therefore
cannot use more than `max_context` tokens. A model without memory sees its last `tgt_len` tokens.

The reach is the largest distance up to which every measured distance gains at least `MIN_SHARE` of
the control's loss; 0 if the first one does not.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline.streams.order import hash_ids
from txl_dist.analysis.windows import WindowScorer
from txl_dist.errors import ConfigError
from txl_dist.evaluation.breakdown import interval, plan_resampling, resamples
from txl_dist.model.config import ModelConfig
from txl_dist.model.flops import inference_flops, window_flops
from txl_dist.model.memory.recurrent import KVCache
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.device import synchronize, torch_threads
from txl_dist.runtime.process import keep_freed_memory
from txl_dist.sequence import SequenceReader

# Shapes: B lanes, windows or sequences, L window tokens, T tokens of a segment, N tokens of a text,
# X tokens of a span, D distances

# --- speed ----------------------------------------------------------------------------------------

MODEL = ModelConfig(
    vocab_size=204, n_layer=4, d_model=512, n_head=8, d_head=64, d_inner=2048, mem_len=0
)
"""The model without a checkpoint; the benchmark chooses the memory."""
LIMIT = 0.8
MAX_SHARE = 1.25
"""Above it the window path reaches so few FLOP/s that the time ratio does not count."""
PAPER_RATIOS = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
"""Attention length -> times slower per token than with state reuse; table 9 of the paper."""
WINDOWS = {"cpu": 1, "cuda": 4}
"""Windows per batch. One window is enough to keep a CPU thread busy."""
LANES = {"cpu": 4, "cuda": 16}
"""Lanes of the reuse path."""
REUSE_TOKENS = 256
"""Tokens per lane in one round of the reuse path. Rounds continue one text. The memory is moved
every L / 4 tokens (memory/recurrent.py), which takes less than 1 % of the time of these tokens."""


def time_rounds(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warm_up_rounds: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of every candidate, each run once in `rounds` rounds after the warm-up.

    Rounds of the warm-up are not counted: the process still allocates RAM in them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(warm_up_rounds + rounds):
        for name, run in candidates.items():
            began = clock()
            run()
            if number >= warm_up_rounds:
                seconds[name].append(clock() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedRow:
    """The two paths at one attention length; times in milliseconds per scored token."""

    attention_length: int
    tgt_len: int
    ms_per_token_window: float
    ms_per_token_reuse: float
    ratio: float
    paper_ratio: float | None
    flops_ratio: float
    share_of_flops_ratio: float
    limit: float
    holds: bool


class _Path(NamedTuple):
    run: Callable[[], object]
    num_tokens: int
    flops: float
    """Operations per token."""


def bench_eval_speed(
    model: TransformerXL,
    *,
    attention_lengths: Sequence[int],
    tgt_len: int,
    rounds: int,
) -> Iterator[SpeedRow]:
    """Yield one row per attention length. `mem_len` of the model is not used.

    Raises ConfigError for a model that cannot reuse states of a given number of tokens.
    """
    config = model.config
    has_tokens = config.encoding.allows_memory and config.memory_facts.keys_are_tokens
    if not has_tokens or config.same_length:
        raise ConfigError(
            "eval-speed compares a memory of a given number of tokens with windows of as many. "
            f"distance_encoding={config.distance_encoding}, memory={config.memory}, same_length="
            f"{config.same_length} is no such memory; use a checkpoint of a recurrent memory"
        )
    keep_freed_memory()
    generator = torch.Generator().manual_seed(0)
    with torch_threads(1):
        for length in attention_lengths:
            yield _row(model, length, tgt_len, rounds, generator)


def _row(
    model: TransformerXL, length: int, tgt_len: int, rounds: int, generator: torch.Generator
) -> SpeedRow:
    device = model.weight.device
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    window = _window_path(model, length, generator)
    reuse = _reuse_path(model, length, tgt_len, generator)
    candidates = {"window": window.run, "reuse": reuse.run}
    times = time_rounds(candidates, rounds=rounds, warm_up_rounds=1, clock=clock)
    window_ms = 1e3 * times["window"] / window.num_tokens
    reuse_ms = 1e3 * times["reuse"] / reuse.num_tokens
    ratio, flops_ratio = window_ms / reuse_ms, window.flops / reuse.flops
    return SpeedRow(
        attention_length=length,
        tgt_len=tgt_len,
        ms_per_token_window=window_ms,
        ms_per_token_reuse=reuse_ms,
        ratio=ratio,
        paper_ratio=PAPER_RATIOS.get(length),
        flops_ratio=flops_ratio,
        share_of_flops_ratio=ratio / flops_ratio,
        limit=LIMIT,
        holds=LIMIT <= ratio / flops_ratio <= MAX_SHARE,
    )


def _window_path(model: TransformerXL, length: int, generator: torch.Generator) -> _Path:
    scorer = WindowScorer(model=model, tgt_len=length)
    num_windows = WINDOWS[model.weight.device.type]
    text_N = _random_text(model, 2 * length + 1, generator)

    def run() -> None:
        starts = torch.randint(length, (num_windows,), generator=generator).tolist()
        scorer.last_nats(torch.stack([text_N[start : start + length + 1] for start in starts]))

    return _Path(run, num_windows, window_flops(model.config, window_len=length))


def _reuse_path(
    model: TransformerXL, length: int, tgt_len: int, generator: torch.Generator
) -> _Path:
    lanes = LANES[model.weight.device.type]
    config = replace(model.config, mem_len=length, mem_shares=())
    reader = SequenceReader(model, state=KVCache.empty(config, lanes), tgt_len=tgt_len)
    num_segments = max(1, REUSE_TOKENS // tgt_len)
    text_N = _random_text(model, lanes * (num_segments * tgt_len + 1), generator)
    text_BN = text_N.view(lanes, -1)
    # Old enough that the whole memory is visible: its zeros cost as much as any other keys.
    age_BT = torch.full((lanes, tgt_len), length + tgt_len, device=text_N.device)

    def run() -> None:
        for start in range(0, num_segments * tgt_len, tgt_len):
            stop = start + tgt_len
            reader.score(text_BN[:, start:stop], text_BN[:, start + 1 : stop + 1], age_BT)
        synchronize(reader.device)

    num_tokens = lanes * tgt_len
    flops = inference_flops(config, num_lanes=lanes, tgt_len=tgt_len) / num_tokens
    return _Path(run, num_segments * num_tokens, flops)


def _random_text(model: TransformerXL, num_tokens: int, generator: torch.Generator) -> Tensor:
    """Uniformly random ids. The work depends on them only through an adaptive softmax."""
    text_N = torch.randint(model.config.num_ids, (num_tokens,), generator=generator)
    return text_N.to(model.weight.device)


# --- reach ----------------------------------------------------------------------------------------

SPAN, CUE = 16, 4
NUM_SEQUENCES = 32
MIN_SHARE = 0.1
NUM_RESAMPLES = 500


@dataclass(frozen=True, slots=True)
class RecallRow:
    """One distance: mean nats per scored token, and the gain over the control with its interval."""

    distance: int
    nats: float
    gain: float
    low: float
    high: float
    share: float
    """The gain as a fraction of the control's loss."""


@dataclass(frozen=True, slots=True)
class RecallResult:
    control_nats: float
    rows: tuple[RecallRow, ...]
    reach: int
    min_share: float = MIN_SHARE


def measure_recall(
    scorer: WindowScorer,
    distances: Sequence[int],
    *,
    seed: int,
    excluded: Sequence[int] = (),
    batch_windows: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> RecallResult:
    """Losses of the second span at every distance and without a first one.

    `distances` rise, and are from the first token of the first occurrence to that of the second.
    `excluded` ids do not occur. Raises ConfigError for other distances.
    """
    if sorted({*distances}) != [*distances] or distances[0] < SPAN:
        raise ConfigError(
            f"--distances {','.join(map(str, distances))}: expected rising numbers of at least "
            f"{SPAN} tokens, the length of the span, or its occurrences would overlap"
        )
    vocab_size = scorer.model.config.num_ids
    text_BN, span_BX = random_text(distances[-1], vocab_size, seed=seed, excluded=excluded)
    conditions: list[int | None] = [None, *distances]
    means = np.empty((len(conditions), len(text_BN)))
    for row, distance in enumerate(conditions):
        sequence_BN = torch.from_numpy(place_spans(text_BN, span_BX, distance))
        losses = [
            scorer.last_nats(batch_BN, num_scored=SPAN - CUE)
            for batch_BN in sequence_BN.split(batch_windows)
        ]
        means[row] = torch.cat(losses).double().mean(dim=1).numpy()
        on_progress(row + 1, len(conditions))
    gains_DB, control = means[0] - means[1:], float(means[0].mean())
    each = np.arange(len(text_BN))
    plan = plan_resampling(each, num_resamples=NUM_RESAMPLES, seed=seed)
    resampled = np.stack([gains_DB[:, indices].mean(axis=1) for indices in resamples(each, plan)])
    rows = []
    for number, distance in enumerate(distances):
        nats, gain = float(means[1 + number].mean()), float(gains_DB[number].mean())
        low, high = interval(resampled[:, number])
        rows.append(RecallRow(distance, nats, gain, low, high, gain / control))
    reached = takewhile(lambda row: row.share >= MIN_SHARE, rows)
    return RecallResult(control, tuple(rows), max((row.distance for row in reached), default=0))


def place_spans(
    text_BN: NDArray[np.int64], span_BX: NDArray[np.int64], distance: int | None
) -> NDArray[np.int64]:
    """The text with the span at its end and, unless `distance` is None, that much earlier."""
    sequence_BN, size = text_BN.copy(), span_BX.shape[1]
    num_tokens = text_BN.shape[1]
    sequence_BN[:, num_tokens - size :] = span_BX
    if distance is not None:
        sequence_BN[:, num_tokens - size - distance : num_tokens - distance] = span_BX
    return sequence_BN


def random_text(
    max_distance: int, vocab_size: int, *, seed: int, excluded: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Uniformly random texts [B, N] and spans [B, X] without the `excluded` ids."""
    allowed = np.setdiff1d(np.arange(vocab_size), np.array(excluded, np.int64))
    num_tokens = 2 * SPAN + max_distance
    hashes = hash_ids(seed, num_ids=NUM_SEQUENCES * (num_tokens + SPAN))
    tokens = allowed[(hashes % np.uint64(len(allowed))).astype(np.int64)]
    tokens = tokens.reshape(NUM_SEQUENCES, -1)
    return tokens[:, :num_tokens], tokens[:, num_tokens:]
