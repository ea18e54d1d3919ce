"""Attention: every implementation equals the equation, and the equation is the paper's."""

from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from tests.support.attention_implementations import SLOW_IN_TRITON, TORCH_IMPLEMENTATIONS
from tests.support.attention_inputs import TERMS, Inputs
from tests.support.small_models import MODERN, random_text, small_model
from txl_dist.errors import ConfigError
from txl_dist.model import devices
from txl_dist.model.attention import choose_implementation
from txl_dist.model.attention.torch_attention import (
    cpu,
    reference,
    reference_scores,
    sdpa,
)
from txl_dist.model.choices import ATTENTION_IMPLEMENTATIONS, DISTANCE_ENCODINGS
from txl_dist.model.config import ModelConfig
from txl_dist.model.devices import triton_unavailable_reason
from txl_dist.model.dropout import LaneDropoutMasks
from txl_dist.runtime.device import require_triton

DIFFERENT_SIZES = st.lists(st.integers(1, 7), min_size=5, max_size=5, unique=True)
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("implementation", TORCH_IMPLEMENTATIONS)
@pytest.mark.parametrize("dropout", [False, True], ids=["", "dropout"])
@settings(max_examples=15, deadline=None)
@given(sizes=DIFFERENT_SIZES)
@example(sizes=[2, 3, 0, 4, 5])  # no memory
@example(sizes=[1, 1, 1, 1, 1])
def test_every_form_equals_the_equation_and_its_gradients(
    implementation: str, terms: str, dropout: bool, sizes: list[int]
) -> None:
    inputs = Inputs.of(sizes, terms, dropout=dropout)
    if dropout and ATTENTION_IMPLEMENTATIONS[implementation].is_for_inference:
        return
    attention = resolve_name(ATTENTION_IMPLEMENTATIONS[implementation].function)
    mixed, expected = inputs.run(attention), inputs.run(reference)
    assert_close(mixed, expected)
    weight = torch.randn_like(mixed)
    gradients = inputs.gradients(attention, weight)
    expected_gradients = inputs.gradients(reference, weight)
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


