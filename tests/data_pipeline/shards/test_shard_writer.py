"""Writing shards: our reader and stock tools read back the documents that were written."""

import io
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
import webdataset
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import NO_TEXT, ShardManifest
from data_pipeline.shards.shard_index import DocumentIds
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.shards.shard_writer import ShardWriter
from tests.data_pipeline.shards.written_split import (
    documents_of,
    some_documents,
    write_split,
)


def files_of(directory: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def writer_in(directory: str | Path, block_bytes: int) -> ShardWriter:
    options = {"dtype": np.dtype("<u2"), "vocab_size": 257, "block_bytes": block_bytes}
    return ShardWriter(Path(directory), "train", 0, **options)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=st.lists(st.one_of(st.integers(0, 80), st.integers(400, 4000)), min_size=1, max_size=9),
    block_bytes=st.integers(512, 2500),
    shard_bytes=st.integers(1, 9000),
    vocab_size=st.sampled_from([257, 70_000]),
)
def test_documents_of_any_size_are_read_back_from_their_shards(
    lengths: list[int], block_bytes: int, shard_bytes: int, vocab_size: int
) -> None:
    documents = some_documents(lengths, vocab_size)
    with tempfile.TemporaryDirectory() as directory:
        manifest = write_split(
            Path(directory),
            documents,
            vocab_size=vocab_size,
            block_bytes=block_bytes,
            shard_bytes=shard_bytes,
        )
        source = open_split(directory, "train", manifest=manifest, cache_frames=2)
        assert documents_of(source) == [tokens.tolist() for tokens in documents]
        assert source.dtype.itemsize == (2 if vocab_size == 257 else 4)
        assert source.num_tokens == sum(map(len, documents)) == source.block_tokens.sum()


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 4000), min_size=1, max_size=5),
    block_bytes=st.integers(512, 2500),
    num_chunks=st.integers(2, 9),
)
def test_the_bytes_of_a_shard_do_not_depend_on_the_chunks_of_its_documents(
    lengths: list[int], block_bytes: int, num_chunks: int
) -> None:
    documents, written = some_documents(lengths), []
    for count in (1, num_chunks):
        with tempfile.TemporaryDirectory() as directory:
            write_split(Path(directory), documents, block_bytes=block_bytes, num_chunks=count)
            written.append(files_of(directory))
    assert written[0] == written[1]


def test_the_tar_equals_that_of_webdatasets_tarwriter(tmp_path: Path) -> None:
    documents = some_documents([40, 170, 300, 3000, 10])
    write_split(tmp_path, documents, block_bytes=1024, shard_bytes=10**6)
    shard = (tmp_path / "train-000000.tar.zst").read_bytes()
    ours = zstandard.ZstdDecompressor().decompressobj(read_across_frames=True).decompress(shard)
    blocks = [documents[:2], documents[2:3], documents[3:4], documents[4:]]
    theirs = io.BytesIO()
    writer = webdataset.TarWriter(theirs, encoder=False, mtime=0, user="", group="", mode=0o444)
    for number, block in enumerate(blocks):
        members = {"npy": np.concatenate(block)}
        if len(block) > 1:
            members["starts.npy"] = np.cumsum([0, *map(len, block[:-1])])
        files = {name: io.BytesIO() for name in members}
        for name, array in members.items():
            np.save(files[name], array)
        contents = {name: file.getvalue() for name, file in files.items()}
        writer.write({"__key__": f"train-000000-{number:08d}", **contents})
    writer.close()
    assert ours == theirs.getvalue()


def test_a_document_too_large_for_a_tar_is_refused_by_name_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_pipeline.shards.shard_writer.MAX_DOCUMENT_BYTES", 9000)
    write_split(tmp_path, some_documents([4000]))
    with pytest.raises(DataError, match=r"d/1 has more than 9,000 bytes .* Split its text"):
        write_split(tmp_path, some_documents([100, 4600]), num_chunks=7)


