"""SequenceReader: reads texts with a model, segment by segment, and keeps the state between them.

    reader = SequenceReader(model, state=model.inference_state(num_rows), tgt_len=128)
    for segment in segments:
        nats_BT = reader.score(segment.input_BT, segment.target_BT, segment.age_BT)

Everything that reads without training goes through it: evaluation, lm-evaluation-harness, RECL,
attention, generation, and replay, whose state is a memory of training. The caller decides which
tokens a segment has, with which ages. A step of training is not here: its forward belongs to the
engine, and its next state counts only if all ranks accept the step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import pad

from data_pipeline.streams.segments import IGNORED
from txl_dist.config.run_config import Precision
from txl_dist.model.attention import AttentionWeightsCallback
from txl_dist.model.devices import to_device
from txl_dist.model.memory import SequenceState
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.device import autocast

# Shapes: B rows, T segment tokens, N tokens of a row, X positions, D d_model, V vocabulary


class SequenceReader:
    """Reads B rows that advance together; each row has its own lane of the state."""

    def __init__(
        self,
        model: TransformerXL,
        *,
        state: SequenceState,
        tgt_len: int,
        precision: Precision = "fp32",
    ) -> None:
        """`state`: what the rows have read before; it is replaced by every segment.

        `tgt_len`: tokens of a segment, which may have fewer.
        """
        self.model, self.state, self.tgt_len, self.precision = model, state, tgt_len, precision
        self.device = next(model.parameters()).device

    def read(
        self,
        input_BT: Tensor,
        age_BT: Tensor,
        *,
        on_attention_weights: AttentionWeightsCallback | None = None,
    ) -> Tensor:
        """Read a segment; the last layer's output, [B, T, D]."""
        num_tokens = input_BT.shape[1]
        input_BT, age_BT = self._whole(input_BT, 0), self._whole(age_BT, 0)
        with self.inference():
            hidden_BTD, self.state = self.model.hidden(
                to_device(input_BT, self.device),
                to_device(age_BT, self.device),
                self.state,
                on_attention_weights=on_attention_weights,
            )
        return hidden_BTD[:, :num_tokens]

    def score(self, input_BT: Tensor, target_BT: Tensor, age_BT: Tensor) -> Tensor:
        """Read a segment; nats [B, T] of its targets, 0 where a target is IGNORED."""
        num_tokens = input_BT.shape[1]
        input_BT, age_BT = self._whole(input_BT, 0), self._whole(age_BT, 0)
        with self.inference():
            # Targets stay on the host: the softmax finds the rows of its clusters there.
            nats_BT, self.state = self.model(
                to_device(input_BT, self.device),
                self._whole(target_BT, IGNORED),
                to_device(age_BT, self.device),
                self.state,
            )
        scored_BT: Tensor = nats_BT[:, :num_tokens]
        return scored_BT

    def read_rows(
        self, input_BN: Tensor, *, whole_last_segment: bool = False
    ) -> Iterator[tuple[slice, Tensor]]:
        """Read whole rows from an empty state; yields the columns and the output of each segment.

        If N is no multiple of `tgt_len`, the last segment is shorter, or with `whole_last_segment`
        the first one.
        """
        num_tokens = input_BN.shape[1]
        start, stop = 0, min(self.tgt_len, num_tokens)
        if whole_last_segment:
            stop = num_tokens % self.tgt_len or stop
        while start < num_tokens:
            input_BT = input_BN[:, start:stop]
            age_T = torch.arange(start, stop, device=input_BN.device)
            yield slice(start, stop), self.read(input_BT, age_T.expand_as(input_BT))
            start, stop = stop, min(stop + self.tgt_len, num_tokens)

    def select(self, rows: Sequence[int], num_removed: Sequence[int]) -> None:
        """Keep these rows, in this order, each without its newest `num_removed` tokens.

        At most the tokens of the last segment can be removed. So rows can read segments of
        different lengths: pad them at the end, and remove the padding.
        """
        self.state = self.state.select(rows, num_removed)

    def nats(self, hidden_BXD: Tensor, target_BX: Tensor) -> Tensor:
        """Nats [B, X] of targets after outputs of `read`, 0 where a target is IGNORED."""
        with self.inference():
            nats_BX: Tensor = self.model.softmax(hidden_BXD, target_BX, self.model.table)
        return nats_BX

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """Logits of the next token after outputs of `read`, [B, V]."""
        with self.inference():
            return self.model.logits(hidden_BD)

    @contextmanager
    def inference(self) -> Iterator[None]:
        """A context without gradients, in the reader's precision."""
        with torch.no_grad(), autocast(self.precision, self.device):
            yield

    def _whole(self, tensor_BT: Tensor, fill: int) -> Tensor:
        """The segment, for a model without memory padded at its end to `tgt_len`.

        Such a model counts positions from the end of the segment, as in training. No token sees the
        padding, which is after it.
        """
        missing = self.tgt_len - tensor_BT.shape[1]
        if self.model.config.encoding.allows_memory or missing <= 0:
            return tensor_BT
        return pad(tensor_BT, (0, missing), value=fill)
