"""Corpora in the layouts in which they are published, made by hand, and what each one holds.

docs/how_to/keep_splits.md has a table of what `txl prepare` prints and writes for every layout.
"""

import csv
import gzip
import io
import json
import random
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import zstandard
from pyarrow import ipc, parquet

from data_pipeline.readers.split_names import split_order
from data_pipeline.shards.manifest import PrepareSettings, ShardManifest

Texts = dict[str, list[str]]
_TEXT = PrepareSettings()
TEXTS: Texts = {
    "train": [f"train text number {n}, {'word ' * n}" for n in range(1, 8)],
    "valid": ["a text to validate", "another one"],
    "test": ["the first test text", "the second", "and the third, somewhat longer"],
}
"""A layout need not have all of these."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to publish a corpus with its splits."""

    name: str
    write: Callable[[Path], Texts]
    """Writes the files into a directory and returns the documents of every split."""
    printed: str
    """The part of the line that names the splits."""
    settings: PrepareSettings = _TEXT


def _rows(texts: list[str]) -> pa.Table:
    return pa.table({"text": texts})


def _arrow(texts: list[str]) -> bytes:
    sink = io.BytesIO()
    with ipc.new_stream(sink, _rows(texts).schema) as writer:
        writer.write_table(_rows(texts))
    return sink.getvalue()


def _json_lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def write_files(folder: Path, contents: Mapping[str, bytes | str]) -> Path:
    """Write files below a folder, by their names. Returns the folder."""
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def _parquet(folder: Path) -> Texts:
    folder.mkdir(parents=True)
    train = TEXTS["train"]
    parquet.write_table(_rows(train[:3]), folder / "train-00000-of-00002.parquet")
    parquet.write_table(_rows(train[3:]), folder / "train-00001-of-00002.parquet")
    parquet.write_table(_rows(TEXTS["valid"]), folder / "validation-00000-of-00001.parquet")
    parquet.write_table(_rows(TEXTS["test"]), folder / "test-00000-of-00001.parquet")
    return TEXTS


def _arrow_cache(folder: Path) -> Texts:
    for split, name in (("train", "train"), ("valid", "validation"), ("test", "test")):
        write_files(folder, {f"wiki-{name}.arrow": _arrow(TEXTS[split])})
    return TEXTS


def _dataset_dict(folder: Path) -> Texts:
    file = "data-00000-of-00001.arrow"
    state = json.dumps({"_data_files": [{"filename": file}]})
    texts = {split: TEXTS[split] for split in ("train", "test")}
    for split, of_split in texts.items():
        files = {file: _arrow(of_split), "state.json": state, "dataset_info.json": "{}"}
        write_files(folder / split, files)
    write_files(folder, {"dataset_dict.json": '{"splits": ["train", "test"]}'})
    return texts


def _one_text_each(names: dict[str, str]) -> Callable[[Path], Texts]:
    """A text file per split, the documents joined."""

    def write(folder: Path) -> Texts:
        texts = {split: "\n".join(TEXTS[split]) for split in names}
        write_files(folder, {name: texts[split] for split, name in names.items()})
        return {split: [text] for split, text in texts.items()}

    return write


def _wikitext(folder: Path, suffix: str) -> Texts:
    articles = {
        split: [f" = Title {n} = \n \n {text} \n" for n, text in enumerate(texts)]
        for split, texts in TEXTS.items()
    }
    for split, texts in articles.items():
        texts[0] = f" \n{texts[0]}"  # a blank line before the first title, as published
        write_files(folder, {f"wiki.{split}.{suffix}": "".join(texts)})
    return articles


def _c4(folder: Path) -> Texts:
    train = TEXTS["train"]
    files = {
        "c4-train.00000-of-01024.json.gz": train[:2],
        "c4-train.00001-of-01024.json.gz": train[2:],
        "c4-validation.00000-of-00008.json.gz": TEXTS["valid"],
    }
    for name, texts in files.items():
        write_files(folder, {name: gzip.compress(_json_lines(texts))})
    return {"train": train, "valid": TEXTS["valid"]}


def _json_lines_zst(train: str, valid: str, test: str) -> Callable[[Path], Texts]:
    """A file of these names per split."""

    def write(folder: Path) -> Texts:
        for split, name in (("train", train), ("valid", valid), ("test", test)):
            content = zstandard.compress(_json_lines(TEXTS[split]))
            write_files(folder, {f"{name}.jsonl.zst": content})
        return TEXTS

    return write


def _books(folder: Path) -> Texts:
    for split, name in (("train", "train"), ("valid", "validation"), ("test", "test")):
        numbered = enumerate(TEXTS[split], start=10)
        write_files(folder / name, {f"{number}.txt": text for number, text in numbered})
    return TEXTS


def _csv(folder: Path) -> Texts:
    for split in ("train", "test"):
        stream = io.StringIO()
        csv.writer(stream).writerows([["label", "text"], *([1, text] for text in TEXTS[split])])
        write_files(folder, {f"{split}.csv": stream.getvalue()})
    return {split: TEXTS[split] for split in ("train", "test")}


def _nano_gpt(folder: Path) -> Texts:
    """Ids: the documents are their decimals. 0 is the end of a document."""
    documents = {"train": [[5, 6, 7], [8]], "valid": [[9, 10]]}
    folder.mkdir(parents=True)
    for split, name in (("train", "train"), ("valid", "val")):
        ids = [id_ for document in documents[split] for id_ in (*document, 0)]
        np.array(ids, "<u2").tofile(folder / f"{name}.bin")
    return {split: [" ".join(map(str, each)) for each in documents[split]] for split in documents}


