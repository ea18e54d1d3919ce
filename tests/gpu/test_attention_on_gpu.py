"""The kernels of attention in bf16, with the tiles that training takes, against the equation.

At the sizes of the published models: inputs are bf16, and the equation is computed in float64.
On the CPU the sizes are tiny, and triton's interpreter computes in fp32.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.gpu import DEVICE, ON_CPU
from txl_dist.model.attention import pack_heads
from txl_dist.model.attention.torch_attention import reference
from txl_dist.model.attention.triton import triton
from txl_dist.model.dropout import Dropout, LaneDropoutMasks, on_device
from txl_dist.model.encodings import DistanceTerms
from txl_dist.model.visibility import Visibility

pytestmark = pytest.mark.usefixtures("interpreted_bf16")

MOST_ERROR = 1.5e-2
"""|actual - exact| / |exact|, of the output and of each gradient. bf16 has 8 bits: 4e-3."""


@dataclass(frozen=True)
class Case:
    """Sizes of one layer's attention."""

    num_heads: int
    num_lanes: int
    num_queries: int
    mem_len: int
    d_head: int
    has_distances: bool = True
    has_dropout: bool = False

    @property
    def tiny(self) -> "Case":
        """The same case, for the interpreter."""
        sizes = {"num_heads": 2, "num_lanes": 2, "num_queries": 24 + self.num_queries % 8}
        return replace(self, **sizes, mem_len=16 if self.mem_len else 0)

    @property
    def reads_projections(self) -> bool:
        """Whether a layer lets the kernels read its projections: heads need no padding."""
        return self.has_distances and self.d_head % 16 == 0


CASES = {
    "nvidia-base": Case(8, 32, 192, 192, 64),
    "wt103-base": Case(10, 60, 150, 150, 41),
    "wt103-large": Case(16, 32, 384, 384, 64, has_dropout=True),
    "enwik8-base": Case(8, 22, 512, 512, 64),
    "enwik8-large": Case(8, 16, 768, 768, 128, has_dropout=True),
    "modern-350m": Case(16, 16, 1024, 1024, 64, has_distances=False),
    "odd lengths": Case(4, 3, 333, 129, 64, has_dropout=True),
    "no memory": Case(4, 3, 200, 0, 128, has_distances=False, has_dropout=True),
}


class Inputs:
    """Random tensors of a case, exact in bf16, on a device. Documents start inside segments."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self._generator = torch.Generator(device).manual_seed(1)
        H, B, T, M, K = (
            case.num_heads, case.num_lanes, case.num_queries, case.mem_len, case.d_head,
        )  # fmt: skip
        self.leaves = {"q": self._draw(H, B, T, K), "segment": self._draw(B, T, 2 * H * K)}
        if M:
            self.leaves["memory"] = self._draw(B, M, 2 * H * K)
        if case.has_distances:
            self.leaves |= {name: 0.3 * self._draw(H, K) for name in ("u", "v")}
            self.leaves["r"] = 0.5 * self._draw(H, M + T, K)
        self.d_mixed_BTHK = self._draw(B, T, H, K)
        t, lane_B1 = torch.arange(T, device=device), torch.arange(B, device=device)[:, None]
        first_B1, start_B1 = (
            torch.randint(high, (B, 1), generator=self._generator, device=device)
            for high in (3 * (M + T), T)
        )
        is_new_BT = (t >= start_B1) & (lane_B1 % 2 == 0)
        self.age_BT = torch.where(is_new_BT, t - start_B1, first_B1 + t).int()
        masks = on_device(LaneDropoutMasks(seed=1, step=2, lanes=range(B)), device)
        dropout = Dropout(0.2, layer=3, place="attention weights").to(device)
        like = torch.zeros((), dtype=torch.float64, device=device).expand(B, H, T, M + T)
        self.bits = self.scale_BHTS = None
        if case.has_dropout:
            self.bits = masks.keep_bits(like, dropout)
            self.scale_BHTS = masks.scale(like, dropout)

    def _draw(self, *shape: int) -> Tensor:
        x = torch.randn(shape, generator=self._generator, device=self.device)
        return x.bfloat16()

    def results(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Output and gradients: in bf16 by the kernels, in float64 by the equation."""
        is_exact, case = dtype == torch.float64, self.case
        own = {name: x.to(dtype).requires_grad_() for name, x in self.leaves.items()}
        empty = own["segment"][:, :0]
        memory, segment = own.get("memory", empty), own["segment"]
        terms = DistanceTerms(
            content_bias_HK=own.get("u"), distance_bias_HK=own.get("v"), distance_HSK=own.get("r")
        )
        visibility = Visibility.of(
            self.age_BT, num_past=case.mem_len, same_length=False,
            mask_dtype=dtype if is_exact else None,
        )  # fmt: skip
        first, second = memory, segment
        if is_exact or not case.reads_projections:
            first, second = pack_heads(memory, segment, (case.num_heads, case.d_head))
        attention, keep = (reference, self.scale_BHTS) if is_exact else (triton, self.bits)
        mixed = attention(own["q"], first, second, terms, visibility, keep)  # type: ignore[arg-type]
        gradients = torch.autograd.grad(mixed, [*own.values()], self.d_mixed_BTHK.to(dtype))
        return {"output": mixed.detach(), **dict(zip(own, gradients, strict=True))}


def relative_error(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact.double()).norm() / exact.double().norm())


def check_bf16(case: Case, device: torch.device) -> None:
    """Two runs of the kernels are equal bit for bit, and near the equation."""
    inputs = Inputs(case, device)
    actual, again = inputs.results(torch.bfloat16), inputs.results(torch.bfloat16)
    assert all(torch.equal(actual[name], again[name]) for name in actual)
    del again
    for name, exact in inputs.results(torch.float64).items():
        error = relative_error(actual[name], exact)
        assert error < MOST_ERROR, f"{name}: {error}"  # nor is NaN below it


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_bf16_at_full_size_is_near_the_equation(name: str) -> None:
    check_bf16(CASES[name].tiny if ON_CPU else CASES[name], DEVICE)


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    """Scores by distance of more than 2^31 numbers: the last lanes are those of a small batch."""
    big = Case(2, 2, 24, 16, 16) if ON_CPU else Case(16, 80, 1024, 1024, 16)
    inputs, visible = Inputs(big, DEVICE), slice(-1, None)
    whole = inputs.results(torch.bfloat16)
    inputs.leaves |= {
        "q": inputs.leaves["q"][:, visible],
        **{name: inputs.leaves[name][visible] for name in ("memory", "segment")},
    }
    inputs.age_BT, inputs.d_mixed_BTHK = inputs.age_BT[visible], inputs.d_mixed_BTHK[visible]
    last = inputs.results(torch.bfloat16)
    for name, part in (("output", visible), ("q", (slice(None), visible)), ("memory", visible)):
        assert relative_error(whole[name][part], last[name]) < MOST_ERROR, name
