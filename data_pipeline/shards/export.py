"""`txl data export` and `push`: a dataset as files that other programs read, or at another place.

`export` keeps the order of the dataset. OUT has a file per split and `export.json`, written last:

    jsonl    SPLIT.jsonl: an object per document with `id`, `split` and `text`
    parquet  SPLIT.parquet: the same columns, compressed with zstd
    bin      SPLIT.bin: all token ids, one after another, little-endian, as nanoGPT reads them

Datasets of token ids have a list `ids` instead of `text`. `txl prepare OUT` reads all of them
again, with their splits. `export.json` has the type of the ids, the tokenizer and, per split, the
file, its documents and tokens, and for bin where the split begins in the file: 0.

A text is exact if its tokenizer is lossless: then the bytes of every split are compared with the
manifest. Otherwise it is what the model reads: words without their whitespace, unknown symbols. A
document that is not UTF-8 is refused, because JSON and Parquet cannot hold it; `bin` can.

`push` copies the dataset to object storage, its manifest last, so a reader of the URL sees either
no dataset or a complete one. Every local shard and index is hashed before it is sent, and the size
of the remote copy is compared afterwards.
"""

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from data_pipeline.errors import ConfigError, DataError, printable
from data_pipeline.shards.manifest import (
    MANIFEST_NAME,
    ShardManifest,
    is_dataset_file,
    load_manifest,
    open_tokenizer,
)
from data_pipeline.shards.shard_reader import SplitReader, open_split
from data_pipeline.system.files import (
    StagedDirectory,
    explain_disk_errors,
    sha256_file,
    write_synced,
)
from data_pipeline.system.progress import Progress
from data_pipeline.system.remote_path import DatasetPath, RemotePath, dataset_path
from data_pipeline.system.sources import scheme_of
from data_pipeline.tokenizers import Tokenizer
from data_pipeline.tokenizers.ids import IdTokenizer

FORMATS = ("jsonl", "parquet", "bin")
EXPORT_NAME = "export.json"
_BATCH_BYTES = 16 * 2**20
"""Tokens that are read, and rows of Parquet that are written, at a time."""


_Advance = Callable[[int], None]
"""Called with n after every n tokens."""


class _Document(NamedTuple):
    id: str
    content: str | np.ndarray
    """The text, or the ids [T] of a dataset of ids."""