_ONE_BILLION_WORDS = {
    "train": "training-monolingual.tokenized.shuffled/news.en-00001-of-00100",
    "valid": "heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050",
}
_SLIM_PAJAMA = (
    "train/chunk1/example_train_0",
    "validation/chunk1/example_holdout_0",
    "test/chunk1/example_holdout_0",
)
_PTB = {"train": "ptb.train.txt", "valid": "ptb.valid.txt", "test": "ptb.test.txt"}
_IDS = PrepareSettings(format="ids", vocab_size=11, end_of_document=0, dtype="uint16")
LAYOUTS = [
    Layout("Hugging Face, parquet", _parquet, "2 files: train; 1: valid; 1: test"),
    Layout("Hugging Face, cache", _arrow_cache, "1 file: train; 1: valid; 1: test"),
    Layout("Hugging Face, save_to_disk", _dataset_dict, "1 file: train; 1: test"),
    Layout("Penn Treebank", _one_text_each(_PTB), "1 file: train; 1: valid; 1: test"),
    Layout("WikiText, .tokens", lambda folder: _wikitext(folder, "tokens"),
           "1 file: train; 1: valid; 1: test"),
    Layout("WikiText, .raw", lambda folder: _wikitext(folder, "raw"),
           "1 file: train; 1: valid; 1: test"),
    Layout("C4", _c4, "2 files: train; 1: valid"),
    Layout("SlimPajama", _json_lines_zst(*_SLIM_PAJAMA), "1 file: train; 1: valid; 1: test"),
    Layout("The Pile", _json_lines_zst("train/00", "val", "test"),
           "1 file: train; 1: valid; 1: test"),
    Layout("PG-19", _books, "7 files: train; 2: valid; 3: test"),
    Layout("CSV", _csv, "1 file: train; 1: test", PrepareSettings(format="csv")),
    Layout("nanoGPT", _nano_gpt, "1 file: train; 1: valid", _IDS),
    Layout("One Billion Words", _one_text_each(_ONE_BILLION_WORDS), "1 file: train; 1: valid"),
    Layout("unnamed training files",
           _one_text_each({"train": "corpus.txt", "test": "corpus.test.txt"}),
           "1 file: train; 1: test (in train because their names give no split: corpus.txt)"),
]  # fmt: skip


ARCHIVE_SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


def pack(folder: Path, archive: Path, *, top: str = "") -> Path:
    """Write the files of `folder`, in reverse order, below the folder `top` of the archive."""
    names = sorted((p.relative_to(folder) for p in folder.rglob("*")), reverse=True)
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as zipped:
            for name in names:
                zipped.write(folder / name, Path(top, name))
        return archive
    content = io.BytesIO()
    mode = {".gz": "w:gz", ".tgz": "w:gz", ".bz2": "w:bz2", ".xz": "w:xz"}.get(archive.suffix, "w:")
    with tarfile.open(fileobj=content, mode=mode) as packed:
        for name in names:
            packed.add(folder / name, str(Path(top, name)), recursive=False)
    data = content.getvalue()
    if archive.suffix == ".zst":
        data = zstandard.compress(data)
    archive.write_bytes(data)
    return archive


# --- WikiText-103, with enough words to train on --------------------------------------------------

SIZES = {"train": 2000, "valid": 300, "test": 200}
"""Words of every split, without those of titles."""


def wikitext(num_words: int) -> str:
    """Articles in the form of WikiText: titles, blank lines, frequent and rare words."""
    rng = random.Random(3)
    words = [f"w{int(rng.paretovariate(0.8)) % 300}" for _ in range(num_words)]
    lines = [" ".join(words[i : i + 11]) for i in range(0, num_words, 11)]
    for i in range(0, len(lines), 5):
        lines[i] = f"\n = Article {i} = \n \n {lines[i]}"
    return "".join(f" {line} \n" for line in lines)


def write_tokens(directory: Path) -> Path:
    """The folder that wikitext-103-v1.zip contains."""
    folder = directory / "wikitext-103"
    folder.mkdir(parents=True)
    for split, size in SIZES.items():
        (folder / f"wiki.{split}.tokens").write_text(wikitext(size))
    return folder


def write_parquet(directory: Path) -> Path:
    """Hugging Face's Salesforce/wikitext: one line per row, "" for a blank line. Returns the folder
    of WikiText-103, which has other configurations too.
    """
    for name in ("wikitext-103-raw-v1", "wikitext-103-v1", "wikitext-2-v1"):
        folder = directory / name
        folder.mkdir(parents=True)
        for split, size in SIZES.items():
            lines = wikitext(size if name == "wikitext-103-v1" else 99).splitlines(keepends=True)
            rows = [line if line.strip() else "" for line in lines]
            published = {"valid": "validation"}.get(split, split)
            parts = [rows[:50], rows[50:]] if split == "train" else [rows]
            for n, part in enumerate(parts):
                path = folder / f"{published}-{n:05}-of-{len(parts):05}.parquet"
                parquet.write_table(_rows(part), path)
    return directory / "wikitext-103-v1"


# --- the table ------------------------------------------------------------------------------------


def table_row(layout: Layout, manifest: ShardManifest, printed: str) -> str:
    """The row of the table: what was printed of the splits, and what was written."""
    entries = [manifest.splits[split] for split in sorted(manifest.splits, key=split_order)]
    documents = ", ".join(f"{entry.documents:,}" for entry in entries)
    tokens = ", ".join(f"{entry.tokens:,}" for entry in entries)
    return f"| {layout.name} | `{printed}` | {documents} | {tokens} |"
