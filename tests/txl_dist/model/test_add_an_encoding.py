"""docs/how_to/add_an_encoding.md: its code works in every implementation of attention."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.support.attention_implementations import SLOW_IN_TRITON
from tests.support.small_models import random_text, read_stream, small_model
from txl_dist.model.choices import DISTANCE_ENCODINGS, EncodingFacts
from txl_dist.model.config import ModelConfig
from txl_dist.model.flops import training_flops

PAGE = Path(__file__).parents[3] / "docs" / "how_to" / "add_an_encoding.md"


@pytest.fixture(autouse=True)
def _log_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    source, entry = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    module = ModuleType("txl_dist.model.log_bias")
    exec(source, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names: dict[str, Any] = {"EncodingFacts": EncodingFacts}
    for name, facts in eval("{" + entry + "}", names).items():
        monkeypatch.setitem(DISTANCE_ENCODINGS, name, facts)


@pytest.mark.parametrize("implementation", ["auto", *SLOW_IN_TRITON])
def test_segments_equal_one_segment_in_every_form(implementation: str) -> None:
    model = small_model(distance_encoding="log", attention=implementation, mem_len=9)
    text_BN = random_text(2, 9)
    expected_BN, _ = read_stream(model, text_BN, tgt_len=8)
    nats_BN, _ = read_stream(model, text_BN, tgt_len=3)
    assert_close(nats_BN, expected_BN)
    plain = small_model(distance_encoding="absolute", mem_len=0)
    plain_BN, _ = read_stream(plain, text_BN, tgt_len=8)
    assert (nats_BN - plain_BN).abs().max() > 1e-3
    nats_BN.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_kv_cache_gives_the_same_numbers() -> None:
    model, text_BN = small_model(distance_encoding="log", mem_len=9), random_text(2, 9)
    expected_BN, _ = read_stream(model, text_BN, tgt_len=4)
    with torch.no_grad():
        nats_BN, _ = read_stream(model, text_BN, tgt_len=4, memory=model.inference_state(2))
    assert_close(nats_BN, expected_BN)


def test_the_facts_are_used() -> None:
    config = ModelConfig(distance_encoding="log", vocab_size=11, d_head=5, clamp_len=3)
    alibi = ModelConfig(distance_encoding="alibi", vocab_size=11, d_head=5)
    counts = [training_flops(c, num_lanes=2, tgt_len=3) for c in (config, alibi)]
    assert counts[0] == counts[1]
    with pytest.raises(ValueError, match="untie_r=true is not supported by distance_encoding=log"):
        ModelConfig(distance_encoding="log", untie_r=True)
