"""`model.memory: associative` of the standalone file."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from txl_dist.convert.standalone.model import KINDS, Memory, Recurrent, Weights, begins_before

# Shapes: m write tokens, F features of a key


class Associative(Recurrent):
    """`associative`: a matrix A of values by key per layer, and z, how much was written to a key.

    Every token reads x + A^T q / max(z . q, 1). After a segment A and z decay, then the m write
    tokens, whose input is a parameter, write one after the other (arXiv:2407.04841):

        A + beta k (v - A^T k / max(z . k, 1))^T        z + clip(1 - z . k, 0, 1) k
    """

    def __init__(self, c: Any, w: Weights) -> None:
        super().__init__(c, w)
        self.mem_lens, self.num_added = [0] * c.n_layer, c.memory_tokens

    def empty(self, num_rows: int, like: Tensor) -> Memory:
        c, wide = self.c, torch.promote_types(like.dtype, torch.float32)
        shape = num_rows, c.n_layer, 6 * c.d_memory_key
        values, weights = (like.new_zeros(s, dtype=wide) for s in ((*shape, c.d_model), shape))
        return super().empty(num_rows, like) | {"values": values, "weights": weights}

    def add_tokens(self, x: Tensor, age_BT: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        write_BmD = self.w["added_tokens.initial_mD"].expand(len(x), -1, -1)
        write_age_Bm = age_BT[:, -1:] + 1 + torch.arange(self.num_added, device=x.device)
        return torch.cat([x, write_BmD], dim=1), torch.cat([age_BT, write_age_Bm], dim=1)

    def remove_tokens(self, x: Tensor) -> Tensor:
        return x[:, : -self.num_added]

    def read(self, n: int, x: Tensor, age_BT: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        A_BFD, z_BF = memory["values"][:, n], memory["weights"][:, n]
        q_BTF = features(self.w.linear(f"layers.{n}.memory_reader.query", x)).to(A_BFD.dtype)
        read_BTD = q_BTF @ A_BFD / (q_BTF @ z_BF[..., None]).clamp(min=1)
        is_old_BT1 = begins_before(age_BT)[..., None]  # a document reads what it wrote itself
        return x + (read_BTD * is_old_BT1).to(x.dtype), memory[f"layer-{n}"]

    def after(self, memory: Memory, hidden: list[Tensor], age_BT: Tensor) -> Memory:
        kept_B = self.c.memory_decay * begins_before(age_BT)[:, -1]
        written = []
        for n in range(self.c.n_layer):
            w, x_BmD = (
                self.w.below(f"layers.{n}.memory_writer"),
                hidden[n + 1][:, -self.num_added :],
            )
            A = memory["values"][:, n] * kept_B[:, None, None]
            z = memory["weights"][:, n] * kept_B[:, None]
            key_BmF, beta_Bm1 = features(w.linear("key", x_BmD)), w.linear("strength", x_BmD)
            parts = key_BmF, w.linear("value", x_BmD), beta_Bm1.sigmoid()
            for k, v, beta in zip(*(part.to(A.dtype).unbind(1) for part in parts), strict=True):
                known_B1 = (k * z).sum(-1, keepdim=True)
                old_BD = torch.einsum("bf,bfd->bd", k, A) / known_B1.clamp(min=1)
                A = A + torch.einsum("bf,bd->bfd", k, beta * (v - old_BD))
                z = z + (1 - known_B1).clamp(0, 1) * k
            written.append((A, z))
        values, weights = (torch.stack(each, dim=1) for each in zip(*written, strict=True))
        return super().after(memory, hidden, age_BT) | {"values": values, "weights": weights}


def features(y: Tensor) -> Tensor:
    """DPFP-3 (arXiv:2102.11174) of keys, divided by its length: F = 6 `d_memory_key`."""
    r = torch.cat([y.relu(), (-y).relu()], dim=-1)
    return functional.normalize(torch.cat([r * r.roll(i, -1) for i in (1, 2, 3)], dim=-1), dim=-1)


KINDS["associative"] = Associative
