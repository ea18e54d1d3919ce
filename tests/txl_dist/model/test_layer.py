"""The block of today against its equations, written down term by term."""

import pytest
import torch
from torch import Tensor, einsum
from torch.testing import assert_close

from tests.support.small_models import MODERN, random_text, read_stream, small_model
from txl_dist.model.choices import RECIPES
from txl_dist.model.config import ModelConfig
from txl_dist.model.layer import Layer
from txl_dist.model.norms import normalise
from txl_dist.model.transformer_xl import TransformerXL

# Shapes: B lanes, N tokens of a text, D d_model, H heads, K d_head


def rms_norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def turned(x_BNHK: Tensor) -> Tensor:
    """Each pair of channels (i, i + K / 2) as a complex number, turned by n * 10000^(-2i / K)."""
    num_tokens, half = x_BNHK.shape[1], x_BNHK.shape[-1] // 2
    pair = torch.complex(x_BNHK[..., :half], x_BNHK[..., half:])
    angle = torch.arange(num_tokens).double()[:, None] * 10000.0 ** (-torch.arange(half) / half)
    pair = pair * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([pair.real, pair.imag], dim=-1)


def attention(layer: Layer, x_BND: Tensor, config: ModelConfig) -> Tensor:
    heads = (config.n_head, config.d_head)
    part = layer.attention
    q = part.query(x_BND).unflatten(-1, heads)
    k, v = part.key_value(x_BND).unflatten(-1, (2, *heads)).unbind(2)
    q, k = (turned(rms_norm(x) / config.d_head**0.5) for x in (q, k))
    score = einsum("bnhk,bmhk->bhnm", q, k) * (config.attention_scale or config.d_head**0.5)
    future = torch.ones(score.shape[-2:]).triu(1).bool()
    mixed = einsum("bhnm,bmhk->bnhk", score.masked_fill(future, -torch.inf).softmax(-1), v)
    assert part.gate is not None
    mixed = mixed * 2 / (1 + (-part.gate(x_BND)).exp())[..., None]
    return part.out(mixed.flatten(2))


def feed_forward(layer: Layer, x_BND: Tensor) -> Tensor:
    a, b = layer.feed_forward.up(x_BND).chunk(2, dim=-1)
    return layer.feed_forward.down(a / (1 + (-a).exp()) * b)


def reference_nats(model: TransformerXL, text_BN: Tensor) -> Tensor:
    """Of the recipe `modern`, the whole text in one segment."""
    config, input_BN = model.config, text_BN[:, :-1]
    first = x = model.table.weights[0][input_BN] * config.d_model**0.5
    for (a, b), layer in zip(model.residual_scalars, model.layers, strict=True):
        assert isinstance(layer, Layer)
        x = a * x + b * first
        x = x + attention(layer, rms_norm(x), config)
        x = x + feed_forward(layer, rms_norm(x))
    logits = rms_norm(x) @ model.softmax.weights[0].T
    return -logits.log_softmax(-1).gather(2, text_BN[:, 1:, None]).squeeze(2)


@pytest.mark.parametrize("scale", [15.4, None])
def test_the_recipe_computes_its_equations_in_any_segments(scale: float | None) -> None:
    model = small_model(**(MODERN["modern"] | {"attention_scale": scale}))
    text_BN = random_text(2, 12)
    expected = reference_nats(model, text_BN)
    for tgt_len in (11, 4, 1):
        nats_BN, _ = read_stream(model, text_BN, tgt_len=tgt_len, mem_len=12)
        assert_close(nats_BN, expected, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("activation", ["relu", "relu2", "swiglu"])
def test_activations(activation: str) -> None:
    part = small_model(feed_forward=activation).layers[0].feed_forward
    x = torch.randn(5, 14, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = {
        "relu": x.clamp(min=0),
        "relu2": x.clamp(min=0) ** 2,
        "swiglu": x[:, :7] * torch.sigmoid(x[:, :7]) * x[:, 7:],
    }
    assert_close(part.activate(x.clone()), expected[activation])


@pytest.mark.parametrize("is_rotated", [False, True])
def test_the_gradient_of_a_norm_is_that_of_its_differences(is_rotated: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    angle = torch.rand(5, 2, generator=generator, dtype=torch.float64)
    rotary = (angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)) if is_rotated else None
    torch.autograd.gradcheck(lambda x: normalise(x, 1.7, rotary), [x])


def test_the_norm_of_zeros_is_zero_and_bf16_keeps_its_dtype() -> None:
    assert torch.equal(normalise(torch.zeros(2, 3)), torch.zeros(2, 3))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(4)).bfloat16()
    assert_close(normalise(x), rms_norm(x.float()).bfloat16())


def test_the_recipe_of_the_paper_is_the_default_and_settings_can_be_changed() -> None:
    assert ModelConfig.of_recipe("paper") == ModelConfig()
    changed = ModelConfig.of_recipe("modern", qk_norm=False)
    assert (changed.qk_norm, changed.norm) == (False, RECIPES["modern"]["norm"])
    with pytest.raises(ValueError, match="recipe='modrn' must be one of paper, modern"):
        ModelConfig.of_recipe("modrn")
