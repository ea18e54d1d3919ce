"""Characters, words and line ends of a text, and their totals in a manifest."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.manifest import ShardManifest, SplitEntry, load_manifest
from data_pipeline.shards.prepare_settings import PrepareSettings
from data_pipeline.shards.text_counts import TextCounter, TextCounts, count_text
from data_pipeline.system.strict_json import sha256_of

TEXT = "One two,\tthree\u00a0four\n\nfünf \u3000sechs\x85 \n sieben"

texts = st.text(alphabet=st.sampled_from("ab é\n\t\u00a0\u3000\x1c\x85"), max_size=12)


@given(fragments=st.lists(texts, max_size=5))
def test_the_counts_are_those_of_str_split_however_the_text_is_cut(fragments: list[str]) -> None:
    text = "".join(fragments)
    counter = TextCounter()
    assert list(counter.document(fragments)) == fragments
    assert counter.counts == TextCounts(
        characters=len(text), words=len(text.split()), line_ends=text.count("\n")
    )
    assert counter.counts == count_text(text)


def test_a_word_does_not_continue_in_the_next_document() -> None:
    counter = TextCounter()
    for text in ("one", "two"):
        list(counter.document([text]))
    assert counter.counts.words == 2


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> ShardManifest:
    folder = tmp_path_factory.mktemp("texts")
    for number in range(6):
        (folder / f"{number}.txt").write_text(TEXT * (number + 1), encoding="utf-8")
    out = tmp_path_factory.mktemp("data") / "out"
    settings = PrepareSettings(split={"valid": 0.4}, shard_bytes=150, block_bytes=512)
    prepare_dataset([folder], out, settings)
    return load_manifest(out)


def test_preparation_counts_the_text_of_every_split(manifest: ShardManifest) -> None:
    splits = list(manifest.splits.values())
    assert len(splits[0].shards) > 1
    total = TextCounts(characters=0, words=0, line_ends=0)
    for split in splits:
        assert split.text_counts is not None
        total += split.text_counts
    expected = TextCounts(characters=0, words=0, line_ends=0)
    for number in range(6):
        expected += count_text(TEXT * (number + 1))
    assert total == expected


def test_a_manifest_of_an_older_version_keeps_its_digest(
    manifest: ShardManifest, tmp_path: Path
) -> None:
    content = manifest.model_dump(mode="json")
    for split in content["splits"].values():
        del split["text_counts"]
        for shard in split["shards"]:
            del shard["text_counts"]
    digest = sha256_of(content)
    (tmp_path / "manifest.json").write_text(json.dumps({"digest": digest, **content}))
    older = load_manifest(tmp_path)
    assert older.digest == digest
    assert [split.text_counts for split in older.splits.values()] == [None, None]


def test_the_counts_of_a_split_are_unknown_unless_all_shards_have_them(
    manifest: ShardManifest,
) -> None:
    first, *others = manifest.splits["train"].shards
    older = first.model_copy(update={"text_counts": None})
    assert SplitEntry.of([first, *others]).text_counts is not None
    assert SplitEntry.of([older, *others]).text_counts is None
