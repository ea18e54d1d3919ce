"""Splits that come with a corpus are kept: by the names of its files, or by names of the inputs."""

import os
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.errors import ConfigError
from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.preparation.splits import choose_given_splits
from data_pipeline.shards.manifest import PrepareSettings, load_manifest, open_tokenizer
from tests.data_pipeline.preparation.preparing import files_of, ids_of, tokens_of
from tests.data_pipeline.readers.reading import find
from tests.support.corpus_layouts import LAYOUTS, Layout, table_row, write_files

Txl = Callable[..., Any]
TEXT = PrepareSettings()


@pytest.mark.parametrize("layout", LAYOUTS, ids=[layout.name for layout in LAYOUTS])
def test_every_published_layout_keeps_its_splits(layout: Layout, tmp_path: Path) -> None:
    texts = layout.write(tmp_path / "in")
    lines: list[str] = []
    out = tmp_path / "out"
    prepare_dataset([tmp_path / "in"], out, layout.settings, note=lines.append)
    assert f"splits by the names of the files, {layout.printed}" in lines
    tokenizer, manifest = open_tokenizer(out), load_manifest(out)
    assert set(manifest.splits) == set(texts)
    for split, documents in texts.items():
        ids = [tokenizer.encode(text).tolist() for text in documents]
        if layout.settings.format == "ids":
            ids = [[*map(int, text.split())] for text in documents]
        assert tokens_of(out, split) == [[manifest.end_of_document, *each] for each in ids], split
        entry = manifest.splits[split]
        assert (entry.documents, entry.tokens) == (len(ids), len(ids) + sum(map(len, ids)))
    page = (Path(__file__).parents[3] / "docs" / "how_to" / "keep_splits.md").read_text("utf-8")
    assert table_row(layout, manifest, layout.printed) in page


NAMES = {
    "train": ["train.txt", "TRAIN.jsonl", "my-train-00001.txt", "training_set/a.txt", "train/1/a"],
    "valid": ["dev.tsv", "x.val.txt", "val_0003.bin", "heldout-0/x", "c4-validation.00-of-08.json"],
    "test": ["test.en", "a/b.test.tokens", "test/train.txt", "corpus_test_00.npy", "a.TEST.TXT.GZ"],
    "": ["a.txt", "latest.txt", "contest.txt", "unit_test_results_a.txt", "test_train.txt",
         "src/test_parser.py", "tests/x.c", "test/cases.py", "dev/tools.sh", "notes/test.md"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "split"), [(name, split) for split, names in NAMES.items() for name in names]
)
def test_a_name_gives_a_split_or_none(name: str, split: str, tmp_path: Path) -> None:
    found = find(write_files(tmp_path / "in", {name: "text"}), format="text")
    assert [file.split for file in found.files] == [split]


BESIDE_TRAIN = {
    "valid": ["eval.txt", "evaluation.txt", "held-out.txt", "held_out/a.txt", "HeldOut.txt",
              "validate.txt", "dev2010.en", "val1.txt", "my-valid.v2.txt", "devset.txt"],
    "test": ["devtest.txt", "newstest2014.en", "tst.txt", "testA.txt", "split=test/a.txt",
             "IWSLT14.TED.tst2010.de-en.en.xml", "test2017/a.txt", "wmtTest.txt", "dev-test.txt"],
    "refused": ["heldback.txt", "development.txt", "unseen/a.txt", "tests/a.txt", "quiz",
                "TESTB.en"],
}  # fmt: skip
TRAIN_AND = {
    ("myTrain.txt", "myTest.txt"): ["train", "test"],
    ("train2017/a.txt", "val2017/a.txt"): ["train", "valid"],
    ("split=train/a.txt", "split=test/a.txt"): ["train", "test"],
    ("wmt-train-en-de.txt", "wmt-test-en-de.txt"): ["train", "test"],
    ("trainSmall.txt", "testSmall.txt"): ["train", "test"],
    ("c-train-v2/a.txt", "c-heldout-v2/a.txt"): ["train", "valid"],
    ("a/train/1.txt", "a/train/2.txt", "b/1.txt"): [],
    ("train/a.py", "test/b.py", "other/c.py"): [],
    ("train.txt", "test.txt", "more.txt"): [],
    **{
        ("train.txt", name): [] if split == "refused" else ["train", split]
        for split, names in BESIDE_TRAIN.items()
        for name in names
    },
}
"""Files of which one says train, and their splits; none if they are refused."""


