"""Files of tokenizers: loaded unchanged, refused if damaged, compared by the meaning of ids."""

import hashlib
import json
from pathlib import Path

import pytest

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import open_tokenizer
from data_pipeline.shards.prepare_settings import PrepareSettings
from data_pipeline.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer, train_tokenizer
from data_pipeline.tokenizers.byte_char_word import CharTokenizer
from data_pipeline.tokenizers.ids import IdTokenizer
from data_pipeline.tokenizers.loading import StoredTokenizer, differences
from tests.data_pipeline.tokenizers.sample_tokenizers import CHAR, LINES, LM1B, WORD


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"type": "byte"}',
        '{"type": "wordpiece", "version": 1}',
        "[" * 100_000,
    ],
)
def test_a_damaged_or_unknown_tokenizer_is_refused_by_path(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        load_tokenizer(path)


@pytest.mark.parametrize("changed", [{"vocab_size": 258}, {"extra": 1}, {"version": True}])
def test_a_description_with_anything_changed_is_refused(changed: dict[str, int]) -> None:
    with pytest.raises(DataError):
        load_tokenizer({**json.loads(ByteTokenizer().to_json()), **changed})


def test_the_tokenizer_of_a_dataset_must_have_the_manifests_digest(dataset) -> None:
    directory, manifest = dataset
    other = manifest.model_copy(update={"tokenizer_digest": "0" * 64})
    assert open_tokenizer(directory, manifest).vocab_size == 257
    with pytest.raises(DataError, match="another dataset"):
        open_tokenizer(directory, other)


@pytest.mark.parametrize("settings", [None, CHAR, WORD, LM1B])
def test_a_saved_tokenizer_loads_unchanged(
    settings: PrepareSettings | None, tmp_path: Path
) -> None:
    tokenizer = train_tokenizer(settings, lambda: iter([LINES])) if settings else ByteTokenizer()
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_json())
    loaded = load_tokenizer(path)
    assert loaded.digest == tokenizer.digest
    assert loaded.to_json() == tokenizer.to_json()
    assert loaded.encode(LINES).tolist() == tokenizer.encode(LINES).tolist()
    assert loaded.opens_documents is not (settings and settings.recipe)
    with pytest.raises(UnicodeEncodeError, match="surrogates"):
        loaded.encode("a\ud800b")
    with pytest.raises(ValueError, match=str(loaded.vocab_size)):
        loaded.decode([loaded.vocab_size])


@pytest.mark.parametrize(
    ("settings", "symbols", "why"),
    [
        (CHAR, ["", "a", "a"], "distinct"),
        (CHAR, ["", "ab"], "not characters"),
        (CHAR, ["", "\ud800"], "surrogates"),
        (CHAR, ["a"], "not all of"),
        (CHAR, ["", 3], "string"),
        (CHAR, "ab", "list"),
        (WORD, ["<unk>", "\n", "a", "a"], "distinct"),
        (WORD, ["<unk>", "\n", "a b"], "not words"),
        (WORD, ["<unk>", "\n", ""], "not words"),
        (WORD, ["<unk>", "\n", "\udc00"], "surrogates"),
        (WORD, ["<unk>", "a"], "not all of"),
        (WORD, ["\n", "a"], "not all of"),
    ],
)
def test_an_invalid_vocabulary_is_refused(
    settings: PrepareSettings, symbols: object, why: str
) -> None:
    content = json.loads(train_tokenizer(settings, lambda: iter(["a"])).to_json())
    with pytest.raises(DataError, match=why):
        load_tokenizer({**content, "symbols": symbols})


NAMED = IdTokenizer(7, 2, {0: "Bar", 3: "Pitch_60"})


def stored(folder: Path, tokenizer: Tokenizer, digest: str = "") -> StoredTokenizer:
    content = tokenizer.to_json()
    path = folder / f"{hashlib.sha256(content.encode()).hexdigest()}.json"
    path.write_text(content)
    return StoredTokenizer(path, digest or tokenizer.digest)


SMALL = "the text of some ids, or another setting"
DIFFERENCES: dict[str, tuple[Tokenizer, Tokenizer, str]] = {
    "no names": (NAMED, IdTokenizer(7, 2, {}), ""),
    "a name": (NAMED, IdTokenizer(7, 2, {0: "Bar"}), ""),
    "other names": (NAMED, IdTokenizer(7, 2, {0: "Pitch_60", 3: "Bar"}), ""),
    "size": (NAMED, IdTokenizer(8, 7, {}), "vocab_size 7 and 8, end_of_document 2 and 7"),
    "end": (NAMED, IdTokenizer(7, 1, NAMED.names), "end_of_document 2 and 1"),
    "type": (NAMED, ByteTokenizer(),
             "type ids and byte, vocab_size 7 and 257, end_of_document 2 and 256"),
    "symbol": (CharTokenizer(["", "a", "b"]), CharTokenizer(["", "a", "c"]), SMALL),
    "setting": (ByteTokenizer(), ByteTokenizer(opens_documents=False), SMALL),
}  # fmt: skip


@pytest.mark.parametrize(("first", "other", "expected"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_differences_are_listed_and_names_of_ids_make_none(
    tmp_path: Path, first: Tokenizer, other: Tokenizer, expected: str
) -> None:
    assert differences(stored(tmp_path, first), stored(tmp_path, other)) == expected


def test_a_file_of_another_digest_is_not_trusted(tmp_path: Path) -> None:
    wrong = stored(tmp_path, NAMED, "f" * 64)
    missing = StoredTokenizer(tmp_path / "missing.json", "e" * 64)
    for other in (wrong, missing):
        found = differences(stored(tmp_path, NAMED), other)
        assert found == f"digest {NAMED.digest} and {other.digest}"
