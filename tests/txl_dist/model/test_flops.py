"""The formula counts the same operations as torch's counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.support.small_models import MODERN, SHORT_AND_LONG, random_text, small_model
from txl_dist.model.flops import forward_flops, inference_flops, training_flops

OPTIONS = [
    {},
    {"mem_len": 0},
    {"mem_len": 9, "n_layer": 3, "tie_weight": False},
    {"d_embed": 3, "pre_lnorm": True},
    {"cutoffs": (4, 9)},
    {"cutoffs": (4, 9), "d_embed": 3},
    {"distance_encoding": "shaw", "clamp_len": 6},
    {"distance_encoding": "rotary"},
    {"distance_encoding": "alibi"},
    *MODERN.values(),
    SHORT_AND_LONG,
    SHORT_AND_LONG | {"distance_encoding": "shaw", "clamp_len": 6},
    {"distance_encoding": "absolute", "mem_len": 0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_formula_equals_torchs_counter(options: dict) -> None:
    model = small_model(attention="reference", **options)
    text_BT = random_text(2, 7)
    bounds = model.config.cluster_bounds[1:]
    tail_rows = [int(((text_BT >= low) & (text_BT < high)).sum()) for low, high in bounds]
    arguments = (text_BT, text_BT, torch.full_like(text_BT, 100), model.empty_memory(2))
    shape = {"num_lanes": 2, "tgt_len": 7, "tail_rows": tail_rows}
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        model(*arguments)
    with FlopCounterMode(display=False) as training:
        model(*arguments)[0].sum().backward()
    assert forward.get_total_flops() == forward_flops(model.config, **shape)
    assert training.get_total_flops() == training_flops(model.config, **shape)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_through_the_memory_are_counted(options: dict) -> None:
    """Of three segments; tails are left out, because their rows are divided unevenly."""
    model = small_model(attention="reference", **(options | {"cutoffs": ()}))
    text_BT = random_text(2, 6)
    arguments = (text_BT, text_BT, torch.full_like(text_BT, 100), model.empty_memory(2), None, 3)
    with FlopCounterMode(display=False) as counted:
        model(*arguments)[0].sum().backward()
    expected = training_flops(model.config, num_lanes=2, tgt_len=6, num_segments=3)
    assert counted.get_total_flops() == expected


@pytest.mark.parametrize("kind", ["compressive", "tokens", "recurrent+tokens"])
def test_so_are_the_products_of_other_kinds_of_memory(kind: str) -> None:
    """In training up to those whose gradient a first or a last segment does not need."""
    model = small_model(attention="reference", memory=kind)
    text_BT = random_text(2, 12)
    arguments = text_BT, text_BT, torch.full_like(text_BT, 100), model.empty_memory(2)
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        model(*arguments)
    assert forward.get_total_flops() == forward_flops(model.config, num_lanes=2, tgt_len=12)
    with FlopCounterMode(display=False) as inference, torch.no_grad():
        model(*arguments[:3], model.inference_state(2))
    assert inference.get_total_flops() == inference_flops(model.config, num_lanes=2, tgt_len=12)
    with FlopCounterMode(display=False) as training:
        model(*arguments, None, 3)[0].sum().backward()
    expected = training_flops(model.config, num_lanes=2, tgt_len=12, num_segments=3)
    assert training.get_total_flops() == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_inference_does_not_count_projections_of_memory_and_distances(options: dict) -> None:
    model = small_model(attention="reference", **options)
    text_BT, cache = random_text(2, 7) % 4, model.inference_state(2)
    for _ in range(2):  # the first call fills the cache
        with FlopCounterMode(display=False) as counted, torch.no_grad():
            model(text_BT, text_BT, torch.full_like(text_BT, 100), cache)
    assert counted.get_total_flops() == inference_flops(model.config, num_lanes=2, tgt_len=7)
