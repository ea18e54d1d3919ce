"""Random arguments of an attention function, and their gradients."""

import functools
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from tests.support import keep_bits
from txl_dist.model.attention import AttentionFunction
from txl_dist.model.dropout import KeepBits
from txl_dist.model.encodings import DistanceTerms
from txl_dist.model.visibility import Visibility

TERMS = {
    "none": (),
    "content": ("content_bias_HK",),
    "paper": ("content_bias_HK", "distance_bias_HK", "distance_HSK"),
    "shaw": ("content_bias_HK", "distance_HSK", "score_HS"),
    "alibi": ("score_HS",),
    "all": ("content_bias_HK", "distance_bias_HK", "distance_HSK", "score_HS"),
}

KEEP_FACTOR = 1.7
"""What weights are multiplied by that dropout keeps."""


@dataclass
class Inputs:
    """The arguments in order; all floating-point tensors but the mask require gradients."""

    q_HBTK: Tensor
    k_HBSK: Tensor
    v_HBSK: Tensor
    terms: DistanceTerms
    visibility: Visibility
    keep_BHTS: Tensor | KeepBits | None

    @classmethod
    def of(
        cls,
        sizes: list[int],
        terms: str,
        *,
        dropout: bool = False,
        same_length: bool = False,
        age_BT: Tensor | None = None,
    ) -> "Inputs":
        """`sizes`: B, T, M, H, K. Ages are random unless `age_BT` is given."""
        B, T, M, H, K = sizes
        S = M + T
        torch.manual_seed(0)
        shapes = {
            "content_bias_HK": (H, K),
            "distance_bias_HK": (H, K),
            "distance_HSK": (H, S, K),
            "score_HS": (H, S),
        }
        draw = functools.partial(torch.randn, dtype=torch.float64, requires_grad=True)
        if age_BT is None:
            age_BT = torch.randint(0, S, (B, T))
        return cls(
            *(draw(H, B, N, K) for N in (T, S, S)),
            DistanceTerms(
                # ALiBi's scores are constant.
                **{n: draw(shapes[n]).requires_grad_(terms != "alibi") for n in TERMS[terms]}
            ),
            Visibility.of(age_BT, num_past=M, same_length=same_length, mask_dtype=torch.float64),
            torch.randint(0, 2, (B, H, T, S)).double() * KEEP_FACTOR if dropout else None,
        )

    def with_keep_bits(self) -> "Inputs":
        """The same, for an implementation that reads the dropout mask as bits."""
        if self.keep_BHTS is None:
            return self
        assert isinstance(self.keep_BHTS, Tensor)
        return replace(self, keep_BHTS=keep_bits.pack(self.keep_BHTS, KEEP_FACTOR))

    def run(self, attention: AttentionFunction) -> Tensor:
        return attention(*(getattr(self, field.name) for field in fields(self)))

    def gradients(self, attention: AttentionFunction, weight: Tensor) -> dict[str, Tensor]:
        """Of the sum of the output times `weight`, by argument."""
        return self.output_and_gradients(attention, weight)[1]

    def output_and_gradients(
        self, attention: AttentionFunction, weight: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        own = {name: getattr(self, name) for name in ("q_HBTK", "k_HBSK", "v_HBSK")}
        terms = {field.name: getattr(self.terms, field.name) for field in fields(self.terms)}
        present = {name: x for name, x in terms.items() if x is not None}
        inputs = own | {name: x for name, x in present.items() if x.requires_grad}
        mixed = self.run(attention)
        gradients = torch.autograd.grad((mixed * weight).sum(), list(inputs.values()))
        return mixed.detach(), dict(zip(inputs, gradients, strict=True))
