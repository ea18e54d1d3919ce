"""TokenStep: bit for bit what the model computes for a segment of one token."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.small_models import MODERN, SHORT_AND_LONG, random_text, small_model
from txl_dist.config.run_config import Precision
from txl_dist.model.memory.recurrent import KVCache
from txl_dist.model.token_step import TokenStep
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.device import autocast

OPTIONS: list[dict[str, Any]] = [
    {},
    {"pre_lnorm": True, "untie_r": True, "clamp_len": 3},
    {"same_length": True, "attention": "sdpa"},
    {"distance_encoding": "shaw", "clamp_len": 4},
    {"distance_encoding": "rotary", "pre_lnorm": True},
    {"distance_encoding": "alibi"},
    {"cutoffs": (3, 7), "div_val": 2, "d_model": 8},
    *MODERN.values(),
    MODERN["modern"] | SHORT_AND_LONG,
]
AGES = [0, 3, 1]
"""Of three lanes at the first token; with 5 tokens of memory, masks differ for some steps."""
NUM_STEPS = 9


def read_tokens(model: TransformerXL, cache: KVCache, *, with_step: bool) -> list[Tensor]:
    """The output [B, D] after each of some tokens."""
    text_BN, step, outputs = random_text(len(AGES), NUM_STEPS), None, []
    for number, token_B in enumerate(text_BN.t()):
        ages = [age + number for age in AGES]
        if with_step:
            step = step or TokenStep(model, cache)
            outputs.append(step(token_B, ages))
        else:
            hidden_BTD, _ = model.hidden(token_B[:, None], torch.tensor(ages)[:, None], cache)
            outputs.append(hidden_BTD[:, 0])
    return outputs


def both(model: TransformerXL, precision: Precision = "fp32") -> tuple[list[Tensor], list[Tensor]]:
    """The outputs of TokenStep and of the model, after a segment that both read alike."""
    prompt_BT, age_BT = random_text(len(AGES), 4, seed=1), torch.arange(4).expand(len(AGES), 4)
    outputs = []
    for with_step in (True, False):
        cache = model.inference_state(len(AGES))
        with torch.inference_mode(), autocast(precision, torch.device("cpu")):
            model.hidden(prompt_BT, age_BT, cache)
            outputs.append(read_tokens(model, cache, with_step=with_step))
    return outputs[0], outputs[1]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_it_equals_a_segment_of_one_token(options: dict[str, Any], dtype: torch.dtype) -> None:
    stepped, expected = both(small_model(**options).to(dtype))
    assert all(map(torch.equal, stepped, expected))


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_it_equals_the_model_under_autocast(options: dict[str, Any]) -> None:
    stepped, expected = both(small_model(**options).float(), "bf16")
    assert all(map(torch.equal, stepped, expected))


def test_sizes_of_a_real_model_give_the_same_bits() -> None:
    """Vector instructions and blocks of products begin at such sizes."""
    sizes = {"d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 130, "mem_len": 70}
    stepped, expected = both(small_model(**sizes).float())
    assert all(map(torch.equal, stepped, expected))


def test_a_full_memory_needs_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    step = TokenStep(model, model.inference_state(2))
    computed = []
    monkeypatch.setattr(TokenStep, "_compute_mask", lambda *_: computed.append(1))
    with torch.inference_mode():
        for age in (3, 4, 5, 6):
            step(torch.tensor([1, 2]), [age, 5])
    assert len(computed) == 2, "the first lane has a full memory from age mem_len=5 on"


@pytest.mark.parametrize("options", [{"mem_len": 0}, {"attention": "reference"}], ids=str)
def test_other_models_are_refused(options: dict[str, Any]) -> None:
    model = small_model(**options)
    assert not TokenStep.supports(model, model.inference_state(1))
    with pytest.raises(ValueError, match="memory"):
        TokenStep(model, model.inference_state(1))
