"""Token ids as documents: which integers are valid, and their form as text.

A document of ids has a text like any other document: its ids as decimal numbers, separated by
single spaces, "60 62 64". Everything after the readers (hashes, deduplication, shuffling, resuming)
therefore treats both alike, and `tokenizers/ids.py` encodes this text to the same ids.

The end-of-document id may be at the beginning and end of a document, as some programs write it.
It is dropped there, because every tokenized document gets one. Inside a document it is an error.

Arrays of ids are in `id_documents.py`: this module loads no numpy, so that `txl --help` is fast.
"""

from dataclasses import dataclass

from data_pipeline.readers.records import BadRecordError


@dataclass(frozen=True, slots=True)
class IdRules:
    """The ids that an input may contain, and how raw arrays store them."""

    vocab_size: int
    end_of_document: int
    dtype: str = ""
    """NumPy name of the integers of an array file, such as "<u2"; "" if unknown."""


def text_of_value(value: object, rules: IdRules, name: str) -> str:
    """The text of a list of integers, the value of `name`. Raises BadRecordError."""
    if not isinstance(value, list):
        kind = "null" if value is None else type(value).__name__
        raise BadRecordError(0, f'"{name}" is not a list of token ids but {kind}')
    for position, each in enumerate(value):
        if type(each) is not int:  # bool is an int, too
            hint = "; give every track a line" if isinstance(each, list) else ""
            kind = "null" if each is None else type(each).__name__
            reason = f'"{name}" has {kind} at position {position}, not a token id{hint}'
            raise BadRecordError(0, reason)
        if not 0 <= each < rules.vocab_size:
            raise outside(each, position, rules)
    first, stop = 0, len(value)
    while first < stop and value[first] == rules.end_of_document:
        first += 1
    while first < stop and value[stop - 1] == rules.end_of_document:
        stop -= 1
    content = value[first:stop]
    if rules.end_of_document in content:
        raise inner_end(first + content.index(rules.end_of_document), rules)
    return " ".join(map(str, content))


def outside(id_: object, position: int, rules: IdRules) -> BadRecordError:
    return BadRecordError(
        0,
        f"token id {str(id_)[:40]} at position {position:,} is not in the vocabulary: "
        f"--vocab-size {rules.vocab_size} has ids 0 to {rules.vocab_size - 1}",
    )


def inner_end(position: int, rules: IdRules) -> BadRecordError:
    return BadRecordError(
        0,
        f"the end-of-document id {rules.end_of_document} at position {position:,} is inside the "
        "document; split the document there",
    )
