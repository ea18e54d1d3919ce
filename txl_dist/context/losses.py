"""Losses of one model at several context lengths, on the same targets for every context."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline.shards.shard_reader import TokenSource
from data_pipeline.streams.cursor import read_range
from txl_dist.context.positions import Positions
from txl_dist.context.windows import WindowScorer

# Shapes: B windows of a batch, C contexts, N targets, S = longest context + 1


def measure_losses(
    scorer: WindowScorer,
    source: TokenSource,
    positions: Positions,
    contexts: Sequence[int],
    *,
    batch_windows: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> NDArray[np.float64]:
    """Nats [C, N] of every target after exactly c tokens, for rising `contexts`.

    Contexts above the model's `max_context` have the loss of `max_context`. Calls
    `on_progress(tokens read, tokens to read)`. Raises CheckpointError if a loss
    is not finite.
    """
    useful = useful_contexts(contexts, scorer.max_context)
    losses_CN = np.empty((len(useful), len(positions)))
    done, total = 0, sum(useful) * len(positions)
    for columns, token_BS in _batches(source, positions, contexts[-1], batch_windows):
        for row, context in enumerate(useful):
            nats_B1 = scorer.last_nats(token_BS[:, -context - 1 :])
            losses_CN[row, columns] = nats_B1[:, 0].double().numpy()
            done += context * len(token_BS)
            on_progress(done, total)
    repeated = [losses_CN[-1:]] * (len(contexts) - len(useful))
    return np.concatenate([losses_CN, *repeated])


def useful_contexts(contexts: Sequence[int], max_context: int) -> list[int]:
    """The contexts that a model has to read: longer ones than its `max_context` change nothing."""
    useful = [context for context in contexts if context <= max_context]
    return useful if len(useful) == len(contexts) else [*useful, max_context]


def _batches(
    source: TokenSource, positions: Positions, context: int, batch_windows: int
) -> Iterator[tuple[slice, Tensor]]:
    """Which targets, and their windows of `context` tokens with the target, [B, S]."""
    for start in range(0, len(positions), batch_windows):
        columns = slice(start, start + batch_windows)
        windows: list[NDArray[Any]] = []
        for target in positions.target_N[columns].tolist():
            token_S, _ = read_range(source, target - context, target + 1)
            windows.append(token_S)
        yield columns, torch.from_numpy(np.stack(windows))
