"""Shards: what is written comes back, through our reader and through everyone else's."""

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
from data_pipeline.preparation.settings import PrepareSettings
from data_pipeline.shards.manifest import InputSummary, ShardEntry, ShardManifest, SplitEntry
from data_pipeline.shards.shard_index import read_index
from data_pipeline.shards.shard_reader import SplitReader, open_split
from data_pipeline.shards.shard_writer import ShardWriter
from data_pipeline.shards.verify import verify_dataset
from data_pipeline.tokenizers import ByteTokenizer, token_dtype


def write_split(
    directory: Path,
    documents: list[np.ndarray],
    *,
    vocab_size: int = 257,
    block_bytes: int = 1024,
    shard_bytes: int = 5000,
    piece_count: int = 1,
) -> ShardManifest:
    entries: list[ShardEntry] = []
    waiting = list(enumerate(documents))
    while waiting:
        writer = ShardWriter(
            directory,
            "train",
            len(entries),
            dtype=token_dtype(vocab_size),
            vocab_size=vocab_size,
            block_bytes=block_bytes,
        )
        size = 0
        while waiting and not size >= shard_bytes:
            number, tokens = waiting.pop(0)
            pieces = np.array_split(tokens, piece_count)
            writer.add(f"d/{number}", pieces, text_bytes=len(tokens) - 1)
            size += len(tokens)
        entries.append(writer.close())
    summary = InputSummary(digest="0" * 64, files=1, documents=1, empty=0, rejected=0, duplicates=0)
    return ShardManifest(
        tokenizer_digest=ByteTokenizer().digest,
        vocab_size=vocab_size,
        end_of_document=256,
        dtype="uint16" if vocab_size <= 2**16 else "uint32",
        settings=PrepareSettings(),
        input=summary,
        splits={"train": SplitEntry.of(entries)},
    )


def documents_of(source: SplitReader) -> list[list[int]]:
    """Every document of a split, read as a whole block and cut at its starts."""
    found = []
    for block, count in enumerate(source.block_tokens.tolist()):
        tokens = source.read(block, 0, count)
        found += [part.tolist() for part in np.split(tokens, source.document_starts(block)[1:])]
    return found


def some_documents(lengths: list[int], vocab_size: int = 257) -> list[np.ndarray]:
    random = np.random.default_rng(5)
    return [np.array([256, *random.integers(0, 256, n)], token_dtype(vocab_size)) for n in lengths]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=st.lists(st.one_of(st.integers(0, 80), st.integers(400, 4000)), min_size=1, max_size=9),
    block_bytes=st.integers(512, 2500),
    shard_bytes=st.integers(1, 9000),
    vocab_size=st.sampled_from([257, 70_000]),
)
def test_documents_of_any_size_come_back_from_their_shards(
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
    piece_count=st.integers(2, 9),
)
def test_the_bytes_of_a_shard_do_not_depend_on_how_its_documents_come_in_pieces(
    lengths: list[int], block_bytes: int, piece_count: int
) -> None:
    documents, written = some_documents(lengths), []
    for count in (1, piece_count):
        with tempfile.TemporaryDirectory() as directory:
            write_split(Path(directory), documents, block_bytes=block_bytes, piece_count=count)
            files = sorted(Path(directory).iterdir())
            written.append([(path.name, path.read_bytes()) for path in files])
    assert written[0] == written[1]


def test_the_tar_is_the_one_that_webdataset_writes(tmp_path: Path) -> None:
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
        write_split(tmp_path, some_documents([100, 4600]), piece_count=7)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_range_of_a_giant_document_is_that_range(data: st.DataObject, tmp_path: Path) -> None:
    (document,) = some_documents([6100])
    manifest = write_split(tmp_path, [document], block_bytes=1024)
    source = open_split(tmp_path, "train", manifest=manifest, cache_frames=1)
    start = data.draw(st.integers(0, len(document)))
    stop = data.draw(st.integers(start, len(document)))
    np.testing.assert_array_equal(source.read(0, start, stop), document[start:stop])


def test_a_range_decodes_only_the_frames_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = write_split(tmp_path, some_documents([6100]), block_bytes=1024)
    source = open_split(tmp_path, "train", manifest=manifest)
    decoded: list[int] = []
    read_frame = open_split.__globals__["read_frame"]

    def counted(directory, entry, frame, number):
        decoded.append(number)
        return read_frame(directory, entry, frame, number)

    monkeypatch.setattr("data_pipeline.shards.shard_reader.read_frame", counted)
    source.read(0, 3000, 3010)
    source.read(0, 3010, 3020)
    assert len(decoded) == 1


def test_what_read_returns_is_the_callers_to_change(tmp_path: Path) -> None:
    (document,) = some_documents([50])
    source = open_split(tmp_path, "train", manifest=write_split(tmp_path, [document]))
    source.read(0, 0, 51)[:] = 0
    np.testing.assert_array_equal(source.read(0, 0, 51), document)


def test_ranges_outside_a_block_are_refused(tmp_path: Path) -> None:
    source = open_split(tmp_path, "train", manifest=write_split(tmp_path, some_documents([50])))
    for block, start, stop in ((0, 0, 52), (0, -1, 3), (0, 5, 4), (1, 0, 1), (-1, 0, 1)):
        with pytest.raises(IndexError):
            source.read(block, start, stop)


def test_small_documents_share_a_block_and_none_is_torn(tmp_path: Path) -> None:
    lengths = [40, 170, 300, 10, 511, 2000, 7, 90]
    manifest = write_split(tmp_path, some_documents(lengths), shard_bytes=10**9)
    source = open_split(tmp_path, "train", manifest=manifest)
    blocks = [np.diff([*source.document_starts(b), n]) for b, n in enumerate(source.block_tokens)]
    assert [list(block) for block in blocks] == [[41, 171], [301, 11], [512], [2001], [8, 91]]


def test_frames_end_at_block_ends(tmp_path: Path) -> None:
    documents = some_documents([40, 170, 300, 10, 511, 2000, 7, 90])
    manifest = write_split(tmp_path, documents, shard_bytes=10**9)
    index = read_index(tmp_path, manifest.splits["train"].shards[0], itemsize=2)
    ends = set((index.frames[:, 2] + index.frames[:, 3]).tolist())
    # The next block's first token lies one tar header and one npy header behind the frame's end.
    assert {int(offset) - 512 - 128 for offset in index.block_offset[1:]} <= ends


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


def test_a_fresh_dataset_verifies_without_a_problem(dataset: tuple[Path, ShardManifest]) -> None:
    directory, manifest = dataset
    assert len(manifest.splits["train"].shards) == 3
    assert verify_dataset(directory).problems == []


def test_document_starts_are_where_the_end_of_document_opens_one(
    dataset: tuple[Path, ShardManifest],
) -> None:
    source = open_split(dataset[0], "train")
    for block, count in enumerate(source.block_tokens.tolist()):
        tokens = source.read(block, 0, count)
        np.testing.assert_array_equal(np.flatnonzero(tokens == 256), source.document_starts(block))