@pytest.mark.parametrize("name", ["auto", "sdpa", "cpu", "triton"])
@pytest.mark.parametrize(
    ("is_training", "device", "with_dropout", "expected"),
    [
        (True, CPU, False, "cpu"),
        (True, CPU, True, "cpu"),
        (False, CPU, False, "sdpa"),
        (False, CPU, True, "cpu"),
        (True, GPU, False, "triton"),
        (False, GPU, True, "triton"),
    ],
)
def test_auto_takes_the_fastest_form_that_supports_the_call(
    is_training: bool, device: torch.device, with_dropout: bool, expected: str, name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """So does a form that cannot run. Heads that are too wide for triton take the equation."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    config = ModelConfig(attention=name, d_head=256)
    with torch.set_grad_enabled(is_training):
        chosen = choose_implementation(config, device, with_dropout=with_dropout)
        config = ModelConfig(d_head=257)
        too_wide = choose_implementation(config, device, with_dropout=with_dropout)
    if name == "auto" or device == GPU or name == "triton":
        assert chosen is ATTENTION_IMPLEMENTATIONS[expected]
    else:
        assert chosen is ATTENTION_IMPLEMENTATIONS["cpu" if with_dropout else name]
    assert too_wide is ATTENTION_IMPLEMENTATIONS[expected if device == CPU else "reference"]


def test_triton_needs_a_new_gpu_and_a_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("CC", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    assert "no GPU" in triton_unavailable_reason(CPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "V100")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "C compiler" in triton_unavailable_reason(GPU)
    with pytest.raises(ConfigError, match=r"GPUs need triton, and it needs a C compiler .*gcc"):
        require_triton(GPU)
    compiler = tmp_path / "gcc"
    compiler.touch(mode=0o755)
    monkeypatch.setattr(devices, "python_include", lambda: tmp_path)
    assert f"it needs {tmp_path}/Python.h" in triton_unavailable_reason(GPU)
    (tmp_path / "Python.h").touch()
    require_triton(GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    assert "V100 has a compute capability below 8.0" in triton_unavailable_reason(GPU)


def test_a_form_without_dropout_refuses_a_dropout_mask() -> None:
    inputs = Inputs.of([2, 3, 4, 5, 6], "paper", dropout=True)
    with pytest.raises(NotImplementedError, match="no dropout"):
        inputs.run(sdpa)


@pytest.mark.parametrize("implementation", SLOW_IN_TRITON)
@pytest.mark.parametrize("name", DISTANCE_ENCODINGS)
@pytest.mark.usefixtures("interpreted_bf16")
def test_every_encoding_runs_in_every_form_in_bf16(name: str, implementation: str) -> None:
    facts = DISTANCE_ENCODINGS[name]
    options = {"clamp_len": 4} if facts.needs_clamp_len else {}
    options |= {} if facts.allows_memory else {"mem_len": 0}
    model = small_model(distance_encoding=name, attention=implementation, **options).float()
    text_BT, age_BT = random_text(2, 3), torch.arange(3).expand(2, 3)
    exact_BT, _ = model(text_BT, text_BT, age_BT, model.empty_memory(2))
    with torch.autocast("cpu", torch.bfloat16):
        nats_BT, _ = model(text_BT, text_BT, age_BT, model.empty_memory(2))
    nats_BT.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    assert_close(nats_BT, exact_BT, rtol=0.1, atol=0.1)  # bf16 has three digits
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        again_BT, _ = model(text_BT, text_BT, age_BT, model.inference_state(2))
    assert_close(again_BT, exact_BT.detach(), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("implementation", SLOW_IN_TRITON)
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_fewer_heads_of_keys_are_heads_that_are_equal(
    num_kv_heads: int, implementation: str
) -> None:
    """Nats, gradients with dropout, and attention weights are those of repeated keys and values."""
    block = MODERN["grouped"] | {"n_kv_head": num_kv_heads, "dropatt": 0.3}
    grouped = small_model(**block, attention=implementation)
    whole = small_model(**(block | {"n_kv_head": None}), attention="reference")
    repeats = grouped.config.n_head // num_kv_heads

    def repeated(weight: Tensor) -> Tensor:
        heads = weight.unflatten(0, (2, num_kv_heads, -1))
        return heads.repeat_interleave(repeats, dim=1).flatten(0, 2)

    state = {
        name: repeated(weight) if "key_value" in name else weight
        for name, weight in grouped.state_dict().items()
    }
    whole.load_state_dict(state)
    masks, age_BT = LaneDropoutMasks(seed=3, step=5, lanes=[4, 2]), torch.tensor([[4, 0, 1]] * 2)
    results = []
    for model in (grouped, whole):
        text_BT, memory = random_text(2, 3), model.empty_memory(2)
        for _ in range(2):
            nats_BT, memory = model(text_BT, text_BT, age_BT, memory, masks)
        nats_BT.sum().backward()
        weights: list[Tensor] = []
        with torch.no_grad():
            model.eval()
            seen = weights.append
            model.hidden(text_BT, age_BT, memory, None, lambda _, w, seen=seen: seen(w))
        results.append([nats_BT.detach(), *weights])
    assert_close(*results)
    gradients = (dict(model.named_parameters()) for model in (grouped, whole))
    for (name, own), other in zip(next(gradients).items(), next(gradients).values(), strict=True):
        assert other.grad is not None
        expected = other.grad
        if "key_value" in name:
            heads = expected.unflatten(0, (2, num_kv_heads, repeats, -1))
            expected = heads.sum(2).flatten(0, 2)
        assert_close(own.grad, expected, msg=lambda m, name=name: f"{name}: {m}")


def test_learned_scores_without_distances_are_refused_where_they_have_no_gradient() -> None:
    inputs = Inputs.of([2, 3, 4, 5, 6], "alibi")
    inputs.terms.score_HS.requires_grad_()
    with pytest.raises(NotImplementedError, match="no gradient"):
        inputs.run(cpu)
