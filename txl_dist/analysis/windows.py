"""The loss of sampled targets after exactly c tokens: a model reads those c tokens, nothing else.

A model that reads on with `mem_len` = c sees more than c tokens, through its lower layers. Here
every window starts with an empty memory. Inside it the model works as in `txl eval`: segments of
`tgt_len` tokens with a memory of `mem_len`. The last segment ends at the target's input, so that
the target has the longest attention span, mem_len + tgt_len; only the first segment may be shorter.
More context than `max_context` tokens cannot change a loss, and is not read. A model without memory
reads one segment: after c tokens it predicts from position c, as in training.

All models and contexts are compared on the same targets, so each target needs the longest context
before it: with `reset: document` in its document, which excludes end-of-document tokens. The sample
is stratified: the eligible targets are cut into N ranges of equal size, and a hash of the seed
chooses one of each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline.shards.shard_reader import TokenSource
from data_pipeline.streams.order import hash_ids
from data_pipeline.streams.segments import Reset, read_range
from txl_dist.config.run_config import Precision
from txl_dist.errors import CheckpointError, DataError
from txl_dist.model.memory import memory_kind
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.sequence import SequenceReader

# Shapes: N positions


@dataclass(frozen=True, slots=True, eq=False)
class Positions:
    """Sampled targets of one split, in corpus order."""

    target_N: NDArray[np.int64]
    """Position of the target token in the split."""
    document_N: NDArray[np.int64]
    """Number of its document in the split."""

    def __len__(self) -> int:
        return len(self.target_N)


def sample_positions(
    source: TokenSource, *, context: int, num_positions: int, seed: int, reset: Reset
) -> Positions:
    """At most `num_positions` targets that have `context` tokens before them.

    With reset `document`, these tokens are in the document of the target. Raises DataError if there
    is no such target.
    """
    block_starts = np.cumsum(source.block_tokens) - source.block_tokens
    document_starts = np.concatenate(
        [
            np.empty(0, np.int64),
            *(
                start + source.document_starts(block)
                for block, start in enumerate(block_starts.tolist())
            ),
        ]
    )
    starts = document_starts if reset == "document" else np.zeros(1, np.int64)
    lengths = np.diff(np.append(starts, int(source.block_tokens.sum())))
    eligible = np.maximum(lengths - context, 0)
    stops = np.cumsum(eligible)
    total = int(stops[-1]) if len(stops) else 0
    if total == 0:
        longest = int(lengths.max(initial=0))
        kind = "document" if reset == "document" else "split"
        raise DataError(
            f"no token has {context} tokens of context before it: the longest {kind} holds "
            f"{longest} tokens. Take shorter contexts (--max-context {max(1, longest - 1)} or "
            "less), or a split with longer documents"
        )
    # One target of each of equal ranges of the eligible ones.
    num_samples = min(num_positions, total)
    edges = np.array([total * k // num_samples for k in range(num_samples + 1)], np.int64)
    offset_N = hash_ids(seed, num_ids=num_samples) % np.diff(edges).astype(np.uint64)
    number_N = edges[:-1] + offset_N.astype(np.int64)
    text_N = np.searchsorted(stops, number_N, side="right")
    target_N = starts[text_N] + context + number_N - (stops - eligible)[text_N]
    document_N = np.searchsorted(document_starts, target_N, side="right") - 1
    return Positions(target_N, document_N)


# Shapes: B windows, N tokens of a window with its target, T segment tokens, X scored targets


UNLIMITED = 2**31


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowScorer:
    """Scores the last targets of windows with one model."""

    model: TransformerXL
    tgt_len: int
    precision: Precision = "fp32"

    @property
    def max_context(self) -> int:
        """Tokens before a target that can influence its loss, as the last segment ends before it.

        UNLIMITED for a memory that may depend on any earlier token.
        """
        reach = memory_kind(self.model.config).receptive_tokens(self.tgt_len)
        return UNLIMITED if reach is None else self.tgt_len + reach

    def last_nats(self, token_BN: Tensor, *, num_scored: int = 1) -> Tensor:
        """Nats [B, num_scored] of the last tokens of each window, on the CPU.

        The last token is scored after the N - 1 tokens before it, or after `max_context` of them.
        Raises CheckpointError if a loss is NaN or Inf.
        """
        if not 0 < num_scored < token_BN.shape[1]:
            raise ValueError(f"num_scored={num_scored} must be in 1 .. {token_BN.shape[1] - 1}")
        # The last token reaches back `max_context` inputs, and the first one of an earlier segment
        # as far from that segment's end.
        earlier = -(-(num_scored - 1) // self.tgt_len) * self.tgt_len
        input_BN = token_BN[:, :-1][:, -(self.max_context + earlier) :]
        num_inputs = input_BN.shape[1]
        # Keys that would be masked, because the window is shorter than the memory, are left out.
        state = self.model.inference_state(len(token_BN), max_tokens=num_inputs - self.tgt_len)
        reader = SequenceReader(
            self.model, state=state, tgt_len=self.tgt_len, precision=self.precision
        )
        segments = reader.read_rows(input_BN.to(reader.device), whole_last_segment=True)
        outputs = [
            hidden_BTD for columns, hidden_BTD in segments if columns.stop > num_inputs - num_scored
        ]
        hidden_BXD = torch.cat(outputs, dim=1)[:, -num_scored:]
        target_BX = token_BN[:, -num_scored:].to(reader.device)
        nats_BX = reader.nats(hidden_BXD, target_BX).cpu()
        if not nats_BX.isfinite().all():
            raise CheckpointError(
                f"the loss after {num_inputs} tokens is NaN or Inf: the weights are damaged, or "
                "the model overflows on this text. Try an earlier checkpoint: txl checkpoint list "
                "RUN"
            )
        return nats_BX


def measure_losses(
    scorer: WindowScorer,
    source: TokenSource,
    positions: Positions,
    contexts: Sequence[int],
    *,
    batch_windows: int,
    on_batch: Callable[[int], None] = lambda num_targets: None,
) -> NDArray[np.float64]:
    """Nats [C, N] of every target after exactly c tokens, for rising `contexts`.

    Contexts above the model's `max_context` have the loss of `max_context`. Calls
    `on_batch(number of targets)` after each batch. Raises CheckpointError if a loss is NaN or Inf.
    """
    read_contexts = sorted({min(context, scorer.max_context) for context in contexts})
    losses_CN = np.empty((len(read_contexts), len(positions)))
    for start in range(0, len(positions), batch_windows):
        columns = slice(start, start + batch_windows)
        targets = positions.target_N[columns].tolist()
        windows = [read_range(source, t - contexts[-1], t + 1)[0] for t in targets]
        token_BS = torch.from_numpy(np.stack(windows))
        for row, context in enumerate(read_contexts):
            nats_B1 = scorer.last_nats(token_BS[:, -context - 1 :])
            losses_CN[row, columns] = nats_B1[:, 0].double().numpy()
        on_batch(len(targets))
    repeated = [losses_CN[-1:]] * (len(contexts) - len(read_contexts))
    return np.concatenate([losses_CN, *repeated])
