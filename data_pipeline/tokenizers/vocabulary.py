"""Vocabularies of counted symbols: the frequent ones first, as an adaptive softmax wants them."""

from collections.abc import Collection, Mapping, Sequence


def rank_symbols(
    counts: Mapping[str, int],
    *,
    unknown: str,
    always: Collection[str] = (),
    vocab_size: int | None = None,
    min_freq: int | None = None,
) -> list[str]:
    """Symbols by falling count, ties by text (code points); a symbol's place is its id.

    `unknown` and `always` are in whatever their counts, and are placed by them like any other. What
    `min_freq` and `vocab_size` cut counts as `unknown`. `vocab_size` is the number of all ids: one
    is left for the end of a document, which is not among the symbols.
    """
    placed = {symbol: counts.get(symbol, 0) for symbol in (unknown, *always)}
    others = [(-count, symbol) for symbol, count in counts.items() if symbol not in placed]
    others.sort()
    room = len(others) if vocab_size is None else vocab_size - 1 - len(placed)
    for number, (negative, symbol) in enumerate(others):
        if number < room and -negative >= (min_freq or 1):
            placed[symbol] = -negative
        else:
            placed[unknown] -= negative
    return sorted(placed, key=lambda symbol: (-placed[symbol], symbol))


def require_distinct(symbols: Sequence[str]) -> None:
    """Raises ValueError naming a symbol that is there twice."""
    seen: set[str] = set()
    for symbol in symbols:
        if symbol in seen:
            raise ValueError(f"symbol {symbol!r} is there twice")
        seen.add(symbol)
