"""Every argument and option for a local path refuses a URL, and creates no directory `s3:`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.data_pipeline.conftest import txl  # noqa: F401 - a fixture

URL = "s3://bucket/x"
WORDS = {
    "prepare-out": ("prepare", "in.txt", "--out", URL),
    "prepare-tokenizer": ("prepare", "in.txt", "--out", "o", "--tokenizer", URL),
    "push": ("data", "push", URL, "s3://bucket/y"),
    "train": ("train", URL),
    "train-directory": ("train", "run.yaml", f"directory={URL}", "--dry-run"),
    "train-resume": ("train", "run.yaml", "--resume", URL),
    "validate": ("config", "validate", "run.yaml", f"directory={URL}"),
    "eval": ("eval", URL, "data"),
    "attention-out": ("attention", "run", "data", "--out", URL),
    "generate": ("generate", URL),
    "list": ("checkpoint", "list", URL),
    "import": ("import", URL, "--out", "o"),
    "import-out": ("import", "model", "--out", URL),
    "export": ("export", URL, "--out", "o"),
}


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
@pytest.mark.parametrize("scheme", ["s3", "hdfs", "file"])
def test_a_url_is_refused_where_a_local_path_is_expected(
    txl: Callable[..., Any],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    scheme: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("text")
    Path("run.yaml").write_text("directory: run\ndata: {path: data}\ntraining: {num_steps: 1}\n")
    before = sorted(tmp_path.rglob("*"))
    ended = txl(*(word.replace(URL, f"{scheme}://bucket/x") for word in words))
    assert ended.code == 2, ended.err
    assert f"{scheme}://bucket/x" in ended.err
    assert "not a URL" in ended.err.replace("\n", " ")
    assert sorted(tmp_path.rglob("*")) == before


def test_prepare_names_the_command_that_uploads_a_dataset(
    txl: Callable[..., Any],  # noqa: F811
    tmp_path: Path,
) -> None:
    ended = txl("prepare", tmp_path, "--out", "s3://me:secret@bucket/x")
    assert "txl data push DIR s3://bucket/x" in ended.err
    assert "secret" not in ended.err


def test_the_cache_directory_cannot_be_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    from data_pipeline.errors import ConfigError
    from data_pipeline.shards.shard_files import FrameCache

    monkeypatch.setenv("TXL_CACHE_DIR", URL)
    with pytest.raises(ConfigError, match="TXL_CACHE_DIR=s3://bucket/x must be a local directory"):
        FrameCache.of_user()
