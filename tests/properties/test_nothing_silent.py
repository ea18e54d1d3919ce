"""Promise 6: a damaged, swapped or missing file is refused by name before it is used."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from safetensors.numpy import save as save_arrays

from data_pipeline.errors import DataError
from data_pipeline.shards.data_commands import verify_dataset
from data_pipeline.shards.manifest import ShardManifest, load_manifest, open_tokenizer
from data_pipeline.shards.shard_index import DocumentIds, pack_documents, unpack_documents
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.system.files import sha256_file
from tests.data_pipeline.conftest import corpus, dataset, txl  # noqa: F401 - fixtures
from tests.txl_dist.checkpoint.saving import save
from txl_dist.checkpoint.directory import CheckpointDirectory
from txl_dist.checkpoint.tensors import verify_checkpoint
from txl_dist.errors import CheckpointError
from txl_dist.runtime.world import World
from txl_dist.training.resume import newest_intact

Dataset = tuple[Path, ShardManifest]


def tokens_of(directory: Path) -> dict[str, list[int]]:
    """Every token of a dataset, read with all checks that training makes."""
    manifest = load_manifest(directory)
    open_tokenizer(directory, manifest)
    tokens = {}
    for name in manifest.splits:
        source = open_split(directory, name, manifest=manifest)
        blocks = [source.read(b, 0, n) for b, n in enumerate(source.block_tokens.tolist())]
        tokens[name] = np.concatenate(blocks).tolist()
    return tokens


def flipped(content: bytes, random_: random.Random) -> bytes:
    """The content with one bit flipped."""
    damaged = bytearray(content)
    damaged[random_.randrange(len(content))] ^= 1 << random_.randrange(8)
    return bytes(damaged)


@pytest.mark.fault_row(14)
@pytest.mark.parametrize(
    ("name", "flips"),
    [
        ("train-000000.tar.zst", 300),
        ("train-000001.index.safetensors", 100),
        ("manifest.json", 200),
        ("tokenizer.json", 40),
    ],
)
def test_a_flipped_bit_is_refused_or_changes_no_token(
    dataset: Dataset, name: str, flips: int
) -> None:
    directory, _ = dataset
    expected, intact = tokens_of(directory), (directory / name).read_bytes()
    random_ = random.Random(7)
    refusals = []
    for _ in range(flips):
        (directory / name).write_bytes(flipped(intact, random_))
        try:
            assert tokens_of(directory) == expected
        except DataError as error:
            refusals.append(str(error))
    assert all(name in refusal for refusal in refusals)
    # Other bits are in the manifest's whitespace or the seek table: they change no token.
    assert len(refusals) > 0.75 * flips


@pytest.mark.fault_row(13)
@pytest.mark.parametrize("name", ["train-000001.tar.zst", "train-000001.index.safetensors"])
def test_every_truncation_is_refused_with_both_sizes(dataset: Dataset, name: str) -> None:
    directory, _ = dataset
    intact = (directory / name).read_bytes()
    for length in (0, 1, 512, len(intact) // 2, len(intact) - 1):
        (directory / name).write_bytes(intact[:length])
        with pytest.raises(
            DataError, match=f"{name} is {length:,} bytes, expected {len(intact):,}"
        ):
            open_split(directory, "train")


@pytest.mark.fault_row(17)
def test_a_shard_overwritten_while_open_is_refused_at_the_next_frame(dataset: Dataset) -> None:
    directory, _ = dataset
    source = open_split(directory, "train", cache_frames=1)
    source.read(0, 0, 5)
    path = directory / "train-000000.tar.zst"
    size = path.stat().st_size
    path.write_bytes(bytes(size))
    with pytest.raises(DataError, match=r"train-000000\.tar\.zst frame \d+ at byte [\d,]+ is dam"):
        source.read(3, 0, 5)


@pytest.mark.fault_row(15)
def test_swapped_shards_are_refused_and_listed(dataset: Dataset) -> None:
    directory, _ = dataset
    first, second = directory / "train-000000.tar.zst", directory / "train-000001.tar.zst"
    swap(first, second)
    with pytest.raises(DataError, match="swapped"):
        tokens_of(directory)
    problems = verify_dataset(directory).problems
    assert [problem.split(":")[0] for problem in problems] == [first.name, second.name]
    assert all("swapped" in problem for problem in problems)


def swap(first: Path, second: Path) -> None:
    spare = first.with_suffix(".spare")
    first.rename(spare)
    second.rename(first)
    spare.rename(second)


def test_a_shard_of_another_corpus_of_the_same_size_is_refused(
    txl: Callable[..., Any], tmp_path: Path
) -> None:
    for name, text in (("one", "aaaaaaaaaaaa"), ("two", "bbbbbbbbbbbb")):
        (tmp_path / f"{name}.txt").write_text(text)
        assert txl("prepare", tmp_path / f"{name}.txt", "--out", tmp_path / name).code == 0
    shard = "train-000000.tar.zst"
    assert (tmp_path / "one" / shard).stat().st_size == (tmp_path / "two" / shard).stat().st_size
    shutil.copy(tmp_path / "two" / shard, tmp_path / "one" / shard)
    with pytest.raises(DataError, match="checksum"):
        tokens_of(tmp_path / "one")


def sign(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and its digest, as an attacker could."""
    content = load_manifest(directory).model_dump(mode="json")
    change(content)
    unchecked = ShardManifest.model_construct(**content)
    (directory / "manifest.json").write_bytes(unchecked.to_bytes())


