"""Reading and refusing `tokenizer.json`."""

import json
from pathlib import Path

import pytest

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import open_tokenizer
from data_pipeline.shards.prepare_settings import PrepareSettings
from data_pipeline.tokenizers import (
    ByteTokenizer,
    load_tokenizer,
    train_tokenizer,
)
from tests.data_pipeline.tokenizers.sample_tokenizers import CHAR, LINES, LM1B, WORD


def test_a_saved_tokenizer_loads_with_the_same_digest(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(ByteTokenizer().to_json())
    assert load_tokenizer(path).digest == ByteTokenizer().digest
    assert load_tokenizer(json.loads(path.read_text())).digest == ByteTokenizer().digest


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


@pytest.mark.parametrize("settings", [CHAR, WORD, LM1B])
def test_a_saved_tokenizer_loads_unchanged(settings: PrepareSettings) -> None:
    tokenizer = train_tokenizer(settings, lambda: iter([LINES]))
    loaded = load_tokenizer(json.loads(tokenizer.to_json()))
    assert loaded.digest == tokenizer.digest
    assert loaded.to_json() == tokenizer.to_json()
    assert loaded.encode(LINES).tolist() == tokenizer.encode(LINES).tolist()
    assert loaded.opens_documents is (settings.recipe is None)
    with pytest.raises(UnicodeEncodeError, match="surrogates"):
        loaded.encode("a\ud800b")
    with pytest.raises(ValueError, match=str(loaded.vocab_size)):
        loaded.decode([loaded.vocab_size])


@pytest.mark.parametrize(
    ("settings", "symbols", "why"),
    [
        (CHAR, ["", "a", "a"], "twice"),
        (CHAR, ["", "ab"], "one character"),
        (CHAR, ["", "\ud800"], "one character"),
        (CHAR, ["a"], "missing"),
        (CHAR, ["", 3], "string"),
        (CHAR, "ab", "list"),
        (WORD, ["<unk>", "\n", "a", "a"], "twice"),
        (WORD, ["<unk>", "\n", "a b"], "one word"),
        (WORD, ["<unk>", "\n", ""], "one word"),
        (WORD, ["<unk>", "\n", "\udc00"], "surrogates"),
        (WORD, ["<unk>", "a"], "missing"),
        (WORD, ["\n", "a"], "missing"),
    ],
)
def test_an_invalid_vocabulary_is_refused(
    settings: PrepareSettings, symbols: object, why: str
) -> None:
    content = json.loads(train_tokenizer(settings, lambda: iter(["a"])).to_json())
    with pytest.raises(DataError, match=why):
        load_tokenizer({**content, "symbols": symbols})
