"""Datasets at URLs are read like local ones, by byte range; errors name the cause.

All servers listen on 127.0.0.1: moto's S3, and the standard library's HTTP with byte ranges.
"""

import errno
import itertools
import json
import pickle
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from moto.server import ThreadedMotoServer

from data_pipeline.errors import ConfigError, DataError, ReadFailureError
from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards import data_commands
from data_pipeline.shards.data_commands import push_dataset, verify_dataset
from data_pipeline.shards.manifest import (
    PrepareSettings,
    ShardManifest,
    load_manifest,
    open_tokenizer,
)
from data_pipeline.shards.shard_reader import TokenSource, open_split
from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.segment_stream import SegmentStream
from data_pipeline.system import sources
from data_pipeline.system.remote_path import RemotePath, dataset_path
from tests.data_pipeline.conftest import WebFiles
from tests.data_pipeline.shards.written_split import read_index

Dataset = tuple[Path, ShardManifest]

URL = "s3://bucket/data"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate cache per test, and short waits between retries."""
    monkeypatch.setenv("TXL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "_FIRST_WAIT_SECONDS", 0.01)
    return tmp_path / "cache"


def segments_of(source: TokenSource, num_segments: int = 40) -> list[np.ndarray]:
    """The segments that two lanes of a training run read: inputs, targets and ages."""
    plan = LanePlan(num_tokens=int(source.block_tokens.sum()), num_lanes=2, tgt_len=50)
    with SegmentStream(source, plan, lanes=range(2)) as stream:
        read = list(itertools.islice(stream, num_segments))
    return [np.stack([part.input, part.target, part.age]) for part in read]


def test_a_pushed_dataset_trains_as_the_local_one(
    dataset: Dataset, bucket: Any, txl: Callable[..., Any], cache: Path
) -> None:
    directory, manifest = dataset
    ended = txl("data", "push", directory, URL)
    assert ended.code == 0, ended.err
    assert load_manifest(URL) == manifest
    assert open_tokenizer(URL, manifest).digest == manifest.tokenizer_digest
    for split in manifest.splits:
        here, there = open_split(directory, split), open_split(URL, split)
        np.testing.assert_array_equal(segments_of(there), segments_of(here))
    assert len(list(cache.iterdir())) > 5
    for command in ("verify", "inspect"):
        local, remote = txl("data", command, directory), txl("data", command, URL)
        assert local.code == remote.code == 0, remote.err
        assert remote.out.replace(URL, str(directory)) == local.out


def test_verify_lists_what_is_wrong_behind_a_url(dataset: Dataset, bucket: Any) -> None:
    push_dataset(dataset[0], URL)
    bucket.rm("bucket/data/train-000000.tar.zst")
    bucket.pipe("bucket/data/train-000001.index.safetensors", b"x")
    bucket.pipe("bucket/data/valid-000003.tar.zst", b"x")
    assert [problem.split(":")[0] for problem in verify_dataset(dataset_path(URL)).problems] == [
        "valid-000003.tar.zst",
        "train-000000.tar.zst",
        "train-000001.index.safetensors",
    ]


def test_push_completes_what_is_missing_and_overwrites_no_other_dataset(
    dataset: Dataset, bucket: Any, corpus: Path, tmp_path: Path
) -> None:
    directory, _ = dataset
    push_dataset(directory, URL)
    bucket.rm("bucket/data/train-000001.tar.zst")
    push_dataset(directory, URL)
    assert verify_dataset(dataset_path(URL)).problems == []

    prepare_dataset([corpus], tmp_path / "other", PrepareSettings())
    before = {name: bucket.cat(name) for name in bucket.find("bucket")}
    with pytest.raises(DataError, match="s3://bucket/data holds another dataset"):
        push_dataset(tmp_path / "other", URL)
    bucket.rm("bucket/data/manifest.json")
    with pytest.raises(DataError, match=r"another dataset: train-000001"):
        push_dataset(tmp_path / "other", URL)
    del before["bucket/data/manifest.json"]
    assert {name: bucket.cat(name) for name in bucket.find("bucket")} == before


def test_push_sends_no_damaged_dataset(dataset: Dataset, bucket: Any) -> None:
    directory, _ = dataset
    path = directory / "train-000001.tar.zst"
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(DataError, match=r"train-000001\.tar\.zst: has sha256 .* Nothing was sent"):
        push_dataset(directory, URL)
    assert not bucket.exists("bucket/data/manifest.json")
    with pytest.raises(ConfigError, match="give a URL of scheme s3 or gs"):
        push_dataset(directory, "https://host/data")


def test_push_does_not_blame_the_store_for_a_failing_local_disk(
    dataset: Dataset, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> str:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(data_commands, "sha256_file", fail)
    with pytest.raises(ReadFailureError, match=r"Input/output error\. Nothing was sent"):
        push_dataset(dataset[0], URL)


def test_a_missing_bucket_and_refused_credentials_are_named(
    dataset: Dataset, bucket: Any, s3_server: ThreadedMotoServer
) -> None:
    with pytest.raises(DataError, match=r"s3://nowhere/data/manifest\.json: there is no such dir"):
        load_manifest("s3://nowhere/data")
    with pytest.raises(DataError, match=r"s3://nowhere/data.*object storage refuses"):
        push_dataset(dataset[0], "s3://nowhere/data")
    push_dataset(dataset[0], URL)
    host, port = s3_server.get_host_and_port()
    for number in (b"0", b"inf"):  # requests that moto answers without asking who it is
        change = urllib.request.Request(
            f"http://{host}:{port}/moto-api/reset-auth",
            data=number,
            headers={"Content-Type": "text/plain"},
        )
        urllib.request.urlopen(change).close()
        if number == b"0":
            with pytest.raises(DataError, match=r"manifest\.json cannot be read: access denied"):
                load_manifest(URL)
    assert load_manifest(URL) == dataset[1]


# --- byte ranges, over HTTP ---------------------------------------------------------------------


def test_only_the_needed_frames_are_fetched_and_only_once(
    tmp_path: Path, web: tuple[str, type[WebFiles]]
) -> None:
    url, handler = web
    (tmp_path / "giant.txt").write_text("giant " * 4000)
    settings = PrepareSettings(block_bytes=3000)
    manifest = prepare_dataset([tmp_path / "giant.txt"], tmp_path / "data", settings).manifest
    (shard,) = manifest.splits["train"].shards
    frames = read_index(tmp_path / "data", shard).frames
    assert len(frames) > 10

    source = open_split(f"{url}/data", "train", cache_frames=64)
    assert not any(name == shard.name for name, _, _ in handler.sent)
    handler.sent.clear()
    expected = open_split(tmp_path / "data", "train").read(0, 6000, 12000)
    np.testing.assert_array_equal(source.read(0, 6000, 12000), expected)
    of_shard = [(first, size) for name, first, size in handler.sent if name == shard.name]
    needed = (frames[:, 2] + frames[:, 3] > 12000) & (frames[:, 2] < 24000 + 700)
    assert 1 < len(of_shard) <= needed.sum()
    assert {*of_shard} <= {(first, size) for first, size in frames[needed, :2].tolist()}

    # A second reader finds them on this machine's disk; what lies on both sides is fetched.
    handler.sent.clear()
    again = open_split(f"{url}/data", "train")
    np.testing.assert_array_equal(again.read(0, 6000, 12000), expected)
    assert not any(name in shard.files for name, _, _ in handler.sent)
    again.read(0, 0, 18000)
    others = [(first, size) for name, first, size in handler.sent if name == shard.name]
    assert others
    assert not {*others} & {*of_shard}


def test_a_request_on_a_broken_connection_is_retried(
    dataset: Dataset, web: tuple[str, type[WebFiles]]
) -> None:
    url, handler = web
    source = open_split(f"{url}/data", "train")
    source.document_starts(0)
    handler.broken = 2
    expected = open_split(dataset[0], "train").read(0, 0, 9)
    np.testing.assert_array_equal(source.read(0, 0, 9), expected)
    handler.broken = 1000
    with pytest.raises(DataError, match=r"http://127.*/data/train-.* cannot be read \(3 attempts"):
        source.read(len(source.block_tokens) - 1, 0, 9)


@pytest.mark.parametrize("broken", ["every answer", "the shards", "the tokenizer", "ranges"])
def test_verify_does_not_report_data_as_damaged_when_answers_are_cut(
    dataset: Dataset, web: tuple[str, type[WebFiles]], txl: Callable[..., Any], broken: str
) -> None:
    url, handler = web
    handler.broken = 10**6
    handler.breaks = staticmethod(
        {
            "every answer": lambda name, is_range: True,
            "the shards": lambda name, is_range: name.endswith(".tar.zst"),
            "the tokenizer": lambda name, is_range: name == "tokenizer.json",
            "ranges": lambda name, is_range: is_range and name.endswith(".tar.zst"),
        }[broken]
    )
    handler.honest = broken == "ranges"  # a proxy that declares what it has cut to be all
    ended = txl("data", "verify", f"{url}/data")
    assert ended.code == 1, ended.err
    assert "could not be read now" in ended.err
    assert "run this again" in ended.err
    for word in ("damaged,", "Restore", "remove", "txl prepare", "Do not train"):
        assert word not in ended.err
    if broken != "every answer":
        result = json.loads(txl("data", "verify", f"{url}/data", "--json").out)
        assert (result["ok"], result["problems"]) == (False, [])
        assert len(result["unread"]) == (1 if broken == "the tokenizer" else 4)


def test_verify_separates_damage_from_failed_reads(
    dataset: Dataset, web: tuple[str, type[WebFiles]], txl: Callable[..., Any]
) -> None:
    url, handler = web
    path = dataset[0] / "train-000001.tar.zst"
    path.write_bytes(bytes(path.stat().st_size))
    handler.broken = 10**6
    handler.breaks = staticmethod(lambda name, is_range: name == "train-000000.tar.zst")
    ended = txl("data", "verify", f"{url}/data", "--json")
    assert ended.code == 3
    result = json.loads(ended.out)
    assert [problem.split(":")[0] for problem in result["problems"]] == [path.name]
    assert [problem.split(":")[0] for problem in result["unread"]] == ["train-000000.tar.zst"]
    assert "1 problem:\n  train-000001.tar.zst" in ended.err
    assert "1 could not be read now:\n  train-000000.tar.zst" in ended.err
    assert "txl data push" in ended.err
    assert "remove http" not in ended.err


def test_a_server_without_ranges_is_refused_by_name(
    dataset: Dataset, web: tuple[str, type[WebFiles]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, handler = web
    monkeypatch.setattr(handler, "ranges", False)
    with pytest.raises(DataError, match="ignores byte ranges"):
        open_split(f"{url}/data", "train").read(0, 0, 9)


@pytest.mark.fault_row(22)
def test_credentials_in_a_url_reach_no_message(web: tuple[str, type[WebFiles]]) -> None:
    host = web[0].partition("://")[2]
    path = dataset_path(f"http://me:secret@{host}/nothing?token=secret")
    assert "secret" not in f"{path} {path!r} {path / 'x'} {path.parent}"
    assert isinstance(path, RemotePath)
    assert (path / "x").url == f"http://me:secret@{host}/nothing/x?token=secret"
    assert pickle.loads(pickle.dumps(path)) == path
    with pytest.raises(DataError, match=r"nothing/manifest\.json") as caught:
        load_manifest(path)
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="scheme 'pipe'"):
        dataset_path("pipe://cat")


# --- the cache -----------------------------------------------------------------------------------


@pytest.mark.fault_row(17)
def test_a_changed_source_is_never_served(
    dataset: Dataset, bucket: Any, corpus: Path, tmp_path: Path
) -> None:
    push_dataset(dataset[0], URL)
    segments_of(open_split(URL, "train"))
    for path in corpus.rglob("*.txt"):
        path.write_text(path.read_text("utf-8").swapcase(), "utf-8")
    settings = dataset[1].settings
    other = prepare_dataset([corpus], tmp_path / "other", settings).manifest
    bucket.rm("bucket/data", recursive=True)
    push_dataset(tmp_path / "other", URL)
    assert other.digest != dataset[1].digest
    expected = segments_of(open_split(tmp_path / "other", "train"))
    np.testing.assert_array_equal(segments_of(open_split(URL, "train")), expected)


def test_local_paths_and_file_urls_use_no_cache(dataset: Dataset, cache: Path) -> None:
    directory, _ = dataset
    np.testing.assert_array_equal(
        segments_of(open_split(f"file://{directory}", "train")),
        segments_of(open_split(directory, "train")),
    )
    assert not cache.exists()
