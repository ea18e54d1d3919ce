"""`model.memory: compressive` of the standalone file."""

from typing import Any

import torch
from torch import Tensor

from txl_dist.convert.standalone.model import KINDS, Memory, Recurrent, Weights


class Compressive(Recurrent):
    """`compressive`: also the means of every few tokens that are older (arXiv:1911.05507).

    Distances count slots like tokens. `pending` tokens wait among the recent ones for the end of
    their group.
    """

    def __init__(self, c: Any, w: Weights) -> None:
        super().__init__(c, w)
        self.rate, self.num_slots = c.compression_rate, 0
        if c.mem_len:
            self.mem_lens = [c.mem_len + self.rate - 1] * c.n_layer
            default = c.mem_len // self.rate
            self.num_slots = default if c.compressed_len is None else c.compressed_len

    def empty(self, num_rows: int, like: Tensor) -> Memory:
        memory = super().empty(num_rows, like)
        for n in range(self.c.n_layer):
            shape = num_rows, self.num_slots, self.c.d_model
            memory[f"layer-{n}-compressed"] = like.new_zeros(shape)
        return memory | {"pending": torch.zeros_like(memory["age"])}

    def past(self, n: int, memory: Memory) -> Tensor:
        return torch.cat([memory[f"layer-{n}-compressed"], memory[f"layer-{n}"]], dim=1)

    def reach(self, age_BT: Tensor, memory: Memory) -> Tensor:
        """A token sees a slot if all its tokens are of the same document."""
        if not self.c.mem_len:
            return age_BT
        recent_T = torch.arange(age_BT.shape[1], device=age_BT.device) + self.mem_lens[0]
        older_BT = age_BT - recent_T + self.rate - 1 - memory["pending"][:, None]
        slots_BT = older_BT.div(self.rate, rounding_mode="floor").clamp(min=0)
        return torch.where(age_BT <= recent_T, age_BT, recent_T + slots_BT)

    def after(self, memory: Memory, hidden: list[Tensor], age_BT: Tensor) -> Memory:
        new, num_tokens = super().after(memory, hidden, age_BT), age_BT.shape[1]
        pending_B = memory["pending"].masked_fill(age_BT[:, 0] == 0, 0)
        new["pending"] = (pending_B + num_tokens) % self.rate
        for n in range(self.c.n_layer):
            name, slots = f"layer-{n}-compressed", []
            rows_BND = torch.cat([memory[f"layer-{n}"], hidden[n]], dim=1)
            for slot_CD, row_ND, pending in zip(
                memory[name], rows_BND, pending_B.tolist(), strict=True
            ):
                num_groups, first = (pending + num_tokens) // self.rate, self.rate - 1 - pending
                group_NRD = row_ND[first : first + num_groups * self.rate]
                mean_ND = group_NRD.unflatten(0, (num_groups, self.rate)).mean(1)
                slots.append(
                    torch.cat([slot_CD, mean_ND])[num_groups:] if self.num_slots else slot_CD
                )
            new[name] = torch.stack(slots)
        return new


KINDS["compressive"] = Compressive
