"""The window path computes the loss of one segment of L tokens, and the operations it counts."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from tests.support.small_models import random_text, small_model
from txl_dist.bench.window_path import WindowReader
from txl_dist.model.flops import inference_flops, window_flops

OPTIONS: list[dict[str, Any]] = [
    {},
    {"n_layer": 1},
    {"n_layer": 3, "pre_lnorm": True, "untie_r": True},
    {"cutoffs": (4, 9), "d_embed": 3},
    {"distance_encoding": "shaw", "clamp_len": 4},
    {"distance_encoding": "rotary"},
    {"distance_encoding": "alibi"},
    {"distance_encoding": "absolute"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("block_len", [1, 4, 20])
def test_the_window_path_equals_one_segment(options: dict[str, Any], block_len: int) -> None:
    model = small_model(seed=1, **({"mem_len": 0} | options))
    reader = WindowReader(model, window_len=9, num_windows=2, block_len=block_len)
    for seed in (1, 2):  # the second window must not see the first
        text_BN = random_text(2, 10, seed=seed)
        age_BT = torch.arange(9).expand(2, 9)
        nats_BT, _ = model(text_BN[:, :-1], text_BN[:, 1:], age_BT, model.empty_memory(2))
        assert_close(reader.last_nats(text_BN[:, :-1], text_BN[:, -1]), nats_BT[:, -1])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("block_len", [4, 9])
def test_the_formula_equals_torchs_counter(options: dict[str, Any], block_len: int) -> None:
    model = small_model(attention="reference", **({"mem_len": 0} | options))
    reader = WindowReader(model, window_len=9, num_windows=1, block_len=block_len)
    text_BN = random_text(1, 10) % 4
    with FlopCounterMode(display=False) as counted:
        reader.last_nats(text_BN[:, :-1], text_BN[:, -1])
    flops = window_flops(model.config, window_len=9, block_len=block_len)
    assert counted.get_total_flops() == flops


def test_a_window_of_one_token_costs_as_much_as_a_segment_of_one() -> None:
    config = small_model(mem_len=0).config
    assert window_flops(config, window_len=1, block_len=8) == inference_flops(
        config, num_lanes=1, tgt_len=1
    )
