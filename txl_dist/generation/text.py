"""What a user gives to generation and gets from it: options, prompts, stop strings and text.

Imports no torch, so that the command line refuses wrong options before it is imported.

A file of prompts named *.jsonl has one JSON object per line, others one prompt per line. Tokenizers
of words and characters replace the symbols that they do not have by an unknown token, `<unk>`: the
model then reads another text than the one that was given, which is reported.
"""

import codecs
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from data_pipeline.errors import counted
from data_pipeline.system.strict_json import JSON_DECODER
from txl_dist.errors import DataError

if TYPE_CHECKING:
    from data_pipeline.tokenizers import Tokenizer

DEFAULT_BATCH_SIZE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling options. Temperature 0 is greedy: always the most likely token.

    The defaults sample from the distribution of the model as it is.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.temperature, Real) or not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature!r} must be a number of at least 0")
        if self.top_k is not None and (not isinstance(self.top_k, Integral) or self.top_k < 1):
            raise ValueError(f"top_k={self.top_k!r} must be a whole number of at least 1")
        if self.top_p is not None and (not isinstance(self.top_p, Real) or not 0 < self.top_p <= 1):
            raise ValueError(f"top_p={self.top_p!r} must be a number in (0, 1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextLimits:
    """Where a generated text ends, if not at the end of its document."""

    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    """Stop strings: the text ends before the first of them."""
    stop_tokens: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not isinstance(self.max_tokens, Integral) or self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens!r} must be a whole number of at least 1")
        if isinstance(self.stop, str):
            raise ValueError(f"stop={self.stop!r} is one text; give a tuple of texts")
        StopStrings(self.stop)


KEYS = ("prompt", "text", "ids")
"""Keys of a JSON line; the first that is there has the prompt. That of "ids" is token ids."""


OPTIONS = {field.name for options in (Sampling, TextLimits) for field in fields(options)}
"""Keys that a line cannot have. Any others, such as "id", are ignored."""


def read_prompts(path: Path) -> list[str | list[int]]:
    """The prompts of a file, one per line: texts or token ids.

    Raises DataError with file and line for the first unusable one.
    """
    try:
        lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
    except OSError as error:
        raise DataError(f"{path}: the prompts cannot be read ({error.strerror})") from None
    prompts = []
    for number, raw in enumerate(lines, start=1):
        try:
            prompts.append(_prompt(raw, is_json=path.suffix == ".jsonl"))
        except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8
            raise DataError(f"{path}, line {number}: {error}") from None
    return prompts


def _prompt(raw: bytes, *, is_json: bool) -> str | list[int]:
    """Raises ValueError with the reason, RecursionError for JSON that is nested too deeply."""
    line = raw.removesuffix(b"\r").decode("utf-8-sig")
    if not line.strip():
        raise ValueError(
            "the line is blank. Remove it, or start a new document with a line of JSON in a file "
            'named *.jsonl: {"prompt": ""}'
        )
    if not is_json:
        return line
    content = JSON_DECODER.decode(line)
    if isinstance(content, dict) and (options := sorted(OPTIONS & content.keys())):
        raise ValueError(
            f'"{options[0]}" is an option of all prompts, and would be ignored here. Give it on '
            "the command line (txl generate -h)"
        )
    for key in KEYS if isinstance(content, dict) else ():
        if key in content:
            prompt: str | list[int] = content[key]
            if not isinstance(prompt, list if key == "ids" else str):
                raise ValueError(f'"{key}" has the type {type(prompt).__name__}')
            if isinstance(prompt, str):
                prompt.encode()  # refuses a lone surrogate
            return prompt
    raise ValueError('expected a JSON object with a key "prompt", "text" or "ids"')


def describe_unknown(unknown: Counter[str]) -> str:
    shown = [
        repr(symbol[:40]) + (f" ({count:,} times)" if count > 1 else "")
        for symbol, count in unknown.most_common(10)
    ]
    number = counted(unknown.total(), "symbol")
    return f"{number} not in the vocabulary, read as the unknown token: {', '.join(shown)}"


