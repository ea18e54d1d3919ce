"""`model.memory: compressive`: the paper's memory, and averages of the tokens that are older.

    [ compressed, C slots | recent, M + c - 1 tokens | segment, T tokens ]

Per layer: every c consecutive inputs (`compression_rate`) that leave the last M tokens become one
slot, their mean. So C slots (`compressed_len`) are another c C tokens of reach. A block that is not
complete stays among the recent tokens, of which up to c - 1 are in the newest slot, too.

Attention sees slots like tokens: distances count slots. A slot is visible if all of its tokens are
of the query's document, which follows from the age:

    reach = age                                     if age <= t + M + c - 1
            t + M + c - 1 + floor((age - t - M - p) / c)   else, at least t + M + c - 1

in keys before query t of the segment, where p < c tokens beyond the last M are not compressed yet.

Blocks follow each other from where a text is read with an age of 0 at the start of a segment, so
p = 0 at every segment if segments are multiples of c.

Source: Rae et al. 2019, arXiv:1911.05507, section 3, with mean pooling as the compression function,
which has no parameters, so it needs no auxiliary loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from txl_dist.model.config import ModelConfig
from txl_dist.model.memory import MemoryKind, SequenceState, stored_like

# Shapes: B lanes, T segment tokens, D d_model, C compressed slots, c tokens of a slot,
# R = M + c - 1 recent tokens


class Compressive(MemoryKind):
    """Every layer has the same sizes."""

    def receptive_tokens(self, tgt_len: int) -> int | None:
        """None if blocks end inside segments: then they depend on where the reading starts."""
        num_slots, num_recent, rate = _sizes(self.config)
        if num_slots and tgt_len % rate:
            return None
        span = max(num_recent, self.config.mem_len + rate * num_slots)
        return tgt_len * self.config.n_layer * -(-span // tgt_len)

    def empty(
        self,
        num_lanes: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "CompressiveState":
        num_slots, num_recent, rate = _sizes(self.config)

        def zeros(num_rows: int) -> tuple[Tensor, ...]:
            shape = (num_lanes, num_rows, self.config.d_model)
            return tuple(
                torch.zeros(shape, dtype=dtype, device=device) for _ in range(self.config.n_layer)
            )

        return CompressiveState(
            compressed=zeros(num_slots),
            recent=zeros(num_recent),
            num_pending_B=torch.zeros(num_lanes, device=device),
            rate=rate,
        )

    def fits(self, saved: ModelConfig) -> bool:
        return super().fits(saved) and _sizes(saved) == _sizes(self.config)


def _sizes(config: ModelConfig) -> tuple[int, int, int]:
    """C, R and c. Without a memory nothing is compressed."""
    if config.mem_len == 0:
        return 0, 0, 1
    rate = config.compression_rate
    num_slots = config.compressed_len
    return (
        config.mem_len // rate if num_slots is None else num_slots,
        config.mem_len + rate - 1,
        rate,
    )


@dataclass(frozen=True)
class CompressiveState(SequenceState):
    compressed: tuple[Tensor, ...]
    """[B, C, D] of each layer, the newest slot last."""
    recent: tuple[Tensor, ...]
    """[B, R, D] of each layer."""
    num_pending_B: Tensor
    """p: tokens beyond the last M that wait for their block."""
    rate: int

    @property
    def num_pasts(self) -> tuple[int, ...]:
        return (self.compressed[0].shape[1] + self.recent[0].shape[1],) * len(self.recent)

    @property
    def num_past_tokens(self) -> int:
        return self.recent[0].shape[1] + self.rate * self.compressed[0].shape[1]

    def past(self, number: int, x_BTD: Tensor) -> Tensor:
        parts = self.compressed[number], self.recent[number]
        return torch.cat([part.to(x_BTD.dtype) for part in parts], dim=1)

    def reach(self, age_BT: Tensor) -> Tensor:
        num_recent, rate = self.recent[0].shape[1], self.rate
        pending_B = self.num_pending_B.to(age_BT.dtype)
        before_T = torch.arange(age_BT.shape[1], device=age_BT.device, dtype=age_BT.dtype)
        recent_T = before_T + num_recent
        # Tokens between query and newest slot: those of the segment, M, and p.
        older_BT = age_BT - before_T - (num_recent - rate + 1) - pending_B[:, None]
        slots_BT = older_BT.div(rate, rounding_mode="floor").clamp(min=0)
        return torch.where(age_BT <= recent_T, age_BT, recent_T + slots_BT)

    def after(self, hidden_BTD: Sequence[Tensor], age_BT: Tensor) -> "CompressiveState":
        tgt_len = hidden_BTD[0].shape[1]
        device = self.num_pending_B.device
        num_slots, rate = self.compressed[0].shape[1], self.rate
        starts_B = age_BT[:, 0].to(device) == 0
        pending_B = self.num_pending_B.long().masked_fill(starts_B, 0)
        # Rows of [recent ; segment]: pending ones begin at c - 1 - p, the last M stay.
        num_blocks = (rate - 1 + tgt_len) // rate
        first_B1 = rate - 1 - pending_B[:, None]
        row_BX = first_B1 + torch.arange(num_blocks * rate, device=device)
        num_complete_B1 = (pending_B[:, None] + tgt_len) // rate
        slot_BC = num_complete_B1 + torch.arange(num_slots, device=device)
        compressed, recent = [], []
        for old_BCD, old_BRD, new_BTD in zip(
            self.compressed, self.recent, hidden_BTD[:-1], strict=True
        ):
            rows_BND = torch.cat([old_BRD, new_BTD.to(old_BRD)], dim=1)
            recent.append(stored_like(old_BRD, rows_BND[:, tgt_len:]))
            if not num_slots:
                compressed.append(old_BCD)
                continue
            # Rows beyond the last are those of blocks that are not complete, and are not selected.
            block_BXD = _rows(rows_BND, row_BX.clamp(max=rows_BND.shape[1] - 1))
            mean_BKD = block_BXD.unflatten(1, (num_blocks, rate)).mean(2)
            slots_BND = torch.cat([old_BCD, mean_BKD], dim=1)
            compressed.append(stored_like(old_BCD, _rows(slots_BND, slot_BC)))
        return CompressiveState(
            tuple(compressed),
            tuple(recent),
            stored_like(self.num_pending_B, (pending_B + tgt_len) % rate),
            rate,
        )

    def tensors(self) -> dict[str, Tensor]:
        named = {"pending": self.num_pending_B}
        for number, (compressed_BCD, recent_BRD) in enumerate(
            zip(self.compressed, self.recent, strict=True)
        ):
            named |= {f"layer-{number}": recent_BRD, f"layer-{number}-compressed": compressed_BCD}
        return named


def _rows(x_BND: Tensor, row_BX: Tensor) -> Tensor:
    """Rows [B, X, D] of each lane."""
    return x_BND.gather(1, row_BX[..., None].expand(-1, -1, x_BND.shape[2]))