def export_dataset(
    directory: DatasetPath,
    out: Path,
    format: str,
    *,
    splits: list[str] | None = None,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Write the dataset to the new or empty directory `out`. Returns the content of `export.json`.

    `splits` are all by default. A killed process leaves no file in `out`, except in its staging
    folder, which the next one removes. Raises DataError for a damaged dataset, a missing split, a
    document that is not UTF-8 and an `out` that has other files; UnfinishedError for a full disk.
    """
    manifest = load_manifest(directory)
    tokenizer = open_tokenizer(directory, manifest)
    names = splits or [name for name, _ in manifest.train_first()]
    chosen = {name: manifest.split(name, directory) for name in names}
    itemsize = np.dtype(manifest.dtype).itemsize
    total, done = sum(entry.tokens for entry in chosen.values()) * itemsize, 0

    def advance(num_tokens: int) -> None:
        nonlocal done
        done += num_tokens * itemsize
        progress("exporting", done, total)

    described: dict[str, Any] = {}
    with StagedDirectory(out, last=EXPORT_NAME) as staged, explain_disk_errors("exporting", out):
        _require_empty(out, staged.path)
        staging = staged.stage()
        for name, entry in chosen.items():
            file_name = f"{name}.{format}"
            split = open_split(directory, name, manifest=manifest)
            with (staging / file_name).open("wb") as file:
                text_bytes = _write_split(split, tokenizer, file, format, advance)
                file.flush()
                os.fsync(file.fileno())
            if format != "bin" and tokenizer.lossless and text_bytes != entry.text_bytes:
                raise DataError(
                    f"{directory}, split {name}: its tokens decode to {text_bytes:,} bytes of "
                    f"text, the manifest says {entry.text_bytes:,}. Check it: txl data verify "
                    f"{directory}"
                )
            described[name] = {
                "file": file_name,
                "offset": 0,
                "documents": entry.documents,
                "tokens": entry.tokens,
            }
        content = _description(manifest, tokenizer, format, described)
        write_synced(staging / EXPORT_NAME, json.dumps(content, indent=1).encode() + b"\n")
        staged.publish([EXPORT_NAME, *(split["file"] for split in described.values())])
    return content


def _description(
    manifest: ShardManifest, tokenizer: Tokenizer, format: str, splits: dict[str, Any]
) -> dict[str, Any]:
    text = "none" if isinstance(tokenizer, IdTokenizer) or format == "bin" else "decoded"
    return {
        "format": format,
        "dataset_digest": manifest.digest,
        "text": "exact" if text == "decoded" and tokenizer.lossless else text,
        "dtype": manifest.dtype,
        "byte_order": "little",
        "tokenizer": manifest.settings.tokenizer,
        "tokenizer_digest": manifest.tokenizer_digest,
        "vocab_size": manifest.vocab_size,
        "end_of_document": manifest.end_of_document,
        "opens_documents": tokenizer.opens_documents,
        "splits": splits,
    }


def _require_empty(out: Path, staging: Path) -> None:
    if others := sorted(path.name for path in out.iterdir() if path != staging):
        raise DataError(
            f"{out} holds other files: {', '.join(map(printable, others[:5]))}. Nothing was "
            "changed; choose an empty or new directory for --out."
        )


def _write_split(
    split: SplitReader, tokenizer: Tokenizer, file: BinaryIO, format: str, advance: _Advance
) -> int:
    """Write one split. Returns the UTF-8 bytes of its texts; 0 if it writes no texts."""
    if format == "bin":
        _write_bin(split, file, advance)
        return 0
    documents = _documents(split, tokenizer, advance)
    if format == "jsonl":
        return _write_jsonl(documents, split, file)
    return _write_parquet(documents, split, file, is_ids=isinstance(tokenizer, IdTokenizer))


def _documents(split: SplitReader, tokenizer: Tokenizer, advance: _Advance) -> Iterator[_Document]:
    """The documents of the split in order. Each block is read once."""
    for block, documents in itertools.groupby(split.documents(), key=lambda each: each.block):
        tokens = split.read(block, 0, int(split.block_tokens[block]))
        for document in documents:
            ids = tokens[document.start : document.stop]
            if isinstance(tokenizer, IdTokenizer):
                yield _Document(document.id, ids[ids != tokenizer.end_of_document])
            else:
                yield _Document(document.id, _text_of(split, document.id, ids, tokenizer))
            advance(len(ids))


def _text_of(split: SplitReader, id_: str, tokens: np.ndarray, tokenizer: Tokenizer) -> str:
    raw = tokenizer.decode_bytes(tokens)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{split.directory}, split {split.split}, document {printable(id_)}: its text is not "
            f"UTF-8 at byte {error.start}, so JSON and Parquet cannot hold it. Export the token "
            "ids: --format bin"
        ) from error


def _write_bin(split: SplitReader, file: BinaryIO, advance: _Advance) -> None:
    room = _BATCH_BYTES // split.dtype.itemsize
    for block, num_tokens in enumerate(split.block_tokens.tolist()):
        for start in range(0, num_tokens, room):
            tokens = split.read(block, start, min(start + room, num_tokens))
            file.write(tokens.astype(split.dtype.newbyteorder("<"), copy=False).tobytes())
            advance(len(tokens))


def _write_jsonl(documents: Iterator[_Document], split: SplitReader, file: BinaryIO) -> int:
    text_bytes = 0
    for id_, content in documents:
        value = {"ids": content.tolist()} if isinstance(content, np.ndarray) else {"text": content}
        row = {"id": id_, "split": split.split, **value}
        file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        text_bytes += len(content.encode()) if isinstance(content, str) else 0
    return text_bytes


def _write_parquet(
    documents: Iterator[_Document], split: SplitReader, file: BinaryIO, *, is_ids: bool
) -> int:
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    dtype = pa.from_numpy_dtype(split.dtype)
    name, kind = ("ids", pa.list_(dtype)) if is_ids else ("text", pa.string())
    columns = [("id", pa.string()), ("split", pa.string()), (name, kind)]
    text_bytes = 0
    with contextlib.closing(
        ParquetWriter(file, pa.schema(columns), compression="zstd", write_page_checksum=True)
    ) as writer:
        for batch in _batches(documents):
            contents = [document.content for document in batch]
            arrays = [
                pa.array([document.id for document in batch], pa.string()),
                pa.array([split.split] * len(batch), pa.string()),
                pa.array(contents, kind),
            ]
            writer.write_table(pa.table(arrays, schema=pa.schema(columns)))
            text_bytes += sum(len(text.encode()) for text in contents if isinstance(text, str))
    return text_bytes


def _batches(documents: Iterator[_Document]) -> Iterator[list[_Document]]:
    """Documents of about _BATCH_BYTES, or one larger document."""
    batch: list[_Document] = []
    size = 0
    for document in documents:
        content = document.content
        size += len(content) if isinstance(content, str) else content.nbytes
        batch.append(document)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# --- push ---------------------------------------------------------------------------------------


WRITABLE = ("s3", "gs")


def push_dataset(
    directory: Path, url: str, *, progress: Progress = lambda *_: None
) -> ShardManifest:
    """Copy the dataset in `directory` to `url`, except files that are already there and complete.

    Raises DataError for a damaged dataset, another dataset at the URL, or failing object storage;
    ConfigError for a URL that cannot be written.
    """
    target = dataset_path(url)
    if not isinstance(target, RemotePath) or scheme_of(url) not in WRITABLE:
        raise ConfigError(
            f"{target}: give a URL of scheme {' or '.join(WRITABLE)} to push to. To copy a dataset "
            "to a directory or a web server, copy all of its files, manifest.json last."
        )
    manifest = load_manifest(directory)
    open_tokenizer(directory, manifest)
    names = [name for name in manifest.file_names() if name != MANIFEST_NAME] + [MANIFEST_NAME]
    for name in names:
        if not (directory / name).is_file():
            raise DataError(f"{directory / name} is missing. List all: txl data verify {directory}")
    sizes = {name: (directory / name).stat().st_size for name in names}
    shard_files = manifest.shard_files
    with _explain_store_errors(target):
        remote_sizes = target.sizes(missing_ok=True)
        _require_same_dataset(target, manifest, remote_sizes)
        # Without a manifest, a remote file may be from an interrupted push of other data.
        if MANIFEST_NAME in remote_sizes:
            names = [name for name in names if remote_sizes.get(name) != sizes[name]]
    done, total = 0, sum(sizes[name] for name in names)
    progress("sending", done, total)
    for name in names:
        _, sha256 = shard_files.get(name, (None, None))
        _send(directory / name, target / name, sizes[name], sha256)
        done += sizes[name]
        progress("sending", done, total)
    return manifest


def _require_same_dataset(
    target: RemotePath, manifest: ShardManifest, remote_sizes: dict[str, int]
) -> None:
    # Overwriting would change the data under runs that read this URL.
    listed = {*manifest.file_names()}
    extra = [name for name in remote_sizes if is_dataset_file(name) and name not in listed]
    if MANIFEST_NAME in remote_sizes and load_manifest(target).digest != manifest.digest:
        extra.insert(0, MANIFEST_NAME)
    if extra:
        raise DataError(
            f"{target} holds another dataset: {extra[0]} is not of this one. Choose another URL, "
            "or remove that dataset with the tools of its store."
        )


def _send(source: Path, target: RemotePath, size: int, sha256: str | None) -> None:
    # Manifest and tokenizer have no entry in the manifest; both were checked when loaded.
    if sha256 and sha256_file(source) != sha256:
        raise DataError(
            f"{source} does not have the manifest's sha256. List all problems: txl data verify "
            f"{source.parent}"
        )
    with _explain_store_errors(target):
        target.write_from(source)
        remote_size = target.stat().st_size
    if remote_size != size:
        raise DataError(f"{target} is {remote_size:,} bytes after sending, expected {size:,}.")


@contextlib.contextmanager
def _explain_store_errors(target: RemotePath) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{target}: object storage refuses or fails ({error.strerror}). Check that the bucket "
            "exists, the credentials and the network, then run it again."
        ) from error
