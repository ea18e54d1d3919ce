"""Tokenizers are chosen, trained, loaded unchanged, refused if damaged, compared by their ids."""

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.errors import ConfigError, DataError
from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.manifest import PrepareSettings, open_tokenizer
from data_pipeline.system.strict_json import canonical_json
from data_pipeline.tokenizers import (
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    ready_tokenizer,
    tokenizer_of_counts,
    train_tokenizer,
)
from data_pipeline.tokenizers.byte_char_word import CharTokenizer
from data_pipeline.tokenizers.ids import IdTokenizer
from data_pipeline.tokenizers.loading import StoredTokenizer, differences
from data_pipeline.tokenizers.training import RECIPES, count_symbols, sum_of_counts
from tests.data_pipeline.tokenizers.sample_tokenizers import (
    CHAR,
    FILE,
    LINES,
    LM1B,
    SETTINGS,
    TOKENIZER,
    WORD,
)


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


@pytest.mark.parametrize("name", ["cl100k_base.tiktoken", "tokenizer.model"])
def test_a_file_of_another_library_is_answered_by_the_file_to_give(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_bytes(b"\n\x0e\n\x05<unk>\x15IQ== 0")
    with pytest.raises(DataError, match=r"tiktoken and SentencePiece are not read. Give the token"):
        ready_tokenizer(FILE, tmp_path / name)


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


@pytest.mark.parametrize("settings", [None, CHAR, WORD, LM1B, SETTINGS])
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


def test_the_tokenizer_file_of_a_dataset_is_used_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(TOKENIZER.to_json())
    assert ready_tokenizer(FILE, path).digest == TOKENIZER.digest


@pytest.mark.parametrize(
    "content",
    ["[]", '{"model": {}}', '{"model": {"type": "BPE", "vocab": {"a": 4}, "merges": []}}'],
)
def test_a_file_that_is_not_a_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(DataError):
        ready_tokenizer(FILE, path)


def test_a_file_is_given_exactly_for_kind_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="file"):
        ready_tokenizer(FILE)
    with pytest.raises(ConfigError, match="byte"):
        ready_tokenizer(PrepareSettings(), tmp_path / "x")


@pytest.mark.parametrize("settings", [CHAR, WORD, LM1B])
@given(texts=st.lists(st.text(alphabet="ab \n€"), max_size=7), cut=st.integers(0, 7))
def test_merged_counts_are_the_counts_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory,
    settings: PrepareSettings,
    texts: list[str],
    cut: int,
) -> None:
    folder = tmp_path_factory.mktemp("counts")
    files = [folder / "first", folder / "second"]
    for file, part in zip(files, (texts[:cut], texts[cut:]), strict=True):
        file.write_text(canonical_json(count_symbols(settings, part)))
    merged = sum_of_counts(files)
    assert merged == count_symbols(settings, iter(texts)) == sum_of_counts(reversed(files))
    from_texts = train_tokenizer(settings, lambda: iter(texts))
    assert tokenizer_of_counts(settings, merged).digest == from_texts.digest


# --- recipes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_implies_its_tokenizer(name: str) -> None:
    settings, recipe = PrepareSettings(recipe=name), RECIPES[name]
    assert settings.tokenizer == recipe.tokenizers[0]
    assert settings.min_freq == recipe.min_freq
    assert (settings.min_freq == 3) == (name == "lm1b"), "the rule of the benchmark"
    given = settings.model_copy(update={"tokenizer": recipe.tokenizers[-1], "min_freq": None})
    assert PrepareSettings.model_validate(given.model_dump()) == given, "what is given stays"


@pytest.mark.parametrize("name", ["enwik8", "text8"])
def test_a_text_of_another_size_than_the_published_one_is_noted(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("the text " * 7)
    notes: list[str] = []
    prepare_dataset(
        [tmp_path / name], tmp_path / "out", PrepareSettings(recipe=name), note=notes.append
    )
    assert any(
        f"{name} as published has 100,000,000 bytes, this input has 63" in line for line in notes
    )


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_refuses_other_tokenizers(name: str) -> None:
    legal = RECIPES[name].tokenizers
    assert PrepareSettings(tokenizer=legal[0], recipe=name).recipe == name
    with pytest.raises(ValueError, match=f"{name} is for tokenizer {legal[0]}"):
        PrepareSettings(tokenizer="bpe", vocab_size=300, recipe=name)
