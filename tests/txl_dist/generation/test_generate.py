"""Generation of one prompt: the distributions are those of the model as it is evaluated."""

from itertools import islice

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.support.small_models import VOCAB_SIZE, random_text, read_stream, small_model
from txl_dist.generation.generate import generate_tokens
from txl_dist.generation.options import Sampling
from txl_dist.model.transformer_xl import TransformerXL

TGT_LEN = 4
FREELY, GREEDILY = Sampling(), Sampling(temperature=0)


def prompt_of(num_tokens: int) -> list[int]:
    return random_text(1, num_tokens)[0].tolist()


def generated(model: TransformerXL, prompt: list[int], num_tokens: int = 9, **how) -> list[int]:
    how = {"tgt_len": TGT_LEN, "sampling": FREELY, "seed": 0} | how
    return list(islice(generate_tokens(model, prompt, **how), num_tokens))


def logits_of_one_segment(model: TransformerXL, text: list[int]) -> Tensor:
    """Logits [N, V] after each token of a text, read as one segment without memory."""
    memory = small_model(mem_len=0).empty_memory(1)
    with torch.no_grad():
        hidden_BTD, _ = model.hidden(torch.tensor([text]), torch.arange(len(text))[None], memory)
        return model.logits(hidden_BTD)[0]


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 8, 9, 14], ids="prompt of {}".format)
def test_a_long_memory_gives_the_distributions_of_one_segment(
    num_prompt: int, seen: list[Tensor]
) -> None:
    model, prompt = small_model(mem_len=30), prompt_of(num_prompt)
    tokens = generated(model, prompt)
    expected_NV = logits_of_one_segment(model, prompt + tokens)
    assert_close(torch.stack(seen), expected_NV[num_prompt - 1 : -1])


@pytest.mark.parametrize("num_prompt", [3, 4, 5, 8, 9, 14], ids="prompt of {}".format)
def test_a_prompt_is_read_in_segments_as_in_training(num_prompt: int, seen: list[Tensor]) -> None:
    """The memory is shorter than the prompt, so segment boundaries change the result."""
    model, prompt = small_model(mem_len=3), prompt_of(num_prompt)
    first_target = generated(model, prompt, 1)
    text_BN = torch.tensor([prompt + first_target])
    nats_BN, _ = read_stream(model, text_BN, tgt_len=TGT_LEN)
    assert_close(-seen[0].log_softmax(-1)[first_target], nats_BN[0, -1:])


def test_temperature_0_gives_the_most_likely_tokens() -> None:
    model, prompt = small_model(mem_len=30), prompt_of(6)
    tokens = generated(model, prompt, sampling=GREEDILY)
    assert tokens == logits_of_one_segment(model, prompt + tokens)[5:-1].argmax(-1).tolist()


def test_the_same_seed_gives_the_same_text() -> None:
    model, prompt = small_model(), prompt_of(6)
    first = generated(model, prompt, 20, seed=1)
    torch.rand(3)
    assert generated(model, prompt, 20, seed=1) == first
    assert generated(model, prompt, 20, seed=2) != first


def test_it_stops_at_the_end_token_without_yielding_it() -> None:
    model, prompt = small_model(), prompt_of(6)
    free = generated(model, prompt, 40)
    end = free[7]
    assert generated(model, prompt, 40, end=end) == free[: free.index(end)]


def test_a_prompt_needs_a_token() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        generated(small_model(), [])


def test_every_token_can_follow() -> None:
    assert set(generated(small_model(), prompt_of(3), 300)) == set(range(VOCAB_SIZE))


@pytest.mark.parametrize("num_prompt", [1, 4, 5, 7, 9])
@pytest.mark.parametrize("encoding", ["absolute", "sinusoidal"])
def test_without_memory_the_last_tgt_len_tokens_are_seen_as_in_evaluation(
    num_prompt: int, encoding: str, seen: list[Tensor]
) -> None:
    """A segment of evaluation always has `tgt_len` tokens; the end is padding."""
    model = small_model(mem_len=0, distance_encoding=encoding)
    prompt = prompt_of(num_prompt)
    tokens = generated(model, prompt, 3)
    for num_generated, logits_V in enumerate(seen):
        window = (prompt + tokens[:num_generated])[-TGT_LEN:]
        padded = torch.tensor([window + [0] * (TGT_LEN - len(window))])
        with torch.no_grad():
            age_BT = torch.arange(TGT_LEN)[None]
            hidden_BTD, _ = model.hidden(padded, age_BT, model.empty_memory(1))
            assert_close(logits_V, model.logits(hidden_BTD)[0, len(window) - 1])
