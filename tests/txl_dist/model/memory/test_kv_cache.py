"""KVCache: the same numbers as a RecurrentMemory, which is projected again for every segment."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from tests.support.small_models import MODERN, SHORT_AND_LONG, random_text, small_model
from txl_dist.model.memory import recurrent
from txl_dist.model.memory.recurrent import KVCache, RecurrentMemory
from txl_dist.model.transformer_xl import TransformerXL

OPTIONS = [
    {},
    {"pre_lnorm": True, "untie_r": True},
    {"same_length": True, "clamp_len": 3, "attention": "reference"},
    {"distance_encoding": "shaw", "clamp_len": 4},
    {"distance_encoding": "rotary", "attention": "sdpa"},
    {"distance_encoding": "alibi"},
    {"mem_len": 0},
    *MODERN.values(),
    SHORT_AND_LONG,
]


def nats_of_segments(
    model: TransformerXL, tgt_lens: list[int], memory: RecurrentMemory | KVCache
) -> list[Tensor]:
    """Nats of a random text read in segments of these lengths."""
    text_BN, start, nats = random_text(2, sum(tgt_lens) + 1), 0, []
    # The second lane begins a document at token 6.
    age_BN = torch.stack(
        [torch.arange(text_BN.shape[1]), (torch.arange(text_BN.shape[1]) - 6) % 99]
    )
    age_BN[1, :6] = torch.arange(6)[: len(age_BN[1, :6])]
    for tgt_len in tgt_lens:
        here, after = slice(start, start + tgt_len), slice(start + 1, start + tgt_len + 1)
        with torch.no_grad():
            nats_BT, memory = model(text_BN[:, here], text_BN[:, after], age_BN[:, here], memory)
        nats.append(nats_BT)
        start += tgt_len
    return nats


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@settings(max_examples=20, deadline=None)
@given(
    tgt_lens=st.lists(st.integers(1, 7), min_size=1, max_size=8),
    spare=st.integers(1, 9),
)
def test_the_numbers_are_those_of_the_memory(
    options: dict, tgt_lens: list[int], spare: int
) -> None:
    model = small_model(n_layer=3, **options)
    expected = nats_of_segments(model, tgt_lens, model.empty_memory(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrent, "_SPARE_TOKENS", spare)  # copied after a few tokens
        nats = nats_of_segments(model, tgt_lens, model.inference_state(2))
    assert_close(nats, expected)


def test_each_token_is_projected_once() -> None:
    model, rows = small_model(), []
    model.layers[0].attention.key_value.register_forward_hook(
        lambda _module, inputs, _output: rows.append(inputs[0].shape[1])
    )
    nats_of_segments(model, [4, 4, 1, 1], model.inference_state(2))
    assert rows == [4, 4, 1, 1]


def test_distances_are_projected_once_per_number_of_keys() -> None:
    model, calls = small_model(), []
    model.layers[1].attention.distances.register_forward_hook(lambda *_: calls.append(1))
    nats_of_segments(model, [4, 4, 1, 1, 1, 4], model.inference_state(2))
    assert len(calls) == 2


def test_gradients_and_other_numbers_of_lanes_are_refused() -> None:
    model, text_BT = small_model(), random_text(2, 3)
    segment = (text_BT, text_BT, torch.zeros_like(text_BT))
    with pytest.raises(RuntimeError, match="no_grad"):
        model(*segment, model.inference_state(2))
    with torch.no_grad(), pytest.raises(ValueError, match="2 lanes for a KVCache of 3"):
        model(*segment, model.inference_state(3))


@torch.no_grad()
def test_more_tokens_than_the_last_segment_has_are_not_removed() -> None:
    """Of two removals without a segment in between, the second finds none."""
    model, text_BT = small_model(), random_text(2, 4)
    cache = model.inference_state(2)
    model(text_BT, text_BT, torch.arange(4).expand(2, -1), cache)
    cache.select([1, 0], [3, 0])
    with pytest.raises(ValueError, match="only the tokens of the last segment to remove"):
        cache.select([1, 0], [1, 0])


def test_a_cache_holds_no_autograd_graph() -> None:
    model, text_BT = small_model(), random_text(2, 3)
    cache = model.inference_state(2)
    with torch.no_grad():
        model(text_BT, text_BT, torch.zeros_like(text_BT), cache)
        keys, values = cache.layers[0].append(*[torch.zeros(3, 2, 1, 4, dtype=torch.float64)] * 2)
    assert not keys.requires_grad
    assert not values.requires_grad