def test_small_documents_share_a_block_and_are_not_split(tmp_path: Path) -> None:
    lengths = [40, 170, 300, 10, 511, 2000, 7, 90]
    manifest = write_split(tmp_path, some_documents(lengths), shard_bytes=10**9)
    source = open_split(tmp_path, "train", manifest=manifest)
    blocks = [np.diff([*source.document_starts(b), n]) for b, n in enumerate(source.block_tokens)]
    assert [list(block) for block in blocks] == [[41, 171], [301, 11], [512], [2001], [8, 91]]


@pytest.mark.parametrize("token", [257, 65_535, 65_536 + 7, -1])
def test_ids_outside_the_vocabulary_are_refused_not_wrapped(tmp_path: Path, token: int) -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        write_split(tmp_path, [np.array([256, token], dtype=np.int64)])


@pytest.mark.skipif(not shutil.which("zstd"), reason="needs the zstd program")
def test_stock_tools_read_every_shard(dataset: tuple[Path, ShardManifest]) -> None:
    directory, manifest = dataset
    shared = 0
    for name, entry in manifest.splits.items():
        documents: list[list[int]] = []
        members = []
        for shard in entry.shards:
            path = directory / shard.name
            subprocess.run(["zstd", "-tq", path], check=True)
            listed = subprocess.run(["tar", "--zstd", "-tf", path], capture_output=True, check=True)
            members += listed.stdout.decode().split()
            samples = webdataset.WebDataset(f"pipe:zstd -dcq {path}", shardshuffle=False).decode()
            for sample in samples:
                starts = sample.get("starts.npy", np.zeros(1, np.int64))
                documents += [part.tolist() for part in np.split(sample["npy"], starts[1:])]
        assert documents == documents_of(open_split(directory, name))
        assert len(documents) == entry.documents
        assert sum(not member.endswith(".starts.npy") for member in members) == entry.blocks
        assert all(member.split(".")[0].count("-") == 2 for member in members)
        shared += sum(member.endswith(".starts.npy") for member in members)
    assert shared, "no block of several documents was tested"


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=st.lists(st.one_of(st.integers(0, 80), st.integers(200, 1500)), min_size=1, max_size=9),
    block_bytes=st.integers(512, 2500),
    first_batch=st.integers(0, 9),
)
def test_documents_added_in_batches_give_the_same_bytes(
    lengths: list[int], block_bytes: int, first_batch: int
) -> None:
    documents, written = some_documents(lengths), []
    names = ["a.txt", "b:7", "c.txt"]  # the id of `b:7` without a line ends like one with a line
    ids = DocumentIds(names, np.arange(len(documents)) % 3, np.arange(len(documents)) // 3)
    for batches in (None, [slice(0, first_batch), slice(first_batch, None)]):
        with tempfile.TemporaryDirectory() as directory:
            writer = writer_in(directory, block_bytes)
            if batches is None:
                for number, tokens in enumerate(documents):
                    writer.add(ids.id_of(number), [tokens], text_bytes=len(tokens))
            for rows in batches or []:
                if part := documents[rows]:
                    tokens, counts = np.concatenate(part), np.array([len(each) for each in part])
                    writer.add_batch(ids[rows], tokens, counts, text_bytes=len(tokens))
            writer.close(NO_TEXT)
            written.append(files_of(directory))
    assert written[0] == written[1]


@pytest.mark.parametrize("lengths", [[2, 0], [1, 2], [2, 1, 0]])
def test_a_batch_whose_lengths_are_not_those_of_its_documents_is_refused(
    tmp_path: Path, lengths: list[int]
) -> None:
    ids, tokens = DocumentIds.of(["a", "b"]), np.zeros(2, int)
    with pytest.raises(ValueError, match="every document must have tokens"):
        writer_in(tmp_path, 512).add_batch(ids, tokens, np.array(lengths), text_bytes=2)
