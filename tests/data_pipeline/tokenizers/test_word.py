"""Word vocabularies: round trips, line ends."""

from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.tokenizers import train_tokenizer
from data_pipeline.tokenizers.word import symbols_of
from tests.data_pipeline.tokenizers.sample_tokenizers import LINES, LM1B, WORD


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
    assert tokenizer.token_bytes()[ids].sum() == len("a b\nc d\n")


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
