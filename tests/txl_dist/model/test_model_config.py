"""ModelConfig: what cannot be is refused with the field and a value that can."""

from typing import Any

import pytest

from txl_dist.model.config import ModelConfig

IMPOSSIBLE = [
    ({"cutoffs": (6, 3)}, "cutoffs=.* drop the entry out of order"),
    ({"cutoffs": (3, 11), "vocab_size": 11}, "cutoffs=.* size, 11"),
    ({"same_length": True, "mem_len": 0}, "same_length=true needs a memory: set mem_len"),
    ({"distance_encoding": "rotary", "d_head": 5}, "d_head=5 must be even.*use 6"),
    ({"distance_encoding": "sinusoidal", "d_model": 7}, "d_model=7 must be even.*use 8"),
    ({"distance_encoding": "shaw"}, "set clamp_len"),
    ({"distance_encoding": "rotary", "clamp_len": 4}, "clamp_len=4 .*use null"),
    ({"distance_encoding": "absolute", "mem_len": 3}, "mem_len=3 .*use 0"),
    ({"distance_encoding": "alibi", "untie_r": True}, "untie_r=true .*use false"),
    ({"div_val": 2}, "div_val=2 must be 1"),
    ({"d_embed": 4, "div_val": 8, "cutoffs": (3,)}, "div_val=8 narrows 4 to nothing"),
    ({"dropout": 1.0}, r"dropout=1.0 must lie in \[0, 0.99\]"),
    ({"clamp_len": 0}, "clamp_len=0 must be at least 1, or null"),
]


@pytest.mark.parametrize(("options", "message"), IMPOSSIBLE, ids=lambda value: str(value)[:40])
def test_impossible_options_are_refused_with_a_legal_value(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**options)


@pytest.mark.parametrize("name", ["shaw", "rotary", "alibi", "absolute"])
def test_an_odd_width_is_no_trouble_for_encodings_without_its_sines(name: str) -> None:
    options = {"clamp_len": 4} if name == "shaw" else {}
    options |= {"d_model": 8, "mem_len": 0} if name == "absolute" else {"d_model": 7}
    assert ModelConfig(distance_encoding=name, **options).d_model in (7, 8)
