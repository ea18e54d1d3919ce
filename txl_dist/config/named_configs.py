"""Finding a config: a file, or one of the configs that the package brings, by its name.

A name is the path below configs/ without its suffix, such as `quickstart` or `paper/wt103-base`.
In the repository the files are in configs/, which the wheel has as txl_dist/configs (setup.py).
Deployment files have names of the same kind, below cluster/deploy/.
"""

import difflib
import itertools
import re
from functools import cache
from pathlib import Path

from txl_dist.errors import ConfigError

_PACKAGE = Path(__file__).parents[1]
_SUFFIX = ".yaml"


def configs_directory() -> Path:
    """The directory of the package's configs, in a wheel or in a checkout."""
    in_wheel = _PACKAGE / "configs"
    return in_wheel if in_wheel.is_dir() else _PACKAGE.parent / "configs"


@cache
def named_configs() -> dict[str, Path]:
    """Path by name, sorted: first those of the top level."""
    directory = configs_directory()
    paths = [*sorted(directory.glob("*.yaml")), *sorted(directory.glob("*/*.yaml"))]
    return {path.relative_to(directory).with_suffix("").as_posix(): path for path in paths}


@cache
def deployment_files() -> dict[str, Path]:
    """Path of each deployment file by name, sorted: those of the top level first."""
    directory = _PACKAGE.parent / "cluster" / "deploy"  # in a wheel, too
    paths = [path for path in directory.rglob("*") if path.is_file()]
    names = {path.relative_to(directory).with_suffix("").as_posix(): path for path in paths}
    return dict(sorted(names.items(), key=lambda item: (item[0].count("/"), item[0].lower())))


def find_deployment_file(given: str) -> Path:
    """The deployment file of that name, with or without its suffix and its directories in front.

    A directory is the name of its `train`, or of its only file. Raises ConfigError.
    """
    files = {name.lower(): path for name, path in deployment_files().items()}
    name = Path(given.removeprefix("cluster/deploy/")).with_suffix("").as_posix().lower()
    inside = [path for full, path in files.items() if full.startswith(f"{name}/")]
    path = files.get(name) or files.get(f"{name}/train") or (inside[0] if inside else None)
    if path is None:
        similar = difflib.get_close_matches(name, files, n=3)
        meant = f"; did you mean {' or '.join(similar)}?" if similar else "."
        raise ConfigError(f"no deployment file {given}{meant} All of them: txl config deploy")
    return path


def find_config(given: str | Path) -> Path:
    """The file `given`, or the package's config of that name.

    A file wins. `configs/NAME.yaml` is also the name NAME, so that commands of the documents work
    in every directory. Raises ConfigError if there is neither, or if a name may mean two files.
    """
    path = Path(given)
    if path.is_file():
        return path
    name = path.as_posix().removeprefix("configs/").removesuffix(_SUFFIX)
    named = named_configs().get(name)
    if named is None:
        raise ConfigError(f"{path} is not a config file{_suggestion(path)}")
    # `txl config init quickstart` writes quickstart.yaml.
    namesake = Path(f"{given}{_SUFFIX}")
    if namesake.is_file() and not namesake.samefile(named):
        raise ConfigError(
            f"{path} is a config of the package, and there is a file {namesake}. Write {namesake} "
            f"for the file, or configs/{name}{_SUFFIX} for that of the package"
        )
    return named


def summary(path: Path) -> str:
    """The first sentence of a file's header, such as what a run is for, and its size."""
    text = path.read_text("utf-8").removeprefix("#!/bin/bash\n")
    paragraph = itertools.takewhile(lambda line: line.strip("# "), text.splitlines())
    text = " ".join(line.removeprefix("#").strip() for line in paragraph)
    return re.split(r"(?<=\.) (?=[A-Z])", text, maxsplit=1)[0]


def _suggestion(path: Path) -> str:
    directory = path if path.is_dir() else path.parent
    files = {config.stem: str(config) for config in sorted(directory.glob("*.yaml"))}
    if similar := difflib.get_close_matches(path.stem, files, n=1, cutoff=0.5):
        return f"; did you mean {files[similar[0]]}?"
    similar = [name for name in named_configs() if name.endswith(f"/{path.stem}")]
    if similar or (similar := difflib.get_close_matches(path.stem, named_configs(), n=3)):
        return f"; did you mean {' or '.join(similar)}?"
    found = ", ".join(files.values()) or "none"
    return f". Configs in {directory}: {found}. Those of the package: txl config list"
