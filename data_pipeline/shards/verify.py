"""`txl data verify`: compare every file of a dataset with the manifest and list all problems.

A file whose sha256 matches the manifest has the bytes that `txl prepare` wrote, so nothing inside
it is checked again. Damaged, missing and extra files are problems. Files that could not be read at
the moment (disk, network, permissions) are listed separately: they may be intact.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import DataError, ReadFailureError, printable
from data_pipeline.shards.manifest import (
    INDEX_SUFFIX,
    SHARD_SUFFIX,
    ShardEntry,
    ShardManifest,
    is_dataset_file,
    load_manifest,
    open_tokenizer,
)
from data_pipeline.shards.shard_files import what_to_check
from data_pipeline.system.files import sha256_file
from data_pipeline.system.progress import Progress
from data_pipeline.system.remote_path import DatasetPath
from data_pipeline.system.sources import is_read_failure
from data_pipeline.system.workers import InProcess, Workers


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of `verify_dataset`. The dataset is intact if both lists are empty."""

    manifest: ShardManifest
    problems: list[str]
    """Files that are damaged, missing or extra."""
    unread: list[str]
    """Files that could not be read at the moment."""
    num_bytes: int
    """Compressed bytes of all shards and indexes that the manifest lists."""


def verify_dataset(
    directory: DatasetPath,
    *,
    fast: bool = False,
    workers: Workers | None = None,
    progress: Progress = lambda *_: None,
) -> Verified:
    """Hash every file again; with `fast`, hash the indexes and compare only the shards' sizes.

    Raises DataError without a usable manifest, ReadFailureError if the manifest or the list of
    files could not be read at the moment.
    """
    try:
        manifest = load_manifest(directory)
        problems = _name_problems(directory, manifest)
    except (DataError, OSError) as error:
        if not is_read_failure(error):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise ReadFailureError(
            f"{directory} could not be read now: {reason.removesuffix('.')}. Check "
            f"{what_to_check(directory)}, then run this again: the data may be intact."
        ) from error
    unread: list[str] = []
    try:
        open_tokenizer(directory, manifest)
    except DataError as error:
        (unread if is_read_failure(error) else problems).append(str(error))
    # Absolute: Ray workers may have another working directory.
    local = directory.absolute() if isinstance(directory, Path) else directory
    checks = [_ShardCheck(local, shard, fast) for shard in manifest.shards]
    names = {sha256: name for name, (_, sha256) in manifest.shard_files.items()}
    for problem in _in_order(checks, workers or InProcess(), progress):
        if isinstance(problem, _Unread):
            unread.append(problem.message)
        else:
            problems.append(problem.explain(names) if isinstance(problem, _Mismatch) else problem)
    return Verified(manifest, problems, unread, sum(check.num_bytes for check in checks))


# --- shards and indexes -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _ShardCheck:
    """One shard and its index: the unit of work."""

    directory: DatasetPath
    entry: ShardEntry
    fast: bool

    def __str__(self) -> str:
        return self.entry.name

    @property
    def num_bytes(self) -> int:
        return self.entry.bytes + self.entry.index_bytes


@dataclass(frozen=True, slots=True)
class _Mismatch:
    """A file whose size or sha256 is not the manifest's."""

    name: str
    size: int
    sha256: str
    expected_size: int
    expected_sha256: str

    def explain(self, names: dict[str, str]) -> str:
        """The problem in words; `names` maps the sha256 of every listed file to its name."""
        if self.sha256 in names:
            problem = f"holds the content of {names[self.sha256]}: the two were swapped or renamed"
        elif self.size != self.expected_size:
            problem = (
                f"is {self.size:,} bytes, expected {self.expected_size:,}: cut short or overwritten"
            )
        else:
            problem = (
                f"has sha256 {self.sha256}, expected {self.expected_sha256}: damaged or overwritten"
            )
        return f"{self.name}: {problem}"


@dataclass(frozen=True, slots=True)
class _Unread:
    """A file that could not be read at the moment."""

    message: str


_Problem = str | _Mismatch | _Unread


def _in_order(
    checks: list[_ShardCheck], workers: Workers, progress: Progress
) -> Iterable[_Problem]:
    """The problems of all shards in the manifest's order; workers finish in any order."""
    done, total = 0, sum(check.num_bytes for check in checks)
    progress("verifying", done, total)
    problems: dict[int, list[_Problem]] = {}
    for number, shard_problems in workers.map(_check_shard, checks):
        problems[number] = shard_problems
        done += checks[number].num_bytes
        progress("verifying", done, total)
    return [problem for number in sorted(problems) for problem in problems[number]]


def _check_shard(check: _ShardCheck) -> list[_Problem]:
    problems = [
        _file_problem(
            check.directory / name, size, sha256, size_only=check.fast and name == check.entry.name
        )
        for name, (size, sha256) in check.entry.files.items()
    ]
    return [problem for problem in problems if problem]


def _file_problem(path: DatasetPath, size: int, sha256: str, *, size_only: bool) -> _Problem | None:
    try:
        if not path.is_file():
            return f"{path.name}: missing, or not a regular file"
        found_size = path.stat().st_size
        if size_only and found_size == size:
            return None
        # Hashed even if the size is wrong: the sha256 identifies a file with a wrong name.
        found_sha256 = sha256_file(path)
    except OSError as error:
        problem = f"{path.name}: cannot be read: {error.strerror}"
        return _Unread(problem) if is_read_failure(error) else problem
    if (found_size, found_sha256) == (size, sha256):
        return None
    return _Mismatch(path.name, found_size, found_sha256, size, sha256)


# --- names --------------------------------------------------------------------------------------


def _name_problems(directory: DatasetPath, manifest: ShardManifest) -> list[str]:
    """Files that the manifest does not list, if they are named like shards or are missing ones."""
    listed = {*manifest.file_names()}
    missing = {
        content: name
        for name, content in manifest.shard_files.items()
        if not (directory / name).is_file()
    }
    sizes = {size for size, _ in missing}
    problems = []
    for path in [directory / name for name in sorted(entry.name for entry in directory.iterdir())]:
        if path.name in listed or not path.is_file():
            continue
        size = path.stat().st_size
        # Hashed only if a missing file has this size: other files may be large.
        real_name = missing.get((size, sha256_file(path))) if size in sizes else None
        if real_name:
            problem = f"is {real_name} under another name; move it back"
        elif not path.name.endswith((SHARD_SUFFIX, INDEX_SUFFIX)):
            continue
        elif is_dataset_file(path.name):
            problem = "extra: not in the manifest; move it elsewhere"
        else:
            problem = "extra: not a file name that txl writes; move it elsewhere"
        problems.append(f"{printable(path.name)}: {problem}")
    return problems
