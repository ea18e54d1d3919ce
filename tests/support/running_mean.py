"""A third kind of memory, which only the tests have: the mean of the inputs of each layer so far.

It differs from the paper's in most that the interface allows: a token may depend on any earlier one
of its document, the state is never narrower than fp32, and attention sees one key, whatever the
number of tokens that it is made of. Importing this module registers it as `model.memory:
running_mean`, also in the processes of ranks, which import the functions that they run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from txl_dist.model.choices import MEMORY_KINDS, MemoryFacts
from txl_dist.model.memory import MemoryKind, SequenceState

MEMORY_KINDS["running_mean"] = MemoryFacts(
    implementation="tests.support.running_mean:RunningMean", settings=()
)
KINDS = list(MEMORY_KINDS)


def overrides_of(kind: str) -> tuple[str, ...]:
    """Overrides of a run whose steps of three tokens have gradients for the kind."""
    segments = ("training.backprop_segments=3",) if MEMORY_KINDS[kind].adds_tokens else ()
    return f"model.memory={kind}", *segments


OTHER_MEMORIES = [
    # `tokens` is a part of `recurrent+tokens`, so whole runs of it are for `make test-all`.
    pytest.param(overrides_of(kind), id=kind, marks=pytest.mark.slow if kind == "tokens" else ())
    for kind in KINDS
    if kind != "recurrent"
] + [pytest.param(("training.backprop_segments=3",), id="gradients through it")]
"""Overrides of whole runs whose memory is not the default one."""

# Shapes: B lanes, T segment tokens, L layers, D d_model


class RunningMean(MemoryKind):
    def receptive_tokens(self, tgt_len: int) -> None:
        return None

    def empty(
        self,
        num_lanes: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "RunningMeanState":
        options = {"dtype": torch.promote_types(dtype, torch.float32), "device": device}
        shape = (num_lanes, self.config.n_layer, self.config.d_model)
        return RunningMeanState(torch.zeros(shape, **options), torch.zeros(num_lanes, **options))


@dataclass(frozen=True)
class RunningMeanState(SequenceState):
    mean_BLD: Tensor
    count_B: Tensor
    """Tokens of the current document, of which the mean is."""

    @property
    def num_pasts(self) -> tuple[int, ...]:
        """A token sees the key if its document began before the segment: then its age is more than
        the tokens before it in the segment."""
        return (1,) * self.mean_BLD.shape[1]

    def past(self, number: int, x_BTD: Tensor) -> Tensor:
        return self.mean_BLD[:, number, None].to(x_BTD.device, x_BTD.dtype)

    def after(self, hidden_BTD: Sequence[Tensor], age_BT: Tensor) -> "RunningMeanState":
        num_lanes, tgt_len, _ = hidden_BTD[0].shape
        age_BT = age_BT.expand(num_lanes, tgt_len).to(self.count_B.device)
        last_B = age_BT[:, -1]
        # The document of the last token: it begins in this segment, or goes on from the one before.
        old_B = self.count_B * (last_B >= tgt_len)
        is_in_BT = torch.arange(tgt_len, device=last_B.device) >= tgt_len - 1 - last_B[:, None]
        new_B = is_in_BT.sum(1)
        inputs_BTLD = torch.stack([*hidden_BTD[:-1]], dim=2).to(self.mean_BLD)
        sum_BLD = (inputs_BTLD * is_in_BT[:, :, None, None]).sum(1)
        sum_BLD = sum_BLD + self.mean_BLD * old_B[:, None, None]
        count_B = old_B + new_B
        return RunningMeanState(sum_BLD / count_B[:, None, None], count_B)

    def tensors(self) -> dict[str, Tensor]:
        return {"mean": self.mean_BLD, "count": self.count_B}
