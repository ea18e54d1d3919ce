"""The order of ids, and symbols without an id."""

import pytest

from data_pipeline.tokenizers import train_tokenizer
from tests.data_pipeline.tokenizers.sample_tokenizers import CHAR, WORD


def test_symbols_are_ordered_by_count_and_then_by_code_point() -> None:
    characters = train_tokenizer(CHAR, lambda: iter(["bba", "cc€"]))
    assert characters.decode(range(5)) == "bca€\ufffd"
    ties = train_tokenizer(WORD, lambda: iter(["! <unk> a\n"]))
    assert [ties.decode([number]) for number in range(4)] == ["\n", "!", "<unk>", "a"]
    words = train_tokenizer(WORD, lambda: iter(["b a\nb c\n", "\n"]))
    assert [words.decode([number]) for number in range(5)] == ["\n", "b", "a", "c", "<unk>"]


@pytest.mark.parametrize("limit", [{"vocab_size": 5}, {"min_freq": 2}])
def test_excluded_symbols_become_unknown_and_add_to_its_count(limit: dict[str, int]) -> None:
    text = "a a a a b b c d e\n\n"
    tokenizer = train_tokenizer(WORD.model_copy(update=limit), lambda: iter([text]))
    assert tokenizer.vocab_size == 5
    assert [tokenizer.decode([number]) for number in range(4)] == ["a", "<unk>", "\n", "b"]
    assert tokenizer.decode(tokenizer.encode(text)) == "a a a a b b <unk> <unk> <unk>\n\n"
    characters = train_tokenizer(CHAR.model_copy(update=limit), lambda: iter(["aaabbbcde"]))
    assert characters.decode(characters.encode("abcx")).startswith("ab")
    assert characters.decode(characters.encode("dx")) == "\ufffd\ufffd"
