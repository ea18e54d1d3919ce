"""`model.memory: tokens` and `recurrent+tokens` of the standalone file."""

from typing import Any

import torch
from torch import Tensor

from txl_dist.convert.standalone.model import KINDS, Memory, Recurrent, Weights


class RecurrentAndTokens(Recurrent):
    """`recurrent+tokens`: m tokens in front of a segment read what m tokens after the one before
    wrote (arXiv:2207.06881). A token reads if its document began before the segment.
    """

    def __init__(self, c: Any, w: Weights) -> None:
        super().__init__(c, w)
        self.num_added = c.memory_tokens

    def empty(self, num_rows: int, like: Tensor) -> Memory:
        wide = torch.promote_types(like.dtype, torch.float32)
        tokens = like.new_zeros(num_rows, self.num_added, self.c.d_model, dtype=wide)
        return super().empty(num_rows, like) | {"tokens": tokens}

    def add_tokens(self, x: Tensor, age_BT: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        m, w = self.num_added, self.w.below("added_tokens")
        read_BmD = memory["tokens"].to(x.dtype)
        # Whether the document of each token began before the segment.
        is_old_BT = age_BT > torch.arange(age_BT.shape[1], device=age_BT.device)
        read_BmD = w.norm("norm", read_BmD) if self.c.pre_lnorm else read_BmD
        write_BmD = torch.where(is_old_BT[:, -1:, None], read_BmD, w["initial_mD"])
        slot_m = torch.arange(m, device=x.device)
        read_age_Bm, age_BT = age_BT[:, :1] + slot_m, age_BT + m * is_old_BT
        ages = [read_age_Bm, age_BT, age_BT[:, -1:] + 1 + slot_m]
        return torch.cat([read_BmD, x, write_BmD], dim=1), torch.cat(ages, dim=1)

    def remove_tokens(self, x: Tensor) -> Tensor:
        return x[:, self.num_added : -self.num_added]

    def after(self, memory: Memory, hidden: list[Tensor], age_BT: Tensor) -> Memory:
        written_BmD = hidden[-1][:, -self.num_added :].to(memory["tokens"].dtype, copy=True)
        own = [self.remove_tokens(x) for x in hidden]
        return super().after(memory, own, age_BT) | {"tokens": written_BmD}


class Tokens(RecurrentAndTokens):
    """`tokens`: the layers keep no inputs."""

    def __init__(self, c: Any, w: Weights) -> None:
        super().__init__(c, w)
        self.mem_lens = [0] * c.n_layer


KINDS |= {"recurrent+tokens": RecurrentAndTokens, "tokens": Tokens}
