"""Names of token ids, read from `--names FILE`.

The file is JSON: an array of names in the order of the ids, an object of ids to names
{"60": "Pitch_60"}, or one of names to ids {"Pitch_60": 60}, such as a vocab.json; or a tokenizer of
ids of a dataset or checkpoint, or a trained tokenizer that MidiTok saved, which have such names.

Source: MidiTok, `MusicTokenizer.to_dict` and `__create_vocab_learned_bytes_to_tokens`: its model
has tokens of one character per base token.
"""

from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError, printable
from data_pipeline.system.strict_json import parse_json

_MAX_BYTES = 256 * 2**20


def read_names(path: Path) -> dict[int, str]:
    """Id to name. Raises DataError for a file that has no such content."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"it is larger than {_MAX_BYTES:,} bytes")
        return _names(parse_json(path.read_text("utf-8")))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} has no names of token ids: {printable(str(error))[:300]}. Give a JSON array "
            'of names, {"60": "Pitch_60", ...}, {"Pitch_60": 60, ...}, or the file of a trained '
            "MidiTok tokenizer."
        ) from error


def _names(content: Any) -> dict[int, str]:
    if isinstance(content, dict) and "miditok_version" in content:
        content = _miditok_names(content)
    elif isinstance(content, dict) and content.get("type") == "ids":
        content = content.get("names")
    if isinstance(content, list):
        pairs: list[tuple[Any, Any]] = list(enumerate(content))
    elif isinstance(content, dict) and all(type(value) is int for value in content.values()):
        pairs = [(id_, name) for name, id_ in content.items()]
    elif isinstance(content, dict):
        pairs = [(_decimal(key), name) for key, name in content.items()]
    else:
        raise ValueError(f"it is {type(content).__name__}, not an array or an object")
    names: dict[int, str] = {}
    for id_, name in pairs:
        if not isinstance(name, str):
            raise ValueError(f"the name of id {id_} is {type(name).__name__}, not a string")
        if id_ in names:
            raise ValueError(f"id {id_} has the names {names[id_][:40]!r} and {name[:40]!r}")
        if name:
            names[id_] = name
    return names


def _miditok_names(content: dict[str, Any]) -> Any:
    """The names in a tokenizer of MidiTok. A learned token has those of its parts, joined by +."""
    if "_model" not in content:
        raise ValueError(
            "MidiTok stores the vocabulary of trained tokenizers only. Write that of this one in "
            "Python: json.dump(tokenizer.vocab, open('names.json', 'w'))"
        )
    try:
        library = parse_json(content["_model"])
        vocab, base = library["model"]["vocab"], content["_vocab_base_byte_to_token"]
        if isinstance(vocab, list):  # of a unigram model, with scores
            vocab = {piece: id_ for id_, (piece, _) in enumerate(vocab)}
        prefix = library["model"].get("continuing_subword_prefix") or ""
        space = (library["pre_tokenizer"] or {}).get("replacement", "")
        names, used = {}, set[str]()
        for piece, id_ in sorted(vocab.items(), key=lambda item: item[1]):
            characters = piece.removeprefix(prefix).removeprefix(space)
            name = "+".join(base[character] for character in characters)
            # With and without a prefix, a token has the same parts.
            names[id_] = f"{name}#{id_}" if name in used else name
            used.add(name)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"its MidiTok model has another layout ({error!r})") from None
    return {str(id_): name for id_, name in names.items()}


def _decimal(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and str(int(key[:11])) == key):
        raise ValueError(f"the key {key[:40]!r} is not a token id")
    return int(key)


def require_usable_names(names: dict[int, str], vocab_size: int) -> None:
    """Raise ValueError unless text in these names is encoded to the same ids again.

    Names are therefore distinct, without whitespace, and no decimal number.
    """
    seen: dict[str, int] = {}
    for id_, name in names.items():
        if not 0 <= id_ < vocab_size:
            raise ValueError(f"{name[:40]!r} names id {id_}, the vocabulary has {vocab_size} ids")
        if name.split() != [name]:
            raise ValueError(f"the name {name[:40]!r} of id {id_} has whitespace; write _ for it")
        if name.isascii() and name.isdecimal():
            raise ValueError(f"the name {name[:40]!r} of id {id_} is a number, as ids are")
        if name in seen:
            raise ValueError(f"{name[:40]!r} is the name of id {seen[name]} and of id {id_}")
        name.encode("utf-8")
        seen[name] = id_
