"""`txl data verify`: every problem is listed, also with workers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.shards.data_commands import verify_dataset
from data_pipeline.shards.manifest import ShardManifest
from data_pipeline.system.workers import ProcessWorkers

Dataset = tuple[Path, ShardManifest]
Txl = Callable[..., Any]


@pytest.mark.fault_row(14, 15)
def test_verify_lists_every_problem(dataset: Dataset, txl: Callable[..., Any]) -> None:
    directory, _ = dataset
    (directory / "train-000000.tar.zst").unlink()
    (directory / "train-000001.tar.zst").rename(directory / "spare.tar.zst")
    shutil.copy(directory / "valid-000000.tar.zst", directory / "valid-000007.tar.zst")
    with (directory / "train-000002.index.safetensors").open("ab") as file:
        file.write(b"!")
    flip(directory / "valid-000000.tar.zst", 99)
    (directory / "tokenizer.json").write_text("{}")

    ended = txl("data", "verify", directory)
    assert ended.code == 3
    for problem in (
        "train-000000.tar.zst: missing",
        "spare.tar.zst: extra",
        "train-000001.tar.zst: missing",
        "valid-000007.tar.zst: extra",
        "train-000002.index.safetensors: is",
        "valid-000000.tar.zst: has sha256",
        "tokenizer.json is not a tokenizer",
        "txl prepare",
    ):
        assert problem in ended.err
    listed = json.loads(txl("data", "verify", directory, "--json").out)
    assert listed["ok"] is False
    assert len(listed["problems"]) == 7  # the renamed shard is also missing under its name


def flip(path: Path, byte: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


def test_workers_list_the_same_problems_in_the_same_order(dataset: Dataset) -> None:
    directory, _ = dataset
    (directory / "valid-000000.tar.zst").unlink()
    for name in ("train-000000.tar.zst", "train-000002.index.safetensors"):
        flip(directory / name, 99)
    alone = verify_dataset(directory).problems
    assert len(alone) == 3
    with ProcessWorkers(2) as workers:
        assert verify_dataset(directory, workers=workers).problems == alone
