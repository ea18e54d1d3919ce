"""A damaged, swapped, missing or hostile file is refused by name; no wrong token gets out."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from data_pipeline.errors import DataError
from data_pipeline.shards.document_table import pack_documents, unpack_documents
from data_pipeline.shards.manifest import ShardManifest, load_manifest, open_tokenizer
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.shards.verify import verify_dataset

Dataset = tuple[Path, ShardManifest]


def tokens_of(directory: Path) -> dict[str, list[int]]:
    """Every token of a dataset, through all that stands between a file and training."""
    manifest = load_manifest(directory)
    open_tokenizer(directory, manifest)
    found = {}
    for name in manifest.splits:
        source = open_split(directory, name, manifest=manifest)
        blocks = [source.read(b, 0, n) for b, n in enumerate(source.block_tokens.tolist())]
        found[name] = np.concatenate(blocks).tolist()
    return found


@pytest.mark.parametrize(
    ("name", "flips"),
    [
        ("train-000000.tar.zst", 300),
        ("train-000001.index.safetensors", 100),
        ("manifest.json", 200),
        ("tokenizer.json", 40),
    ],
)
def test_no_flipped_bit_changes_a_token_unnoticed(dataset: Dataset, name: str, flips: int) -> None:
    directory, _ = dataset
    expected, sound = tokens_of(directory), (directory / name).read_bytes()
    random_ = random.Random(7)
    refusals = []
    for _ in range(flips):
        damaged = bytearray(sound)
        damaged[random_.randrange(len(sound))] ^= 1 << random_.randrange(8)
        (directory / name).write_bytes(damaged)
        try:
            assert tokens_of(directory) == expected
        except DataError as error:
            refusals.append(str(error))
    assert all(name in refusal for refusal in refusals)
    # The rest fell on the manifest's blanks or the seek table: no token changed.
    assert len(refusals) > 0.75 * flips


def test_verify_notices_every_flipped_bit_of_a_shard(dataset: Dataset) -> None:
    directory, _ = dataset
    path = directory / "valid-000000.tar.zst"
    sound = path.read_bytes()
    random_ = random.Random(8)
    for _ in range(40):
        damaged = bytearray(sound)
        damaged[random_.randrange(len(sound))] ^= 1 << random_.randrange(8)
        path.write_bytes(damaged)
        assert [problem[: len(path.name)] for problem in verify_dataset(directory).problems] == [
            path.name
        ]


@pytest.mark.parametrize("name", ["train-000001.tar.zst", "train-000001.index.safetensors"])
def test_every_truncation_is_refused_with_both_sizes(dataset: Dataset, name: str) -> None:
    directory, _ = dataset
    sound = (directory / name).read_bytes()
    for length in (0, 1, 512, len(sound) // 2, len(sound) - 1):
        (directory / name).write_bytes(sound[:length])
        with pytest.raises(DataError, match=f"{name} is {length:,} bytes, expected {len(sound):,}"):
            open_split(directory, "train")


def test_a_shard_overwritten_while_open_is_refused_at_the_next_frame(dataset: Dataset) -> None:
    directory, _ = dataset
    source = open_split(directory, "train", cache_frames=1)
    source.read(0, 0, 5)
    path = directory / "train-000000.tar.zst"
    size = path.stat().st_size
    path.write_bytes(bytes(size))
    with pytest.raises(DataError, match=r"train-000000\.tar\.zst frame \d+ at byte [\d,]+ is dam"):
        source.read(3, 0, 5)


def test_swapped_shards_are_refused_and_listed(dataset: Dataset) -> None:
    directory, _ = dataset
    first, second = directory / "train-000000.tar.zst", directory / "train-000001.tar.zst"
    swap(first, second)
    with pytest.raises(DataError, match="swapped"):
        tokens_of(directory)
    problems = verify_dataset(directory).problems
    assert any("train-000000.tar.zst: holds the content of train-000001" in p for p in problems)
    assert any("train-000001.tar.zst: holds the content of train-000000" in p for p in problems)


def swap(first: Path, second: Path) -> None:
    aside = first.with_suffix(".aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


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


def test_verify_lists_every_problem_at_once(dataset: Dataset, txl: Callable[..., Any]) -> None:
    directory, _ = dataset
    (directory / "train-000000.tar.zst").unlink()
    (directory / "train-000001.tar.zst").rename(directory / "spare.tar.zst")
    shutil.copy(directory / "valid-000000.tar.zst", directory / "valid-000007.tar.zst")
    with (directory / "train-000002.index.safetensors").open("ab") as file:
        file.write(b"!")
    (directory / "tokenizer.json").write_text("{}")

    ended = txl("data", "verify", directory)
    assert ended.code == 3
    for problem in (
        "train-000000.tar.zst: missing",
        "spare.tar.zst: is train-000001.tar.zst under another name",
        "valid-000007.tar.zst: extra",
        "train-000002.index.safetensors: is",
        "tokenizer.json is not a tokenizer",
        "txl prepare",
    ):
        assert problem in ended.err
    listed = json.loads(txl("data", "verify", directory, "--json").out)
    assert listed["ok"] is False
    assert len(listed["problems"]) == 6  # the renamed shard is also missing under its name


def sign(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest as someone would who also knows how to renew its digest."""
    content = load_manifest(directory).model_dump(mode="json")
    change(content)
    unchecked = ShardManifest.model_construct(**content)
    (directory / "manifest.json").write_bytes(unchecked.to_bytes())


