"""Attention: every form equals the equation, and the equation is the paper's."""

import functools
from dataclasses import dataclass, fields

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from tests.support.small_models import random_text, small_model
from txl_dist.model.attention import AttentionFunction, choose_attention
from txl_dist.model.encodings import DistanceTerms
from txl_dist.model.reference_attention import reference_attention, reference_scores
from txl_dist.model.variants import ATTENTION_FORMS, DISTANCE_ENCODINGS
from txl_dist.model.visibility import mask_scores, visible_keys

DIFFERENT_SIZES = st.lists(st.integers(1, 7), min_size=5, max_size=5, unique=True)
TERMS = {
    "none": (),
    "content": ("content_bias_HK",),
    "paper": ("content_bias_HK", "distance_bias_HK", "distance_HSK"),
    "shaw": ("content_bias_HK", "distance_HSK", "score_HS"),
    "alibi": ("score_HS",),
    "all": ("content_bias_HK", "distance_bias_HK", "distance_HSK", "score_HS"),
}
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@dataclass
class Inputs:
    """Random arguments of an attention function, which require gradients."""

    q_HBTK: Tensor
    k_HBSK: Tensor
    v_HBSK: Tensor
    terms: DistanceTerms
    mask_BTS: Tensor
    keep_BHTS: Tensor | None

    @classmethod
    def of(cls, sizes: list[int], terms: str, *, dropout: bool = False) -> "Inputs":
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
        ages_BT = torch.randint(0, S, (B, T))
        visible_BTS = visible_keys(ages_BT, mem_len=M, same_length=False)
        return cls(
            *(draw(H, B, N, K) for N in (T, S, S)),
            DistanceTerms(
                # ALiBi's scores are constant.
                **{n: draw(shapes[n]).requires_grad_(terms != "alibi") for n in TERMS[terms]}
            ),
            mask_scores(visible_BTS, torch.float64),
            torch.randint(0, 3, (B, H, T, S)).double() if dropout else None,
        )

    def run(self, attention: AttentionFunction) -> Tensor:
        return attention(*(getattr(self, field.name) for field in fields(self)))

    def gradients(self, attention: AttentionFunction, weight: Tensor) -> dict[str, Tensor]:
        own = {name: getattr(self, name) for name in ("q_HBTK", "k_HBSK", "v_HBSK")}
        terms = {field.name: getattr(self.terms, field.name) for field in fields(self.terms)}
        present = {name: x for name, x in terms.items() if x is not None}
        inputs = own | {name: x for name, x in present.items() if x.requires_grad}
        sum_ = (self.run(attention) * weight).sum()
        return dict(zip(inputs, torch.autograd.grad(sum_, list(inputs.values())), strict=True))


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("form", ATTENTION_FORMS)
@pytest.mark.parametrize("dropout", [False, True], ids=["", "dropout"])
@settings(max_examples=15, deadline=None)
@given(sizes=DIFFERENT_SIZES)
@example(sizes=[2, 3, 0, 4, 5])  # no memory
@example(sizes=[1, 1, 1, 1, 1])
def test_every_form_equals_the_equation_and_its_gradients(
    form: str, terms: str, dropout: bool, sizes: list[int]
) -> None:
    inputs = Inputs.of(sizes, terms, dropout=dropout)
    attention = choose_attention(form, device=CPU, with_dropout=dropout)
    mixed, expected = inputs.run(attention), inputs.run(reference_attention)
    assert_close(mixed, expected)
    weight = torch.randn_like(mixed)
    gradients = inputs.gradients(attention, weight)
    expected_gradients = inputs.gradients(reference_attention, weight)
    for name, gradient in gradients.items():
        assert_close(gradient, expected_gradients[name], msg=lambda m, name=name: f"{name}: {m}")


def test_the_equation_is_the_papers_four_terms() -> None:
    B, T, M, H, K = 2, 3, 4, 5, 6
    inputs = Inputs.of([B, T, M, H, K], "paper")
    q, k, terms = inputs.q_HBTK, inputs.k_HBSK, inputs.terms
    u, v, r = terms.content_bias_HK, terms.distance_bias_HK, terms.distance_HSK
    scores = reference_scores(q, k, terms)
    for t in range(T):
        for s in range(M + t + 1):
            r_of_distance = r[:, (M + T - 1) - (M + t - s)]
            expected = (
                (q[:, :, t] * k[:, :, s]).sum(-1)
                + (q[:, :, t] * r_of_distance[:, None]).sum(-1)
                + (u[:, None] * k[:, :, s]).sum(-1)
                + (v * r_of_distance).sum(-1)[:, None]
            ) / K**0.5
            assert_close(scores[:, :, t, s], expected.t())


@pytest.mark.parametrize(
    ("is_training", "device", "with_dropout", "expected"),
    [
        (True, CPU, False, "fused"),
        (True, CPU, True, "fused"),
        (False, CPU, False, "biased"),
        (False, CPU, True, "fused"),
        (True, GPU, False, "biased"),
        (True, GPU, True, "fused"),
        (False, GPU, False, "biased"),
    ],
)
def test_auto_takes_the_fastest_form_that_supports_the_call(
    is_training: bool, device: torch.device, with_dropout: bool, expected: str
) -> None:
    with torch.set_grad_enabled(is_training):
        attention = choose_attention("auto", device=device, with_dropout=with_dropout)
    assert attention is choose_attention(expected, device=device, with_dropout=False)


def test_a_form_without_dropout_refuses_a_dropout_mask() -> None:
    inputs = Inputs.of([2, 3, 4, 5, 6], "paper", dropout=True)
    with pytest.raises(NotImplementedError, match="no dropout"):
        inputs.run(choose_attention("biased", device=CPU, with_dropout=False))


@pytest.mark.parametrize("form", ATTENTION_FORMS)
@pytest.mark.parametrize("name", DISTANCE_ENCODINGS)
def test_every_encoding_runs_in_every_form_in_bf16(name: str, form: str) -> None:
    facts = DISTANCE_ENCODINGS[name]
    options = {"clamp_len": 4} if facts.needs_clamp_len else {}
    options |= {} if facts.allows_memory else {"mem_len": 0}
    model = small_model(distance_encoding=name, attention=form, **options).float()
    text_BT, age_BT = random_text(2, 3), torch.arange(3).expand(2, 3)
    exact_BT, _ = model(text_BT, text_BT, age_BT, model.empty_memory(2))
    with torch.autocast("cpu", torch.bfloat16):
        nats_BT, _ = model(text_BT, text_BT, age_BT, model.empty_memory(2))
    nats_BT.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    assert_close(nats_BT, exact_BT, rtol=0.1, atol=0.1)  # bf16 has three digits
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        again_BT, _ = model(text_BT, text_BT, age_BT, model.empty_kv_cache(2))
    assert_close(again_BT, exact_BT.detach(), rtol=0.1, atol=0.1)


def test_learned_scores_without_distances_are_refused_where_they_have_no_gradient() -> None:
    inputs = Inputs.of([2, 3, 4, 5, 6], "alibi")
    inputs.terms.score_HS.requires_grad_()
    with pytest.raises(NotImplementedError, match="no gradient"):
        inputs.run(choose_attention("fused", device=CPU, with_dropout=False))
