"""Directories that are published and removed by rename."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.storage import directories
from data_pipeline.storage.directories import publish_directory, remove_directory


def directory_with(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "file").write_text(text)
    return path


def test_publishing_replaces_a_directory_and_returns_its_hidden_name(tmp_path: Path) -> None:
    final = tmp_path / "final"
    assert publish_directory(directory_with(tmp_path / ".new.tmp", "first"), final) is None
    replaced = publish_directory(directory_with(tmp_path / ".new.tmp", "second"), final)
    assert (final / "file").read_text() == "second"
    assert replaced is not None
    assert replaced.name.startswith(".final.")
    assert replaced.name.endswith(".tmp")
    remove_directory(replaced)
    assert list(tmp_path.iterdir()) == [final]


def test_a_directory_without_replacement_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process removes the new one at the last moment."""
    final = directory_with(tmp_path / "final", "first")
    staged = directory_with(tmp_path / ".new.tmp", "second")
    monkeypatch.setattr(directories, "fsync_directory", shutil.rmtree)
    with pytest.raises(FileNotFoundError):
        publish_directory(staged, final)
    assert (final / "file").read_text() == "first"
    assert list(tmp_path.iterdir()) == [final]


def test_a_removal_that_fails_leaves_only_a_hidden_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(path: Path, *_: Any) -> None:
        raise OSError(16, "Device or resource busy", str(path))

    path = directory_with(tmp_path / "final", "text")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        with pytest.raises(OSError, match="busy"):
            remove_directory(path)
        (hidden,) = tmp_path.iterdir()
        with pytest.raises(OSError, match="busy"):
            remove_directory(hidden)
    (hidden,) = tmp_path.iterdir()
    assert hidden.name.count(".") == 3, "the name does not grow with each attempt"
    remove_directory(hidden)
    assert not list(tmp_path.iterdir())
