"""`model.memory: associative`: per layer a matrix of values by key, which m added tokens write.

Before layer l every token reads (`Reader`), after it the m write tokens write (`Writer`), whose x
is the layer's output, or with residual scalars what the next layer reads, a x + b x_0:

    read      x = x + A^T q / max(z . q, 1)       q = phi(W_q x)
    segment   A = d A,  z = d z                   d = `memory_decay`
    write     A = A + beta k (v - v')^T           k = phi(W_k x),  v = W_v x
              z = z + gamma k                     beta = sigmoid(w_b x)
              v' = A^T k / max(z . k, 1)          what the matrix has for the key so far
              gamma = clip(1 - z . k, 0, 1)       without gradient: the part of k that is new

phi = DPFP-3 of a vector y, divided by its length: with r = [relu(y) ; relu(-y)] the three products
r * roll(r, i), i = 1, 2, 3, next to each other (Schlag et al. 2021, arXiv:2102.11174), so F = 6
`d_memory_key`. W_v starts at 0. A and z are fp32 at least, and computed so under autocast.

A document that begins in a segment starts at A = 0, exactly: its tokens in this segment do not
read, the write tokens see the last document only, and if that is new they write to A = 0.

A gradient reaches what is written only from the losses of later segments of the same step, so this
needs `training.backprop_segments`. Source: Rodkin et al. 2024, arXiv:2407.04841, section 3.
Deviations (docs/decisions/0084-memory-that-is-written.md has what was measured): the decay, the
maximum with 1 instead of z . k + 1e-5, writes one after the other instead of all to the same A, phi
divided by its length, and write tokens whose input is a parameter in every segment.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from txl_dist.model.attention import SegmentContext
from txl_dist.model.config import ModelConfig
from txl_dist.model.memory import AddedTokens, MemoryKind, SequenceState, stored_like
from txl_dist.model.memory.tokens import begins_before

# Shapes: B lanes, T segment tokens (with the added ones in layers), m write tokens, L layers,
# D d_model, K d_memory_key, F = 6 K

NUM_ROLLS = 3


class Associative(MemoryKind):
    def receptive_tokens(self, tgt_len: int) -> None:
        return None

    @property
    def num_features(self) -> int:
        """F."""
        return 2 * NUM_ROLLS * self.config.d_memory_key

    def empty(
        self,
        num_lanes: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "AssociativeState":
        wide = torch.promote_types(dtype, torch.float32)
        shape = num_lanes, self.config.n_layer, self.num_features, self.config.d_model
        return AssociativeState(
            torch.zeros(shape, dtype=wide, device=device),
            torch.zeros(shape[:-1], dtype=wide, device=device),
            self.config.memory_decay,
        )

    def reader(self, layer: int) -> nn.Module:
        return Reader(self.config)

    def writer(self, layer: int) -> nn.Module:
        return Writer(self.config)

    def added_tokens(self) -> "WriteTokens":
        return WriteTokens(self.config)

    @property
    def num_added_tokens(self) -> int:
        return self.config.memory_tokens

    def flops(self, *, num_lanes: int, tgt_len: int) -> int:
        config, features = self.config, self.num_features
        read = tgt_len * (config.d_model * (config.d_memory_key + features) + features)
        written_columns = config.d_memory_key + config.d_model + 1
        write = config.memory_tokens * (
            config.d_model * (written_columns + 2 * features) + features
        )
        return 2 * num_lanes * config.n_layer * (read + write)

    def fits(self, saved: ModelConfig) -> bool:
        return super().fits(saved) and saved.d_memory_key == self.config.d_memory_key


@dataclass(frozen=True)
class AssociativeState(SequenceState):
    value_BLFD: Tensor
    """A of each layer."""
    weight_BLF: Tensor
    """z of each layer: how much was written with each feature."""
    decay: float
    num_past = 0

    def past(self, number: int, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """A [B, F, D] and z [B, F] of a layer."""
        tensors = self.value_BLFD[:, number], self.weight_BLF[:, number]
        value_BFD, weight_BF = (x.to(x_BTD.device, non_blocking=True) for x in tensors)
        return value_BFD, weight_BF

    def after(self, written: Sequence[Tensor], age_BT: Tensor) -> "AssociativeState":
        """`written`: of each layer, keys, values and strengths [B, m, F + D + 1] of a `Writer`."""
        written_BLmX = torch.stack([*written], dim=1)
        device, num_features = written_BLmX.device, self.weight_BLF.shape[-1]
        is_old_B1 = begins_before(age_BT)[:, -1:].to(device)
        kept_B1 = self.decay * is_old_B1
        value_BLFD = self.value_BLFD.to(device) * kept_B1[..., None, None]
        weight_BLF = self.weight_BLF.to(device) * kept_B1[..., None]
        sizes = [num_features, value_BLFD.shape[-1], 1]
        key_BLmF, new_BLmD, beta_BLm1 = written_BLmX.to(value_BLFD.dtype).split(sizes, dim=-1)
        with torch.autocast(device.type, enabled=False):
            for token in range(key_BLmF.shape[2]):
                key_BL1F = key_BLmF[:, :, token : token + 1]
                known_BL1 = (key_BL1F @ weight_BLF[..., None])[..., 0]
                old_BL1D = key_BL1F @ value_BLFD / known_BL1[..., None].clamp(min=1)
                change_BL1D = beta_BLm1[:, :, token : token + 1] * (
                    new_BLmD[:, :, token : token + 1] - old_BL1D
                )
                value_BLFD = value_BLFD + key_BL1F.transpose(-1, -2) @ change_BL1D
                novelty_BL1 = (1 - known_BL1).clamp(0, 1).detach()
                weight_BLF = weight_BLF + novelty_BL1 * key_BL1F[:, :, 0]
        return AssociativeState(
            stored_like(self.value_BLFD, value_BLFD),
            stored_like(self.weight_BLF, weight_BLF),
            self.decay,
        )

    def tensors(self) -> dict[str, Tensor]:
        return {"values": self.value_BLFD, "weights": self.weight_BLF}

    def select(self, lanes: Sequence[int], num_removed: Sequence[int]) -> "AssociativeState":
        if any(num_removed):
            raise ValueError("an associative memory does not know the tokens that it consists of")
        rows = list(lanes)
        return replace(self, value_BLFD=self.value_BLFD[rows], weight_BLF=self.weight_BLF[rows])


def features(y: Tensor) -> Tensor:
    """phi, [..., K] -> [..., F]."""
    r = torch.cat([y.relu(), (-y).relu()], dim=-1)
    products = [r * r.roll(shift, -1) for shift in range(1, NUM_ROLLS + 1)]
    return normalize(torch.cat(products, dim=-1), dim=-1)


class Reader(nn.Module):
    """Adds what the layer's matrix has for each token whose document began before the segment."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.query = nn.Linear(config.d_model, config.d_memory_key, bias=False)  # W_q

    def forward(
        self, x_BTD: Tensor, past: tuple[Tensor, Tensor], context: SegmentContext
    ) -> tuple[Tensor, Tensor]:
        value_BFD, weight_BF = past
        is_old_BT = begins_before(context.visibility.reach_BT)
        with torch.autocast(x_BTD.device.type, enabled=False):
            query_BTF = features(self.query(x_BTD.to(self.query.weight.dtype))).to(value_BFD.dtype)
            known_BT1 = query_BTF @ weight_BF[..., None]
            read_BTD = query_BTF @ value_BFD / known_BT1.clamp(min=1)
        return x_BTD + (read_BTD * is_old_BT[..., None]).to(x_BTD.dtype), x_BTD[:, :0]


