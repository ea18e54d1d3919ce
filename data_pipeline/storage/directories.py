"""Directories that appear and disappear in one step, by rename.

A reader never sees a directory that is half written or half removed under its own name. Directories
whose files are moved one by one into an existing directory are handled by `staged_directory.py`.
"""

import shutil
import uuid
from pathlib import Path

from data_pipeline.storage.atomic_files import fsync_directory


def publish_directory(staged: Path, final: Path) -> Path | None:
    """Rename a complete directory, whose files are synced, to its final name.

    An existing `final` is renamed to a hidden name first; returns that name, or None. The caller
    removes it: if that fails, `final` is valid nevertheless.
    """
    fsync_directory(staged)
    replaced = _hide(final) if final.exists() else None
    try:
        staged.rename(final)
    except OSError:  # `staged` is gone: a newer process removes what older ones write
        if replaced:
            replaced.rename(final)
        raise
    fsync_directory(final.parent)
    return replaced


def remove_directory(path: Path) -> None:
    """Remove a directory and its content. Raises OSError if anything of it remains.

    It is renamed to a hidden name `.*.tmp` first, so a kill never leaves half of it under `path`.
    """
    shutil.rmtree(_hide(path))


def _hide(path: Path) -> Path:
    stem = path.name.lstrip(".").partition(".")[0]  # of a hidden name, without its random part
    return path.rename(path.with_name(f".{stem}.{uuid.uuid4().hex[:8]}.tmp"))
