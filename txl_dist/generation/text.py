"""Token ids to text, one token at a time: complete characters, up to the first stop string."""

import codecs
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from txl_dist.generation.unknown_symbols import warn_of_stop_string

if TYPE_CHECKING:
    from data_pipeline.tokenizers import Tokenizer


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
        released = ""
        for character in text:
            self._held_back += character
            ending = [string for string in self._strings if self._held_back.endswith(string)]
            if ending:
                self.found = max(ending, key=len)
                return released + self._held_back.removesuffix(self.found)
            num_released = len(self._held_back) - self._num_possible()
            released += self._held_back[:num_released]
            self._held_back = self._held_back[num_released:]
        return released

    def close(self) -> str:
        """The rest of the text, which is not the beginning of a stop string after all."""
        return "" if self.found else self._held_back

    def _num_possible(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        longest = max(map(len, self._strings), default=1) - 1
        ends = (self._held_back[-length:] for length in range(longest, 0, -1))
        return next((len(e) for e in ends if any(s.startswith(e) for s in self._strings)), 0)


def stream_text(
    tokens: Iterable[int],
    tokenizer: "Tokenizer",
    *,
    after: int | None = None,
    stop: Sequence[str] = (),
) -> Iterator[str]:
    """The text of `tokens` as it grows, up to the first stop string. See `TextDecoder`."""
    for string in stop:
        warn_of_stop_string(tokenizer, string)
    decoder, stop_strings = TextDecoder(tokenizer, after=after), StopStrings(stop)
    for token in tokens:
        if text := stop_strings.add(decoder.add(token)):
            yield text
        if stop_strings.found:
            return
    if text := stop_strings.add(decoder.close()) + stop_strings.close():
        yield text
