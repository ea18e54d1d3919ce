"""ModelConfig: an invalid option is refused, with the name of the field and a valid value."""

from typing import Any

import pytest

from txl_dist.model.choices import DISTANCE_ENCODINGS
from txl_dist.model.config import ModelConfig

COMPRESSIVE, TOKENS = {"memory": "compressive"}, {"memory": "tokens"}
INVALID: list[tuple[dict[str, Any], str]] = [
    ({"mem_shares": (0.5, 1.5)}, "must be between 0 and 1"),
    ({"mem_shares": (0.5,)}, "the largest 1"),
    ({"mem_shares": (0.5, 1.0), "n_layer": 1}, "2 entries for n_layer=1"),
    ({"mem_shares": (0.0, 1.0), "same_length": True}, "needs a memory in every layer"),
    ({"norm_epsilon": 0.0}, "norm_epsilon=0.0 must be above 0"),
    ({"n_head": 4, "n_kv_head": 3}, "n_kv_head=3 must divide n_head=4"),
    ({"n_head": 4, "n_kv_head": 2}, "n_kv_head=2 for n_head=4 is not supported by"),
    ({"rotary_base": 5.0}, "rotary_base=5.0 is not supported by distance_encoding=sinusoidal"),
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
    ({"d_embed": 4, "div_val": 8, "cutoffs": (3,)}, "div_val=8 narrows width 4 to 0"),
    ({"dropout": 1.0}, r"dropout=1.0 must be in \[0, 0.99\]"),
    ({"clamp_len": 0}, "clamp_len=0 must be at least 1"),
    ({"attention": "triton", "d_head": 257}, "triton supports d_head up to 256, not 257"),
    ({"vocab_size": None, "div_val": 2}, "no tables for cutoffs"),
    ({"compressed_len": 3}, "compressed_len=3 is not supported by memory=recurrent"),
    (COMPRESSIVE | {"compression_rate": 1}, "compression_rate=1 must be at least 2"),
    (COMPRESSIVE | {"compressed_len": -1}, "compressed_len=-1 must be at least 0"),
    (COMPRESSIVE | {"same_length": True}, "same_length=true is not supported"),
    (COMPRESSIVE | {"mem_shares": (0.5, 1.0)}, "mem_shares=.* is not supported"),
    (TOKENS | {"same_length": True}, "same_length=true is not supported by memory=tokens"),
    (TOKENS | {"distance_encoding": "absolute"}, "use another distance_encoding"),
    (TOKENS | {"distance_encoding": "absolute", "mem_len": 0}, "use another distance_encoding"),
    (TOKENS | {"memory_tokens": 0}, "memory_tokens=0 must be at least 1"),
    (TOKENS | {"mem_shares": (0.5, 1.0)}, "mem_shares=.* is not supported by memory=tokens"),
]


@pytest.mark.parametrize(("options", "message"), INVALID, ids=lambda value: str(value)[:40])
def test_invalid_options_are_refused_with_a_valid_value(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**options)


@pytest.mark.parametrize("name", DISTANCE_ENCODINGS)
def test_only_an_encoding_that_fills_d_model_with_sines_needs_it_even(name: str) -> None:
    facts = DISTANCE_ENCODINGS[name]
    options = {"clamp_len": 4} if facts.needs_clamp_len else {}
    options |= {} if facts.allows_memory else {"mem_len": 0}
    d_model = 8 if facts.even_size == "d_model" else 7
    assert ModelConfig(distance_encoding=name, d_model=d_model, **options).d_model == d_model


def test_no_memory_has_two_notations_and_one_config() -> None:
    named = ModelConfig(memory="none", mem_len=7)
    assert named == ModelConfig(memory="recurrent", mem_len=0)
    assert not named.has_memory
    with pytest.raises(ValueError, match="same_length=true needs a memory"):
        ModelConfig(memory="none", same_length=True)


@pytest.mark.parametrize(
    "option",
    ["distance_encoding", "attention", "norm", "feed_forward", "recipe", "memory"],
)
def test_an_unknown_name_is_refused_with_the_known_ones(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}='nothing' must be one of "):
        ModelConfig(**{option: "nothing"})