@pytest.mark.parametrize(
    "name",
    ["../secret.tar.zst", "/etc/passwd", "train-000001.tar.zst", "train-000000.tar", "pipe:cat x"],
)
@pytest.mark.filterwarnings("ignore:Pydantic serializer")
def test_a_manifest_that_names_another_file_is_refused(dataset: Dataset, name: str) -> None:
    def rename(content: dict[str, Any]) -> None:
        content["splits"]["train"]["shards"][0]["name"] = name

    sign(dataset[0], rename)
    with pytest.raises(DataError, match=r"manifest\.json: .* must be 'train-000000"):
        load_manifest(dataset[0])


def rewrite_index(directory: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Replace the index of the first train shard and make the manifest vouch for it."""
    import hashlib

    path = directory / "train-000000.index.safetensors"
    arrays = load_file(path)
    change(arrays)
    path.write_bytes(save(arrays))

    def vouch(content: dict[str, Any]) -> None:
        entry = content["splits"]["train"]["shards"][0]
        entry["index_bytes"] = path.stat().st_size
        entry["index_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()

    sign(directory, vouch)


@pytest.mark.parametrize(("document", "start"), [(0, 9), (1, 10**7), (1, -3)])
@pytest.mark.filterwarnings("ignore:Pydantic serializer")
def test_documents_that_start_outside_their_block_are_refused_even_if_vouched_for(
    dataset: Dataset, document: int, start: int
) -> None:
    def change(arrays: dict[str, np.ndarray]) -> None:
        count = int(arrays["block_documents"].sum())
        table = unpack_documents(arrays["documents"].tobytes(), num_documents=count)
        starts, ids = table.starts.copy(), [table.document_id(n) for n in range(count)]
        starts[document] = start
        arrays["documents"] = np.frombuffer(pack_documents(starts, ids), np.uint8)

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
def test_an_index_that_contradicts_itself_is_refused_even_if_vouched_for(
    dataset: Dataset, array: str, place: tuple[int, ...], value: int
) -> None:
    def change(arrays: dict[str, np.ndarray]) -> None:
        arrays[array] = arrays[array].copy()
        arrays[array][place] = value

    rewrite_index(dataset[0], change)
    with pytest.raises(DataError, match=r"train-000000\.index\.safetensors contradicts"):
        open_split(dataset[0], "train").read(0, 0, 1)


@pytest.mark.filterwarnings("ignore:Pydantic serializer")
def test_verify_notices_an_index_that_points_at_other_tokens(dataset: Dataset) -> None:
    def change(arrays: dict[str, np.ndarray]) -> None:
        arrays["block_offset"] = arrays["block_offset"] + 2

    rewrite_index(dataset[0], change)
    assert any(
        "not where the index says" in problem for problem in verify_dataset(dataset[0]).problems
    )


def test_a_fifo_in_the_place_of_a_shard_is_refused_without_waiting(dataset: Dataset) -> None:
    import os

    path = dataset[0] / "train-000000.tar.zst"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="not a regular file"):
        open_split(dataset[0], "train")
