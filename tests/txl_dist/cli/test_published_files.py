"""Files of a corpus are found in every published layout, and compared with the published ones."""

import hashlib
from pathlib import Path

import pytest

from txl_dist.cli.published_files import (
    Corpus,
    Layout,
    PublishedFile,
    experiments,
    find_published,
)
from txl_dist.errors import DataError

WT103, LM1B, ENWIK8 = (experiments()[f"{name}-base"].corpus for name in ("wt103", "lm1b", "enwik8"))
SPLITS = ("train", "valid", "test")
HUGGING_FACE = [f"{split}-00000-of-00001.parquet" for split in ("train", "validation", "test")]


def write(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


@pytest.mark.parametrize("above", ["", "archive/"])
@pytest.mark.parametrize(
    ("names", "train"),
    [
        ([f"wiki.{split}.tokens" for split in SPLITS], "wiki.train.tokens"),
        ([f"wiki.{split}.raw" for split in SPLITS], "wiki.train.raw"),
        (HUGGING_FACE, "train-*.parquet"),
    ],
)
def test_every_layout_is_found_in_the_directory_or_one_folder_below(
    above: str, names: list[str], train: str, tmp_path: Path
) -> None:
    write(tmp_path / above, *names)
    found = find_published(WT103, tmp_path)
    assert found.inputs()[0] == f"train={tmp_path / above / train}"
    assert [word.partition("=")[0] for word in found.inputs()] == [*SPLITS]
    assert [path.name for split in SPLITS for path in found.files(split)] == names


def test_of_hugging_face_s_configurations_the_paper_s_is_taken(tmp_path: Path) -> None:
    configurations = ("wikitext-103-raw-v1", "wikitext-103-v1", "wikitext-2-v1")
    for name in configurations:
        write(tmp_path / name, *HUGGING_FACE)
    found = find_published(WT103, tmp_path)
    assert {path.parent.name for path in found.files("train")} == {"wikitext-103-v1"}
    for path in (tmp_path / "wikitext-103-v1").iterdir():
        path.unlink()
    with pytest.raises(DataError, match=r"several folders: .*raw-v1, .*2-v1\. Give one of them"):
        find_published(WT103, tmp_path)


def test_an_incomplete_layout_is_not_used(tmp_path: Path) -> None:
    write(tmp_path, "wiki.train.tokens", "wiki.test.tokens")
    with pytest.raises(DataError, match=r"WikiText-103.*wiki.valid.tokens.*validation"):
        find_published(WT103, tmp_path)


def test_the_test_set_of_lm1b_is_the_first_held_out_file(tmp_path: Path) -> None:
    heldout = "heldout-monolingual.tokenized.shuffled/news.en.heldout-{:05}-of-00050"
    train = "training-monolingual.tokenized.shuffled/news.en-{:05}-of-00100"
    write(tmp_path, *map(heldout.format, range(50)), *map(train.format, range(1, 98)))
    found = find_published(LM1B, tmp_path)
    assert found.files("test") == [tmp_path / heldout.format(0)]
    assert found.files("valid") == [tmp_path / heldout.format(1)]
    assert len(found.files("train")) == 97
    (difference,) = found.differences()
    assert difference.startswith(
        "2 of 101 files are missing: news.en-00098-of-00100, news.en-00099"
    )


def test_a_truncated_file_is_not_the_published_one(tmp_path: Path) -> None:
    (tmp_path / "enwik8").write_bytes(bytes(60))
    assert [*find_published(ENWIK8, tmp_path).differences()] == [
        "enwik8 has 60 bytes, the published file has 100,000,000"
    ]


def test_a_file_is_the_published_one_if_and_only_if_its_bytes_are(tmp_path: Path) -> None:
    content = b"the published text"
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    published = PublishedFile(size=len(content), digest=digest)
    layout = Layout(inputs={"train": "enwik8"}, files={"enwik8": published})
    corpus = Corpus(recipe="enwik8", layouts=(layout,), source="nowhere")
    for written, num_differences in ((content, 0), (content[:-1] + b"T", 1), (content + b"s", 1)):
        (tmp_path / "enwik8").write_bytes(written)
        assert len([*find_published(corpus, tmp_path).differences()]) == num_differences