class Writer(nn.Module):
    """forward(x_BTD) -> keys, values and strengths [B, m, F + D + 1] of the last m tokens."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_tokens = config.memory_tokens
        self.key = nn.Linear(config.d_model, config.d_memory_key, bias=False)  # W_k
        self.value = nn.Linear(config.d_model, config.d_model, bias=False)  # W_v
        self.strength = nn.Linear(config.d_model, 1, bias=False)  # w_b

    def forward(self, x_BTD: Tensor) -> Tensor:
        with torch.autocast(x_BTD.device.type, enabled=False):
            # A copy: torch's FLOP counter fails at a view that was taken without gradients.
            x_BmD = x_BTD[:, -self.num_tokens :].clone().to(self.key.weight.dtype)
            parts = features(self.key(x_BmD)), self.value(x_BmD), self.strength(x_BmD).sigmoid()
            return torch.cat(parts, dim=-1)


class WriteTokens(AddedTokens):
    """m tokens after a segment, with parameters as their input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.initial_mD = nn.Parameter(torch.empty(config.memory_tokens, config.d_model))

    def forward(self, x_BTD: Tensor, age_BT: Tensor, state: SequenceState) -> tuple[Tensor, Tensor]:
        m, num_lanes = len(self.initial_mD), len(x_BTD)
        age_BT = age_BT.expand(num_lanes, -1)
        slot_m = torch.arange(m, device=age_BT.device, dtype=age_BT.dtype)
        write_BmD = self.initial_mD.to(x_BTD.dtype).expand(num_lanes, -1, -1)
        age_BT = torch.cat([age_BT, age_BT[:, -1:] + 1 + slot_m], dim=1)
        return torch.cat([x_BTD, write_BmD], dim=1), age_BT

    def removed(self, x_BTD: Tensor) -> Tensor:
        return x_BTD[:, : -len(self.initial_mD)]
