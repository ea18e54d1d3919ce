"""The package of a job: the code and configs that are sent to the cluster, as one zip file.

    files of the working directory, without what is excluded
    + the packages of this project, as this process imports them, with their entry points

So the cluster runs the code that submitted the job, whether or not it has this project installed.
Equal content gives equal bytes, and Ray uploads a package only once. Excluded are DEFAULT_EXCLUDES,
the patterns of .gitignore and .rayignore files, and paths that the caller names, such as the run
directory. A link that leads out of the working directory is excluded too.

Ray would pack a directory itself, but it does not tell the size or the content before the upload.
"""

import os
import zipfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

from pathspec import GitIgnoreSpec

from txl_dist.errors import ConfigError
from txl_dist.runtime.process import PACKAGES

MAX_BYTES = 100 * 2**20
"""Ray's limit for an upload to its Jobs API (`DASHBOARD_CLIENT_MAX_SIZE` of Ray 2.60)."""
DEFAULT_EXCLUDES = (
    *(".git", ".hg", ".svn", ".venv", "venv", "node_modules", "__pycache__", "*.pyc", "*.egg-info"),
    *(".*_cache", ".hypothesis", ".ipynb_checkpoints", ".DS_Store", "*.tmp", "/build", "/dist"),
    *("/data", "/runs", "mlruns", "mlflow.db*", "*.tar.zst", "*.safetensors"),
)
SECRET_FILES = (
    *(".env", ".env.*", ".netrc", ".aws", ".ssh", ".kube", ".config", "*.pem", "*.key", "*.p12"),
    *(
        "id_rsa*",
        "id_ed25519*",
        "auth_token",
        "*password*",
        "*secret*",
        "credentials",
        "credentials.json",
        ".git-credentials",
    ),
)
"""Files that usually contain passwords, tokens or keys."""
IGNORE_FILES = (".gitignore", ".rayignore")
NUM_LISTED = 5
"""Largest entries in the message about a package that is too large."""
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The oldest time in a zip file; with real times equal content would give different bytes."""
_MIB = 2**20


@dataclass(frozen=True)
class Package:
    """The files of a package, and what was left out."""

    files: dict[str, Path]
    """Name in the package -> file."""
    excluded: tuple[str, ...]
    """Excluded files and directories, relative to the working directory; directories end in /."""
    num_bytes: int

    def write(self, path: Path) -> None:
        """Write the zip file. Equal files give equal bytes."""
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, file in sorted(self.files.items()):
                is_executable = os.access(file, os.X_OK)
                _add(archive, name, file.read_bytes(), mode=0o755 if is_executable else 0o644)
            for name, text in _metadata().items():
                _add(archive, name, text.encode(), mode=0o644)

    def require_size(self, limit_bytes: int = MAX_BYTES) -> None:
        """Raise ConfigError naming the largest entries if the files have more bytes than that."""
        if self.num_bytes <= limit_bytes:
            return
        sizes: Counter[str] = Counter()
        for name, file in self.files.items():
            directory, _, rest = name.partition("/")
            sizes[f"{directory}/" if rest else name] += file.stat().st_size
        listed = ", ".join(
            f"{name} ({size / _MIB:,.1f} MiB)" for name, size in sizes.most_common(NUM_LISTED)
        )
        raise ConfigError(
            f"the package has {len(self.files):,} files of {self.num_bytes / _MIB:,.1f} MiB, and "
            f"Ray accepts at most {limit_bytes / _MIB:g} MiB. Largest: {listed}. Data does not "
            "belong into the package: put it on storage that all nodes see. Leave files out with "
            "--exclude PATTERN, or with a line in .gitignore or .rayignore"
        )

    def description(self) -> str:
        """For the user, before the upload."""
        excluded = ", ".join(self.excluded[: NUM_LISTED * 2])
        more = len(self.excluded) - NUM_LISTED * 2
        return (
            f"package: {len(self.files):,} files, {self.num_bytes / _MIB:,.1f} MiB before "
            f"compression; left out: {excluded or 'nothing'}" + f" and {more} more" * (more > 0)
        )


def collect_package(
    working_dir: Path,
    *,
    configs: Iterable[Path] = (),
    exclude: Iterable[str] = (),
    excluded_paths: Iterable[Path] = (),
) -> Package:
    """Collect the files of a package.

    `configs` are always packed, also if a pattern excludes them. `exclude` are patterns as in
    .gitignore. All paths are relative to the working directory, or absolute. Raises ConfigError if
    a file cannot be read.
    """
    root = working_dir.resolve()
    spec = GitIgnoreSpec.from_lines((*DEFAULT_EXCLUDES, *SECRET_FILES, *exclude))
    left_out = {(root / path).resolve() for path in excluded_paths}
    excluded: list[str] = []
    files = {
        path.relative_to(root).as_posix(): path for path in _walk(root, spec, left_out, excluded)
    }
    files |= {path.as_posix(): root / path for path in configs}
    for package in PACKAGES:
        files |= _code_of(package, spec)
    for path in files.values():
        if not os.access(path, os.R_OK):
            raise ConfigError(f"{path} cannot be read; leave it out: --exclude {path.name}")
    return Package(files, tuple(excluded), sum(path.stat().st_size for path in files.values()))


def _walk(
    root: Path, spec: GitIgnoreSpec, left_out: Collection[Path], excluded: list[str]
) -> Iterator[Path]:
    """The files below a directory that are not excluded; appends the others to `excluded`."""
    pending: list[tuple[Path, tuple[tuple[Path, GitIgnoreSpec], ...]]] = [(root, ())]
    while pending:
        directory, ignores = pending.pop()
        ignores = (*_ignore_specs(directory), *ignores)  # those of inner directories take priority
        for path in sorted(directory.iterdir()):
            is_directory = path.is_dir()
            name = path.relative_to(root).as_posix() + "/" * is_directory
            if (
                spec.match_file(name)
                or path in left_out
                or _is_ignored(path, ignores, is_directory=is_directory)
                or (path.is_symlink() and not _stays_inside(path, root))
                or not (is_directory or path.is_file())
            ):
                excluded.append(name)
            elif is_directory:
                pending.append((path, ignores))
            else:
                yield path


def _ignore_specs(directory: Path) -> Iterator[tuple[Path, GitIgnoreSpec]]:
    for name in IGNORE_FILES:
        if (directory / name).is_file():
            lines = (directory / name).read_text("utf-8", errors="replace").splitlines()
            yield directory, GitIgnoreSpec.from_lines(lines)


def _is_ignored(
    path: Path, ignores: Iterable[tuple[Path, GitIgnoreSpec]], *, is_directory: bool
) -> bool:
    for directory, spec in ignores:
        decision = spec.check_file(path.relative_to(directory).as_posix() + "/" * is_directory)
        if decision.include is not None:
            return decision.include
    return False


def _stays_inside(link: Path, root: Path) -> bool:
    """Whether a link may be packed: links to directories are not, because they can form cycles."""
    return link.is_file() and link.resolve().is_relative_to(root)


def _code_of(package: str, excluded: GitIgnoreSpec) -> dict[str, Path]:
    """The files of an installed package, without those that `excluded` matches."""
    spec = find_spec(package)
    locations = (spec and spec.submodule_search_locations) or []
    files = {
        f"{package}/{path.relative_to(location).as_posix()}": path
        for location in locations
        for path in Path(location).rglob("*")
        if path.is_file()
    }
    return {name: path for name, path in files.items() if not excluded.match_file(name)}


def _metadata() -> dict[str, str]:
    """Files that make the package look installed: launchers are found by their entry points."""
    installed = distribution("txl-dist")
    directory = f"txl_dist-{installed.version}.dist-info"
    return {
        f"{directory}/METADATA": (
            f"Metadata-Version: 2.1\nName: txl-dist\nVersion: {installed.version}\n"
        ),
        f"{directory}/entry_points.txt": installed.read_text("entry_points.txt") or "",
    }


def _add(archive: zipfile.ZipFile, name: str, content: bytes, *, mode: int) -> None:
    entry = zipfile.ZipInfo(name, date_time=_EPOCH)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = mode << 16
    archive.writestr(entry, content)
