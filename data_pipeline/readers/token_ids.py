"""Token ids as documents: which integers are valid, and their form as text.

A document of ids has a text like any other document: its ids as decimal numbers, separated by
single spaces, "60 62 64". Everything after the readers (hashes, deduplication, shuffling, resuming)
therefore treats both alike, and `tokenizers/ids.py` encodes this text to the same ids.

The end-of-document id may be at the beginning and end of a document, as some programs write it.
It is dropped there, because every tokenized document gets one. Inside a document it is an error.
The same holds for the id that fills up rows (`--padding`), if there is one.

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
    padding: int | None = None
    """The id that fills up documents; None if it is not known whether there is one."""

    @property
    def outer(self) -> set[int]:
        """The ids that are dropped at both ends of a document."""
        return {self.end_of_document} | ({self.padding} if self.padding is not None else set())


def text_of_value(value: object, rules: IdRules, name: str) -> str:
    """The text of a list of integers, the value of `name`. Raises BadRecordError."""
    if not isinstance(value, list):
        kind = "null" if value is None else type(value).__name__
        raise BadRecordError(0, f'"{name}" is not a list of token ids but {kind}')
    for position, each in enumerate(value):
        if type(each) is not int:  # bool is an int, too
            hint = "; give every track a line, and ids of one vocabulary"
            hint *= isinstance(each, list)
            kind = "null" if each is None else type(each).__name__
            reason = f'"{name}" has {kind} at position {position}, not a token id{hint}'
            raise BadRecordError(0, reason)
        if not 0 <= each < rules.vocab_size:
            raise outside(each, position, rules)
    outer, first, stop = rules.outer, 0, len(value)
    while first < stop and value[first] in outer:
        first += 1
    while first < stop and value[stop - 1] in outer:
        stop -= 1
    content = value[first:stop]
    if not outer.isdisjoint(content):
        inner = next(position for position, each in enumerate(content) if each in outer)
        raise inner_end(first + inner, rules)
    return " ".join(map(str, content))


def outside(id_: object, position: int, rules: IdRules) -> BadRecordError:
    return BadRecordError(
        0,
        f"token id {str(id_)[:40]} at position {position:,} is not in the vocabulary of "
        f"{rules.vocab_size} ids, 0 to {rules.vocab_size - 1}",
    )


def inner_end(position: int, rules: IdRules) -> BadRecordError:
    name = f"end-of-document id {rules.end_of_document}"
    if rules.padding is not None:
        name = f"{name} or padding id {rules.padding}"
    return BadRecordError(
        0,
        f"the {name} at position {position:,} is inside the document; split the document there",
    )