def splits_of(folder: Path, names: Iterable[str], settings: PrepareSettings = TEXT) -> list[str]:
    """The splits of files with these names, in their order."""
    write_files(folder, {name: name for name in names})
    found = find(folder)
    chosen = choose_given_splits(found, settings, lambda line: None)
    split_of = {file.name: file.split for file in chosen}
    return [split_of[name] for name in names]


@pytest.mark.parametrize(("names", "splits"), TRAIN_AND.items(), ids=map("+".join, TRAIN_AND))
def test_text_beside_train_is_in_a_split_or_refused(
    names: tuple[str, ...], splits: list[str], tmp_path: Path
) -> None:
    if splits:
        assert splits_of(tmp_path, names) == splits
        return
    with pytest.raises(ConfigError, match="give no split") as refused:
        splits_of(tmp_path, names)
    for part in (f"train={tmp_path}/{names[0]}", f"valid={tmp_path}/{names[-1]}", "--split none"):
        assert part in str(refused.value)
    for settings in (PrepareSettings(merge_splits=True), PrepareSettings(split={"valid": 0.5})):
        assert splits_of(tmp_path, names, settings) == [""] * len(names)


def test_files_of_an_archive_and_of_several_inputs_are_refused_alike(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as packed:
        for name in ("c/train.txt", "c/heldback.txt"):
            packed.writestr(name, name)
            packed.extract(name, tmp_path)
    for inputs, place in (
        (["c.zip"], f"{tmp_path}/c.zip/c"),
        (["c/train.txt", "c/heldback.txt"], f"{tmp_path}/c"),
    ):
        found = find(*(tmp_path / each for each in inputs), out=tmp_path / "out")
        with pytest.raises(ConfigError, match=f"train={place}/train.txt valid={place}/heldback"):
            choose_given_splits(found, TEXT, lambda line: None)


NOTHING_SEPARATED = [
    ["train/a.txt", "train/b.txt"],
    ["train-00000-of-00002.txt", "train-00001-of-00002.txt"],
    ["train_00001of00002.txt", "train_00002of00002.txt"],
    ["a.txt", "b/c.txt", "README.md"],
    ["train.txt", "README.md", "LICENSE", "CITATION.cff", "load.py"],
    ["training/a.py", "model/b.py", "notes.md"],
    ["contest.txt", "latest/a.txt", "my_training_of_dogs_ended.txt"],
]


@pytest.mark.parametrize("names", NOTHING_SEPARATED, ids="+".join)
def test_files_that_all_or_none_say_train_are_one_split(names: list[str], tmp_path: Path) -> None:
    assert splits_of(tmp_path, names) == [""] * len(names)


def test_what_describes_a_corpus_is_no_text_to_hold_out(tmp_path: Path) -> None:
    names = ["data/train.txt", "data/test.txt", "README.md", "data/LICENSE.txt", "load.py"]
    assert splits_of(tmp_path, names) == ["train", "test", "", "", ""]


def test_folders_of_source_code_are_splits_only_next_to_a_folder_train(tmp_path: Path) -> None:
    names = ["train/a.py", "test/b.py", "train/c_test.py"]
    assert splits_of(tmp_path, names) == ["train", "test", "train"]


IN_FOLDERS = {"d/train/a.txt": "train", "d/train/dev.txt": "train", "d/test/dev_y.txt": "test"}
GIVEN_INPUTS = {
    ("train", "dev"): {"train/a.txt": "train", "dev/b.txt": "valid"},
    ("dev",): {"dev/b.txt": ""},  # a single folder has one split, whatever it is called
    ("d/{train,test}",): IN_FOLDERS,
    ("d/{train,test}/*.txt",): IN_FOLDERS,
    ("d/train", "d/test"): IN_FOLDERS,
    ("test/train.txt", "test/valid.txt", "test/other.txt"): {
        "test/train.txt": "train", "test/valid.txt": "valid", "test/other.txt": "test",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("inputs", "splits"), GIVEN_INPUTS.items(), ids=map("+".join, GIVEN_INPUTS)
)
def test_a_given_folder_counts_first_if_several_differ_and_otherwise_last(
    inputs: tuple[str, ...],
    splits: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(write_files(tmp_path, {name: name for name in splits}))
    assert {file.path: file.split for file in find(*inputs).files} == splits


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """train, valid and test files; "z" is in the test file only."""
    texts = {"x.train.txt": "abc " * 50, "x.valid.txt": "cab " * 5, "x.test.txt": "abz " * 7}
    return write_files(tmp_path / "three", texts)


def test_named_inputs_give_the_bytes_of_the_same_names_in_files(
    three: Path, tmp_path: Path
) -> None:
    given = [f"{split}={three}/x.{split}.txt" for split in ("test", "train", "valid")]
    prepare_dataset(given, tmp_path / "named", PrepareSettings(shuffle=3))
    prepare_dataset([three], tmp_path / "found", PrepareSettings(shuffle=3))
    assert files_of(tmp_path / "named") == files_of(tmp_path / "found")


def test_a_split_may_have_several_inputs_and_any_name(
    txl: Txl, three: Path, tmp_path: Path
) -> None:
    extra = tmp_path / "extra=1.txt"
    extra.write_text("a path with an equals sign")
    ended = txl(
        *("prepare", f"train={three}/x.t*n.txt", f"train={extra}", f"ood={three}/x.valid.txt"),
        *("--out", tmp_path / "out"),
    )
    assert "splits as given: 2 files: train; 1: ood" in ended.err
    assert ids_of(tmp_path / "out") == {
        "train": ["x.train.txt", "extra=1.txt"],
        "ood": ["x.valid.txt"],
    }


def test_the_vocabulary_is_that_of_train_alone(three: Path, tmp_path: Path) -> None:
    prepare_dataset([three], tmp_path / "out", PrepareSettings(tokenizer="char"))
    tokenizer = open_tokenizer(tmp_path / "out")
    assert "z" not in tokenizer.decode(list(range(tokenizer.vocab_size)))


def test_none_merges_the_splits_and_fractions_override_them(
    txl: Txl, three: Path, tmp_path: Path
) -> None:
    listed = "the splits in the names of the files: 1 file: train; 1: valid; 1: test"
    ended = txl("prepare", three, "--out", tmp_path / "merged", "--split", "none")
    assert f"--split none merges {listed}" in ended.err
    assert set(ids_of(tmp_path / "merged")) == {"train"}
    ended = txl("prepare", three, "--out", tmp_path / "other", "--split", "heldback=0.3")
    assert f"--split overrides {listed}" in ended.err
    assert set(ids_of(tmp_path / "other")) == {"train", "heldback"}


def test_fractions_of_named_inputs_are_taken_from_train(txl: Txl, tmp_path: Path) -> None:
    lines = "".join(f"line {number}\n" for number in range(300))
    (tmp_path / "a").write_text(lines)
    (tmp_path / "b").write_text("the test text\n")
    inputs = (f"train={tmp_path}/a", f"test={tmp_path}/b", "--format", "lines")
    out = tmp_path / "out"
    assert txl("prepare", *inputs, "--out", out, "--split", "valid=0.1").code == 0
    ids = ids_of(out)
    assert ids["test"] == ["b:1"]
    assert 15 < len(ids["valid"]) < 45
    assert sorted(ids["train"] + ids["valid"]) == sorted(f"a:{n}" for n in range(1, 301))
    ended = txl("prepare", *inputs, "--out", tmp_path / "twice", "--split", "test=0.1")
    assert (ended.code, "the inputs give test already" in ended.err) == (2, True)


WRONG = {
    "'My-valid' cannot be the name of a split": ["train={0}/x.train.txt", "My-valid=x.valid.txt"],
    "this input has no split and others have one": ["train={0}/x.train.txt", "{0}/x.test.txt"],
    "none is train": ["valid={0}/x.valid.txt", "test={0}/x.test.txt"],
    "the inputs are given with the names of their splits": ["train={0}/x.train.txt",
                                                            "--split", "none"],
    "the splits valid, test, and none is train": ["{0}/x.valid.txt", "{0}/x.test.txt"],
    "would be read twice": ["train={0}/x.train.txt", "valid={0}"],
    "is for --split NAME=FRACTION": ["{0}", "--split-by", "file"],
}  # fmt: skip


@pytest.mark.parametrize(("reason", "words"), WRONG.items())
def test_contradictions_are_refused(
    txl: Txl, three: Path, tmp_path: Path, reason: str, words: list[str]
) -> None:
    out = tmp_path / "out"
    ended = txl("prepare", *(word.format(three) for word in words), "--out", out)
    assert ended.code in (2, 3)
    assert reason in ended.err
    assert not out.exists()


def test_other_splits_of_the_same_files_are_another_dataset(
    txl: Txl, three: Path, tmp_path: Path
) -> None:
    one, two = (three / f"x.{split}.txt" for split in ("train", "test"))
    command = ("--out", tmp_path / "out")
    assert txl("prepare", f"train={one}", f"test={two}", *command).code == 0
    assert "already complete" in txl("prepare", f"train={one}", f"test={two}", *command).out
    ended = txl("prepare", f"test={one}", f"train={two}", *command)
    assert ended.code == 3
    assert "holds another dataset: input digest" in ended.err


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_file_is_in_one_split_also_through_a_link(
    txl: Txl, tmp_path: Path, link: Callable[[Path, Path], None]
) -> None:
    write_files(tmp_path / "in", {"a.txt": "one", "b.txt": "two"})
    a, b = tmp_path / "in" / "a.txt", tmp_path / "in" / "b.txt"
    os.utime(b, ns=(a.stat().st_mtime_ns, a.stat().st_mtime_ns))  # the same mark, but another file
    link(a, tmp_path / "in" / "c.txt")
    command = (f"train={a}", f"train={b}", f"valid={tmp_path}/in/c.txt", "--out", tmp_path / "out")
    ended = txl("prepare", *command)
    assert ended.code == 2
    assert f"{a} in train and {tmp_path}/in/c.txt in valid are one file" in ended.err
    assert txl("prepare", *command, "--dedup", "exact").code == 0
    assert ids_of(tmp_path / "out") == {"train": ["b.txt"], "valid": ["c.txt"]}

    ended = txl("prepare", tmp_path / "in", "--out", tmp_path / "one")
    assert ended.code == 0
    assert "links to other files of the input, which are read again: c.txt" in ended.out + ended.err


def test_links_between_splits_by_name_and_links_of_empty_files_are_no_reason_to_refuse(
    txl: Txl, tmp_path: Path
) -> None:
    """As a package store links equal files, such as LICENSE."""
    files = {"train/a.txt": "one", "train/LICENSE.txt": "all", "train/empty.txt": ""}
    write_files(tmp_path / "in", {**files, "valid/b.txt": "two"})
    for name in ("LICENSE.txt", "empty.txt"):
        os.link(tmp_path / "in" / "train" / name, tmp_path / "in" / "valid" / name)
    ended = txl("prepare", tmp_path / "in", "--out", tmp_path / "out")
    assert ended.code == 0
    assert "which are read again: valid/LICENSE.txt (" in ended.out + ended.err
    named = (f"train={tmp_path}/in/train/empty.txt", f"valid={tmp_path}/in/valid/empty.txt")
    others = (f"train={tmp_path}/in/train/a.txt", f"valid={tmp_path}/in/valid/b.txt")
    assert txl("prepare", *named, *others, "--out", tmp_path / "named").code == 0


def test_duplicates_are_dropped_from_train_and_never_from_a_given_split(tmp_path: Path) -> None:
    texts = {"train.txt": "one\ntwo\nthree\none\none \n", "test.txt": "two\nfour\ntwo\n"}
    write_files(tmp_path, texts)
    settings = PrepareSettings(format="lines", dedup="exact")
    inputs = [tmp_path / name for name in texts]
    report = prepare_dataset(inputs, tmp_path / "out", settings)
    assert ids_of(tmp_path / "out") == {
        "train": ["train.txt:1", "train.txt:3", "train.txt:5"],
        "test": ["test.txt:1", "test.txt:2", "test.txt:3"],
    }
    assert report.manifest.input.duplicates == 2
    assert prepare_dataset(inputs, tmp_path / "out", settings).already_complete
