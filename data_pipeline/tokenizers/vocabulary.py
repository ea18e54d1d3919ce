"""Vocabularies of counted symbols: frequent symbols first, as the adaptive softmax expects."""

from collections.abc import Collection, Mapping, Sequence


def rank_symbols(
    counts: Mapping[str, int],
    *,
    unknown: str,
    always: Collection[str] = (),
    vocab_size: int | None = None,
    min_freq: int | None = None,
) -> list[str]:
    """Symbols by descending count, ties by code points. The position of a symbol is its id.

    `unknown` and `always` are always included, and sorted by count like all others.
    Occurrences of symbols that `min_freq` or `vocab_size` exclude count as `unknown`. `vocab_size`
    includes the id of end-of-document, which is not among the symbols.
    """
    ranked = {symbol: counts.get(symbol, 0) for symbol in (unknown, *always)}
    others = [(-count, symbol) for symbol, count in counts.items() if symbol not in ranked]
    others.sort()
    room = len(others) if vocab_size is None else vocab_size - 1 - len(ranked)
    for number, (negative_count, symbol) in enumerate(others):
        if number < room and -negative_count >= (min_freq or 1):
            ranked[symbol] = -negative_count
        else:
            ranked[unknown] -= negative_count
    return sorted(ranked, key=lambda symbol: (-ranked[symbol], symbol))


def require_distinct(symbols: Sequence[str]) -> None:
    """Raises ValueError with the name of a repeated symbol."""
    seen: set[str] = set()
    for symbol in symbols:
        if symbol in seen:
            raise ValueError(f"symbol {symbol!r} occurs twice")
        seen.add(symbol)