def rewrite_index(directory: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Change the index of the first train shard, and its size and sha256 in the manifest."""
    path = directory / "train-000000.index.safetensors"
    arrays = load_file(path)
    change(arrays)
    path.write_bytes(save_arrays(arrays))

    def list_index(content: dict[str, Any]) -> None:
        entry = content["splits"]["train"]["shards"][0]
        entry["index_bytes"] = path.stat().st_size
        entry["index_sha256"] = sha256_file(path)

    sign(directory, list_index)


@pytest.mark.parametrize(("document", "start"), [(0, 9), (1, 10**7), (1, -3)])
@pytest.mark.filterwarnings("ignore:Pydantic serializer")
def test_document_starts_outside_the_block_are_refused_despite_a_valid_sha256(
    dataset: Dataset, document: int, start: int
) -> None:
    def change(arrays: dict[str, np.ndarray]) -> None:
        count = int(arrays["block_documents"].sum())
        starts, table = unpack_documents(arrays["documents"].tobytes(), num_documents=count)
        ids = [table.id_of(n) for n in range(count)]
        starts[document] = start
        arrays["documents"] = np.frombuffer(pack_documents(starts, [DocumentIds.of(ids)]), np.uint8)

    rewrite_index(dataset[0], change)
    with pytest.raises(DataError, match=r"contradicts the manifest or itself: document starts"):
        open_split(dataset[0], "train").document_starts(0)


@pytest.mark.parametrize(
    ("array", "place", "value"),
    [
        ("frames", (0, 3), 2**40),
        ("frames", (1, 1), 2**62),
        ("frames", (1, 0), -5),
        ("block_offset", (0,), 2**62),
        ("block_offset", (2,), -640),
        ("block_tokens", (0,), 2**62),
        ("block_documents", (0,), 2**62),
        ("documents", (0,), 9),
    ],
)
@pytest.mark.filterwarnings("ignore:Pydantic serializer")
def test_an_index_that_contradicts_itself_is_refused_despite_a_valid_sha256(
    dataset: Dataset, array: str, place: tuple[int, ...], value: int
) -> None:
    def change(arrays: dict[str, np.ndarray]) -> None:
        arrays[array] = arrays[array].copy()
        arrays[array][place] = value

    rewrite_index(dataset[0], change)
    with pytest.raises(DataError, match=r"train-000000\.index\.safetensors contradicts"):
        open_split(dataset[0], "train").read(0, 0, 1)


@pytest.mark.fault_row(18)
def test_a_fifo_in_place_of_a_shard_is_refused_without_blocking(dataset: Dataset) -> None:
    path = dataset[0] / "train-000000.tar.zst"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="not a regular file"):
        open_split(dataset[0], "train")
    (problem,) = verify_dataset(dataset[0]).problems
    assert problem == "train-000000.tar.zst: missing, or not a regular file"


@pytest.mark.fault_row(24)
def test_every_flipped_bit_is_noticed_before_use(tmp_path: Path) -> None:
    directory = save(tmp_path, step=3)
    files = sorted(directory.iterdir())
    draw = random.Random(5)
    for _ in range(150):
        path = draw.choice(files)
        original = path.read_bytes()
        path.write_bytes(flipped(original, draw))
        with pytest.raises(CheckpointError, match=path.name):
            verify_checkpoint(directory)
        path.write_bytes(original)
    verify_checkpoint(directory)


@pytest.mark.fault_row(24)
@pytest.mark.parametrize("kind", ["manifest.json", "weights", "optimizer", "memory", "tokenizer"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut"])
def test_every_missing_or_shortened_file_is_named_and_the_previous_checkpoint_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, damage: str
) -> None:
    save(tmp_path, step=2)
    directory = save(tmp_path, step=3)
    (path,) = [path for path in directory.iterdir() if path.name.startswith(kind)]
    if damage == "missing":
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes(b"" if damage == "empty" else content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=path.name):
        verify_checkpoint(directory)
    assert resumed_step(tmp_path) == 2
    assert path.name in caplog.text


def resumed_step(run: Path) -> int:
    """Step of the checkpoint that a run would resume from."""
    point, _ = newest_intact(CheckpointDirectory(run), World(0, 1))
    assert point is not None
    return point.state.step


@pytest.mark.fault_row(24)
@pytest.mark.parametrize("kind", ["weights", "optimizer", "memory", "manifest.json"])
def test_a_file_swapped_between_two_checkpoints_is_refused_by_name_in_both(
    tmp_path: Path, kind: str
) -> None:
    save(tmp_path, step=1)
    first, second = save(tmp_path, step=2), save(tmp_path, step=3)
    (name,) = [path.name for path in first.iterdir() if path.name.startswith(kind)]
    if kind != "manifest.json":
        assert (first / name).stat().st_size == (second / name).stat().st_size
    swap(first / name, second / name)
    for directory in (first, second):
        with pytest.raises(CheckpointError, match=name):
            verify_checkpoint(directory)
    assert resumed_step(tmp_path) == 1
