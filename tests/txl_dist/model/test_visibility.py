"""Visibility: the rule for every query and key; what does not fit is refused by name."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.small_models import VOCAB_SIZE, random_text, small_model
from txl_dist.model.choices import MEMORY_KINDS
from txl_dist.model.config import ModelConfig
from txl_dist.model.memory import SequenceState
from txl_dist.model.memory.recurrent import Recurrent, RecurrentMemory
from txl_dist.model.visibility import Visibility, check_segment, check_targets, visible_keys


@settings(max_examples=60, deadline=None)
@given(
    ages=st.integers(1, 6).flatmap(
        lambda tgt_len: st.lists(
            st.lists(st.integers(0, 15), min_size=tgt_len, max_size=tgt_len),
            min_size=1,
            max_size=3,
        )
    ),
    mem_len=st.integers(0, 7),
    same_length=st.booleans(),
)
def test_a_key_is_visible_iff_its_distance_is_at_most_the_age(
    ages: list[list[int]], mem_len: int, same_length: bool
) -> None:
    visible_BTS = visible_keys(torch.tensor(ages), num_past=mem_len, same_length=same_length)
    for b, row in enumerate(ages):
        for t, age in enumerate(row):
            for s in range(mem_len + len(row)):
                i, j = t, s - mem_len
                expected = 0 <= i - j <= age and (i - j < mem_len or not same_length)
                assert visible_BTS[b, t, s] == expected, (b, t, s)


@pytest.mark.parametrize("same_length", [False, True])
def test_reach_and_mask_are_the_same_rule(same_length: bool) -> None:
    mem_len, age_BT = 4, torch.tensor([[0, 1, 2], [9, 3, 0]], dtype=torch.int32)
    options = {"num_past": mem_len, "same_length": same_length}
    visibility = Visibility.of(age_BT, mask_dtype=torch.float64, **options)
    distance_TS = mem_len + torch.arange(3)[:, None] - torch.arange(mem_len + 3)
    in_reach_BTS = (distance_TS >= 0) & (distance_TS <= visibility.reach_BT[..., None])
    assert torch.equal(in_reach_BTS, visible_keys(age_BT, **options))
    assert torch.equal(in_reach_BTS, visibility.mask == 0)
    assert Visibility.of(age_BT, mask_dtype=None, **options).mask_BTS is None


LANES, TGT_LEN = 3, 4


def score(model: torch.nn.Module, **changed: Any) -> torch.Tensor:
    text_BN = random_text(LANES, TGT_LEN + 1)
    arguments = {
        "input_BT": text_BN[:, :-1],
        "target_BT": text_BN[:, 1:],
        "age_BT": torch.arange(TGT_LEN).expand(LANES, TGT_LEN),
        "memory": model.empty_memory(LANES),
    }
    return model(**arguments | changed)[0]


def memory(**shape: int) -> RecurrentMemory:
    sizes = {"n_layer": 2, "num_lanes": LANES, "mem_len": 5, "d_model": 6} | shape
    num_lanes = sizes.pop("num_lanes")
    config = ModelConfig(**sizes, distance_encoding="alibi")  # which allows odd sizes
    return Recurrent(config).empty(num_lanes, dtype=torch.float64)


AGES = torch.arange(TGT_LEN).expand(LANES, TGT_LEN)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"input_BT": AGES[:, :0], "target_BT": AGES[:, :0]}, r"input_BT .*\[3, 0\]"),
    "one dimension": ({"input_BT": AGES[0], "target_BT": AGES[0]}, r"input_BT .*\[4\]"),
    "float ids": (
        {"input_BT": AGES.double()},
        r"\[3, 4\]: vectors need \[lanes, tokens, d_",
    ),
    "id too large": ({"input_BT": AGES + VOCAB_SIZE}, "input_BT .* 11 to 14: expected 0 to 10"),
    "negative id": ({"input_BT": AGES - 1}, "input_BT .* -1 to 2: expected 0 to 10"),
    "other targets": ({"target_BT": AGES[:, 1:]}, r"target_BT .*\[3, 3\].*input_BT \[3, 4\]"),
    "target too large": ({"target_BT": AGES + 8}, "target_BT .* 8 to 11: expected -1 to 10"),
    "target -2": ({"target_BT": AGES - 2}, "target_BT .* -2 to 1: expected -1 to 10"),
    "ages of one token": ({"age_BT": AGES[:, :1]}, r"age_BT .*\[3, 1\]"),
    "ages of fewer rows": ({"age_BT": AGES[:2]}, r"age_BT .*\[2, 4\]"),
    "ages without rows": ({"age_BT": AGES[0]}, r"age_BT .*\[4\]"),
    "negative ages": ({"age_BT": AGES - 1}, "age_BT .* -1 to 2: expected at least 0"),
    "float ages": ({"age_BT": AGES.float()}, "age_BT .*float32"),
    "memory of one row": ({"memory": memory(num_lanes=1)}, r"memory .*\[1, 5, 6\].*\[3, mem_len"),
    "memory of another width": ({"memory": memory(d_model=7)}, r"memory .*\[3, 5, 7\]"),
    "memory of another model": ({"memory": memory(n_layer=3)}, "memory has 3 layers.*expected 2"),
}


@pytest.mark.parametrize("options", [{}, {"cutoffs": (3, 6), "div_val": 2}], ids=str)
@pytest.mark.parametrize("wrong", WRONG)
def test_it_is_refused(wrong: str, options: dict[str, Any]) -> None:
    arguments, reason = WRONG[wrong]
    with pytest.raises(ValueError, match=reason):
        score(small_model(**options), **arguments)


def test_something_that_is_no_memory_is_refused() -> None:
    with pytest.raises(TypeError, match=r"memory is None: .* model\.empty_memory\(3\)"):
        score(small_model(), memory=None)


@pytest.mark.parametrize("kind", MEMORY_KINDS)
@pytest.mark.parametrize("is_cached", [False, True])
@torch.no_grad()
def test_the_memory_of_another_kind_or_size_is_refused(kind: str, is_cached: bool) -> None:
    """Also where its tensors would be broadcast, or read as others."""

    def memory_of(**options: Any) -> SequenceState:
        other = small_model(**options)
        return other.inference_state(LANES) if is_cached else other.empty_memory(LANES)

    model = small_model(memory=kind)
    score(model, memory=memory_of(memory=kind))
    others: list[dict[str, Any]] = [{"memory": each} for each in MEMORY_KINDS if each != kind]
    others += [{"memory": kind, "n_layer": 3}]
    if kind != "recurrent":  # whose width a cache does not know
        others += [{"memory": kind, "d_model": 8}]
    if model.config.num_added_tokens:
        others += [{"memory": kind, "memory_tokens": 1}]
    for options in others:
        with pytest.raises(ValueError, match=r"memory|KVCache"):
            score(model, memory=memory_of(**options))


@torch.no_grad()
def test_a_model_of_ids_takes_vectors_in_place_of_those_of_its_table() -> None:
    model = small_model()
    text_BN, memory = random_text(LANES, TGT_LEN + 1), model.empty_memory(LANES)
    nats_BT, _ = model(model.table(text_BN[:, :-1]), text_BN[:, 1:], AGES, memory)
    assert torch.equal(nats_BT, score(model))


def test_one_row_of_ages_is_that_of_all_lanes() -> None:
    model = small_model()
    assert torch.equal(score(model, age_BT=AGES[:1]), score(model))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_value_is_read_of_a_tensor_on_a_gpu_or_without_values(device: str) -> None:
    """A fake tensor raises an error if its value is read."""
    config = small_model().config
    with FakeTensorMode():
        ids_BT = torch.zeros(LANES, TGT_LEN, dtype=torch.int64, device=device)
        check_segment(config, ids_BT - 1, ids_BT - 1, memory())
        check_targets(config, ids_BT - 2, ids_BT)