class TextDecoder:
    """Decodes one token at a time. `add` returns the characters that are complete.

    `after` is the last token of the prompt: a token's text can depend on the token before it, as
    the space between two words does.
    """

    def __init__(self, tokenizer: "Tokenizer", *, after: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._previous = tokenizer.end_of_document if after is None else after
        # An incomplete character stays in the decoder until its last byte has come.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        previous = self._tokenizer.decode_bytes([self._previous])
        both = self._tokenizer.decode_bytes([self._previous, token])
        self._previous = token
        return self._decoder.decode(both.removeprefix(previous))

    def close(self) -> str:
        """The replacement character if the last character is incomplete."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Cuts a growing text before the stop string that is complete first, of several the longest.

    `add` returns the text that can no longer be part of a stop string. Raises ValueError for an
    empty stop string.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        if "" in strings:
            raise ValueError("a stop string is empty, so every text would end before it begins")
        self._strings = strings
        self._held_back = ""
        self.found: str | None = None

    def add(self, text: str) -> str:
        self._held_back += text
        starts = [(self._held_back.find(string), string) for string in self._strings]
        complete = [(start + len(string), -len(string)) for start, string in starts if start >= 0]
        if complete:
            end, minus_length = min(complete)
            stop = end + minus_length
            self.found = self._held_back[stop:end]
        else:
            stop = len(self._held_back) - self._num_possible()
        released, self._held_back = self._held_back[:stop], self._held_back[stop:]
        return released

    def close(self) -> str:
        """The rest of the text, which is not the beginning of a stop string after all."""
        return "" if self.found else self._held_back

    def _num_possible(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        longest = max(map(len, self._strings), default=1) - 1
        ends = (self._held_back[-length:] for length in range(longest, 0, -1))
        return next((len(e) for e in ends if any(s.startswith(e) for s in self._strings)), 0)


class GrowingText:
    """The continuation of a prompt, one token at a time, until one of its limits is reached."""

    def __init__(self, tokenizer: "Tokenizer", limits: TextLimits, *, after: int | None = None):
        """`after`: the last token of the prompt, see `TextDecoder`."""
        self._ends, self._limits = {tokenizer.end_of_document, *tokenizer.ends_of_text}, limits
        self._decoder = TextDecoder(tokenizer, after=after)
        self._stop_strings = StopStrings(limits.stop)
        self.text = ""
        self.ids: list[int] = []
        """The tokens, without the one that ended the text."""
        self.finish_reason: Literal["end_of_document", "stop", "length"] | None = None

    def add(self, token: int) -> str:
        """Add a token to the text; returns what is new and can no longer change."""
        if token in self._ends:
            self.finish_reason = "end_of_document"
        elif token in self._limits.stop_tokens:
            self.finish_reason = "stop"
        else:
            self.ids.append(token)
            new = self._stop_strings.add(self._decoder.add(token))
            self.text += new
            if self._stop_strings.found:
                self.finish_reason = "stop"
            elif len(self.ids) == self._limits.max_tokens:
                self.finish_reason = "length"
            return new
        return ""

    def close(self) -> str:
        """Add what was held back for an incomplete character or a stop string, and return it."""
        if self._stop_strings.found:
            return ""
        rest = self._stop_strings.add(self._decoder.close()) + self._stop_strings.close()
        self.text += rest
        return rest


def stream_text(
    tokens: Iterable[int], tokenizer: "Tokenizer", limits: TextLimits, *, after: int | None = None
) -> Iterator[str]:
    """The text of `tokens` as it grows, up to a limit. See `GrowingText`."""
    growing = GrowingText(tokenizer, limits, after=after)
    for token in tokens:
        if text := growing.add(token):
            yield text
        if growing.finish_reason:
            break
    if text := growing.close():
        yield text
