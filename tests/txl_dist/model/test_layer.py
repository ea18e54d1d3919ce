"""The block of today against its equations, written down term by term."""

from typing import Any

import pytest
import torch
from torch import Tensor, einsum
from torch.testing import assert_close

from tests.support.small_models import MODERN, random_text, read_stream, small_model
from txl_dist.model.choices import RECIPES
from txl_dist.model.config import ModelConfig
from txl_dist.model.layer_parts import normalise
from txl_dist.model.transformer_xl import Layer, TransformerXL

# Shapes: B lanes, N tokens of a text, D d_model, H heads, K d_head


def rms_norm(x: Tensor, gain: Tensor | float = 1.0) -> Tensor:
    return gain * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def turned(x_BNHK: Tensor, base: float) -> Tensor:
    """Each pair of channels (i, i + K / 2) as a complex number, turned by n * base^(-2i / K)."""
    num_tokens, half = x_BNHK.shape[1], x_BNHK.shape[-1] // 2
    pair = torch.complex(x_BNHK[..., :half], x_BNHK[..., half:])
    exponent = -torch.arange(half).double() / half
    angle = torch.arange(num_tokens).double()[:, None] * base**exponent
    pair = pair * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([pair.real, pair.imag], dim=-1)


def attention(layer: Layer, x_BND: Tensor, config: ModelConfig) -> Tensor:
    part = layer.attention
    q = part.query(x_BND).unflatten(-1, (-1, config.d_head))
    k, v = part.key_value(x_BND).unflatten(-1, (2, -1, config.d_head)).unbind(2)
    q, k = rms_norm(q, part.query_gain_K), rms_norm(k, part.key_gain_K)
    q, k = (turned(x, config.rotary_base) for x in (q, k))
    outputs = []
    for head in range(config.n_head):
        own = head * k.shape[2] // config.n_head
        score = einsum("bnk,bmk->bnm", q[:, :, head], k[:, :, own]) / config.d_head**0.5
        future = torch.ones(score.shape[-2:]).triu(1).bool()
        outputs.append(score.masked_fill(future, -torch.inf).softmax(-1) @ v[:, :, own])
    return part.out(torch.cat(outputs, dim=-1))


def feed_forward(layer: Layer, x_BND: Tensor) -> Tensor:
    a, b = layer.feed_forward.up(x_BND).chunk(2, dim=-1)
    return layer.feed_forward.down(a / (1 + (-a).exp()) * b)


def reference_nats(model: TransformerXL, text_BN: Tensor) -> Tensor:
    """Of the recipe `modern`, the whole text in one segment."""
    config, input_BN = model.config, text_BN[:, :-1]
    x = model.table.weights[0][input_BN]
    if config.scale_embedding:
        x = x * config.d_model**0.5
    for layer in model.layers:
        assert isinstance(layer, Layer)
        x = x + attention(layer, rms_norm(x, layer.attention_norm.weight), config)
        x = x + feed_forward(layer, rms_norm(x, layer.feed_forward_norm.weight))
    weights = model.table.weights if config.tie_weight else model.softmax.weights
    logits = rms_norm(x, model.final_norm.weight) @ weights[0].T
    return -logits.log_softmax(-1).gather(2, text_BN[:, 1:, None]).squeeze(2)


@pytest.mark.parametrize("attention", ["cpu", "sdpa", "reference"])
@pytest.mark.parametrize(
    "options",
    [
        {"tie_weight": True},
        {"n_head": 4, "n_kv_head": 2, "rotary_base": 30.0},
        {"n_head": 4, "n_kv_head": 1, "scale_embedding": False},
    ],
    ids=str,
)
def test_the_recipe_computes_its_equations_in_any_segments(
    options: dict[str, Any], attention: str
) -> None:
    model = small_model(**(MODERN["modern"] | options), attention=attention)
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
    gain = torch.rand(4, generator=generator, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x, gain: normalise(x, gain, 1e-3, rotary), [x, gain])
    torch.autograd.gradcheck(lambda x: normalise(x, None, 1e-3, rotary), [x])


def test_the_norm_of_zeros_is_zero_and_bf16_keeps_its_dtype() -> None:
    assert torch.equal(normalise(torch.zeros(2, 3), torch.ones(3), 1e-6), torch.zeros(2, 3))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(4)).bfloat16()
    assert_close(normalise(x, None, 1e-6), rms_norm(x.float()).bfloat16())


def test_the_recipe_of_the_paper_is_the_default_and_settings_can_be_changed() -> None:
    assert ModelConfig.of_recipe("paper") == ModelConfig()
    changed = ModelConfig.of_recipe("modern", qk_norm=False)
    assert (changed.qk_norm, changed.norm) == (False, RECIPES["modern"]["norm"])
    with pytest.raises(ValueError, match="recipe='modrn' must be one of paper, modern"):
        ModelConfig.of_recipe("modrn")
