"""The loss of a target after exactly c tokens: the model reads a window of c tokens, nothing else.

A model that reads a longer text with `mem_len` = c sees more than c tokens: each layer's memory was
computed from tokens before it. Here every window starts with an empty memory, so nothing older than
c tokens can influence the loss.

Inside its window the model works as in `txl eval`: it reads segments of `tgt_len` tokens with its
memory of `mem_len` tokens. The last segment ends at the target's input, so that the target has the
longest attention span of the model, mem_len + tgt_len; only the first segment may be shorter. If
c > mem_len + tgt_len, older tokens of the window act through the memory of lower layers only.

A model without memory reads one segment, and with absolute positions it is padded at the end to
`tgt_len` (no earlier token sees the padding): after c tokens it predicts as in training, from
position c of a segment.

More context than `max_context` tokens cannot change a loss, and is not read.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from txl_dist.config.run_config import Precision
from txl_dist.errors import CheckpointError
from txl_dist.model.config import ModelConfig
from txl_dist.model.memory import memory_kind
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.device import autocast

# Shapes: B windows, N tokens of a window with its target, T segment tokens, X scored targets


def max_context(config: ModelConfig, tgt_len: int) -> int:
    """Tokens before a target that can influence its loss, if the last segment ends before it."""
    reach = memory_kind(config).receptive_tokens(tgt_len)
    return UNLIMITED if reach is None else tgt_len + reach


UNLIMITED = 2**31
"""`max_context` of a memory that may depend on any earlier token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowScorer:
    """Scores the last targets of windows with one model."""

    model: TransformerXL
    tgt_len: int
    precision: Precision = "fp32"

    @property
    def max_context(self) -> int:
        return max_context(self.model.config, self.tgt_len)

    def last_nats(self, token_BN: Tensor, *, num_scored: int = 1) -> Tensor:
        """Nats [B, num_scored] of the last tokens of each window, on the CPU.

        The last token is scored after the N - 1 tokens before it, or after `max_context` of them.
        Raises CheckpointError if a loss is not finite.
        """
        if not 0 < num_scored < token_BN.shape[1]:
            raise ValueError(f"num_scored={num_scored} must be in 1 .. {token_BN.shape[1] - 1}")
        device = next(self.model.parameters()).device
        token_BN = token_BN.to(device)
        with torch.no_grad(), autocast(self.precision, device):
            # The last token reaches back `max_context` inputs, and the first one of an earlier
            # segment as far from that segment's end.
            earlier = -(-(num_scored - 1) // self.tgt_len) * self.tgt_len
            input_BN = token_BN[:, :-1][:, -(self.max_context + earlier) :]
            hidden_BXD = self._last_hidden(input_BN, num_scored)
            target_BX = token_BN[:, -hidden_BXD.shape[1] :]
            nats_BX = self.model.softmax(hidden_BXD, target_BX, self.model.table).cpu()
        if not nats_BX.isfinite().all():
            raise CheckpointError(
                f"the loss after {input_BN.shape[1]} tokens is not finite: the weights are "
                "damaged, or the model overflows on this text. Try an earlier checkpoint: txl "
                "checkpoint list RUN"
            )
        return nats_BX

    def _last_hidden(self, input_BN: Tensor, num_scored: int) -> Tensor:
        """The last layer's outputs for the last `num_scored` inputs."""
        num_inputs = input_BN.shape[1]
        outputs = []
        # Keys that would be masked, because the window is shorter than the memory, are left out.
        cache = self.model.inference_state(len(input_BN), max_tokens=num_inputs - self.tgt_len)
        for start, stop in self._segments(num_inputs):
            input_BT = input_BN[:, start:stop]
            # Without memory, positions count from the segment's end.
            if not self.model.config.encoding.allows_memory:
                padding = self.tgt_len - (stop - start)
                input_BT = torch.nn.functional.pad(input_BT, (0, padding))
            age_T = torch.arange(start, start + input_BT.shape[1], device=input_BN.device)
            hidden_BTD, _ = self.model.hidden(input_BT, age_T.expand_as(input_BT), cache)
            if stop > num_inputs - num_scored:
                outputs.append(hidden_BTD[:, : stop - start])
        return torch.cat(outputs, dim=1)[:, -num_scored:]

    def _segments(self, num_inputs: int) -> Iterator[tuple[int, int]]:
        """[start, stop) of each segment; all but the first have `tgt_len` tokens."""
        stop = num_inputs % self.tgt_len or min(self.tgt_len, num_inputs)
        start = 0
        while start < num_inputs:
            yield start, stop
            start, stop = stop, stop + self.tgt_len
