"""Bytes, characters and words: round trips, the order of ids, symbols without an id, line ends."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.tokenizers import ByteTokenizer, train_tokenizer
from data_pipeline.tokenizers.byte_char_word import symbols_of
from tests.data_pipeline.tokenizers.sample_tokenizers import CHAR, LINES, LM1B, WORD


@pytest.mark.parametrize("kind", ["byte", "char"])
@given(text=st.text())
def test_any_text_comes_back_from_its_tokens(kind: str, text: str) -> None:
    is_byte = kind == "byte"
    tokenizer = ByteTokenizer() if is_byte else train_tokenizer(CHAR, lambda: iter([text]))
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode() if is_byte else text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())
    assert tokenizer.end_of_document not in ids


def test_the_end_of_document_decodes_to_no_text() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([256, 72, 105, 256]) == "Hi"
    assert tokenizer.token_bytes()[256] == 0


def test_half_a_character_decodes_to_a_replacement_but_its_bytes_are_kept() -> None:
    ids = ByteTokenizer().encode("né")[:-1]
    assert ByteTokenizer().decode(ids) == "n�"
    assert ByteTokenizer().decode_bytes(ids) == b"n\xc3"


def collapsed(text: str) -> str:
    return "\n".join(" ".join(line.split()) for line in text.split("\n"))


@given(st.text(alphabet="ab<>é \n\t\u2028\x1c") | st.text())
def test_words_come_back_with_runs_of_blanks_collapsed(text: str) -> None:
    tokenizer = train_tokenizer(WORD, lambda: iter([text]))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == collapsed(text)
    assert (ids == tokenizer.encode("\n")[0]).sum() == text.count("\n")
    assert tokenizer.end_of_document not in ids


def test_lines_of_the_billion_words_are_opened_and_closed() -> None:
    tokenizer = train_tokenizer(LM1B, lambda: iter(["a b\nc d\n"]))
    mark = int(tokenizer.encode("\n")[0])
    ids = tokenizer.encode("a b\nc d\n")
    assert np.flatnonzero(ids == mark).tolist() == [0, 3, 4, 7]
    assert tokenizer.decode(ids) == "a b\nc d\n"
    assert tokenizer.encode("a b").tolist() == ids[:3].tolist(), "a prompt is not closed"
    assert not tokenizer.token_bytes().any(), "blanks and unknown words have unknown bytes"


def test_special_tokens_written_in_the_text_are_words() -> None:
    tokenizer = train_tokenizer(WORD, lambda: iter([LINES]))
    line_end = int(tokenizer.encode("\n")[0])
    assert line_end not in tokenizer.encode("<eos> <S> <unk>")
    assert tokenizer.decode(tokenizer.encode(LINES)) == collapsed(LINES)


def test_the_symbols_of_a_line_are_its_words_and_its_end() -> None:
    assert list(symbols_of("a b\n\nc", "end")) == [["a", "b", "\n"], ["\n"], ["c"]]
    assert list(symbols_of("a\n\n", "both")) == [["\n", "a", "\n"], ["\n", "\n"]]
    symbols = list(chain.from_iterable(symbols_of(LINES, "end")))
    assert symbols.count("\n") == LINES.count("\n")


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
