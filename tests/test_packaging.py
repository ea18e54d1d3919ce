"""The sdist builds the wheel, and the wheel works without the repository, with its configs."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.version import Version
from setuptools import find_packages

ROOT = Path(__file__).parents[1]
PACKAGES = ("cluster", "data_pipeline", "txl_dist")
NOT_COPIED = (".*", "__pycache__", "build", "dist", "*.egg-info", "data", "runs", "tests", "docs")


def run(*words: object, cwd: Path, path: Path | None = None) -> str:
    """The standard output of `python WORDS...`, with `path` before the installed packages."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [sys.executable, *map(str, words)],
        check=False,
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment | ({"PYTHONPATH": str(path)} if path else {}),
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_every_folder_with_code_is_a_package_that_the_wheel_contains() -> None:
    found = {name.replace(".", "/") for name in find_packages(str(ROOT))}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            assert path.parent.relative_to(ROOT).as_posix() in found, path


def test_the_description_for_an_index_can_be_followed_there() -> None:
    """No index has the other files of the repository, and no page of it has a public address."""
    read = "from distutils.core import run_setup; distribution = run_setup('setup.py', stop_after="
    read += "'config'); print(distribution.metadata.long_description)"
    text = run("-W", "ignore", "-c", f"import setuptools; {read}", cwd=ROOT)
    assert "](" not in text.replace("](https://", "")
    for of_the_repository in ("![", "<!--", "\nmake ", "From a clone"):
        assert of_the_repository not in text
    assert re.search(r"\n## [^\n]+\n+\Z", text) is None, "an empty section"
    words = [line.split()[:2] for line in text.partition("```bash\n")[2].splitlines()]
    commands = ("prepare", "config", "train", "eval")
    assert words[:5] == [["pip", "install"], *(["txl", command] for command in commands)]


@pytest.mark.parametrize("code", [0, 1])
def test_make_setup_says_what_it_does_in_few_lines_and_fails_with_pip(
    code: int, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    output = "".join(f"Collecting package{n}\n  Downloading {n}.whl (81 kB)\n" for n in range(150))
    output += "Downloading torch.whl (526.6 MB)\nInstalling collected packages: a, b\n"
    (tmp_path / "bin" / "python").touch()
    pip = tmp_path / "bin" / "pip"
    pip.write_text(f"#!/bin/bash\necho -n '{output}'; echo no network >&2; exit {code}\n")
    pip.chmod(0o755)
    made = subprocess.run(
        ["make", "--no-print-directory", "setup", f"VENV={tmp_path}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    lines = made.stdout.splitlines()
    assert "constraints.txt" in lines[0]
    assert {"  140 packages found", "  Downloading torch.whl (526.6 MB)"} <= {*lines}
    assert "  installing 150 packages" in lines
    assert len(lines) < 15
    assert "no network" in made.stderr
    assert (made.returncode == 0) == (code == 0) == (tmp_path / ".installed").exists()


def test_what_is_built_after_a_release_has_a_version_of_its_own() -> None:
    headings = re.findall(r"^## (\S+)(?: - (\S+))?$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    released, date = next(heading for heading in headings if heading[0] != "Unreleased")
    version = Version(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])
    if headings[0][0] == "Unreleased":
        assert version.is_devrelease
        assert version > Version(released)
    else:
        assert version == Version(released)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], str(citation["date-released"])) == (released, date)


@pytest.mark.slow
def test_the_sdist_builds_a_wheel_that_works_anywhere(tmp_path: Path) -> None:
    source, target, elsewhere = tmp_path / "source", tmp_path / "target", tmp_path / "elsewhere"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*NOT_COPIED))
    for leftover in (
        "data/corpus.txt",
        "runs/mine/config.yaml",
        "configs/paper/corpus.zip",
        "cluster/deploy/corpus.zip",
    ):
        (source / leftover).parent.mkdir(parents=True, exist_ok=True)
        (source / leftover).write_text("not for others")
    elsewhere.mkdir()

    build = "from setuptools import build_meta; build_meta.build_sdist('..')"
    run("-c", build, cwd=source)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
        sdist.extractall(tmp_path, filter="data")
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    metadata = (unpacked / "PKG-INFO").read_text("utf-8")
    assert "\nDescription-Content-Type: text/markdown\n" in metadata
    assert {"LICENSE", "pyproject.toml", "setup.py", "configs/quickstart.yaml"} <= names
    assert not {name for name in names if name.startswith(("data/", "runs/")) or "corpus" in name}

    offline = ("--no-deps", "--no-index", "--quiet", "--disable-pip-version-check")
    build_words = ("wheel", unpacked, "--no-build-isolation", "--wheel-dir", tmp_path)
    run("-m", "pip", *build_words, *offline, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    run("-m", "pip", "install", wheel, "--target", target, *offline, cwd=tmp_path)

    assert (target / "txl_dist/constraints.txt").read_bytes() == (
        ROOT / "constraints.txt"
    ).read_bytes()

    def txl(*words: str) -> str:
        return run("-P", "-m", "txl_dist", *words, cwd=elsewhere, path=target)

    for command, folder in (("list", ROOT / "configs"), ("deploy", ROOT / "cluster" / "deploy")):
        paths = [path for path in folder.rglob("*") if path.suffix == ".yaml"]
        names = {path.relative_to(folder).with_suffix("").as_posix() for path in paths}
        assert names <= {line.split("  ")[0] for line in txl("config", command).splitlines()}
    assert txl("config", "deploy", "slurm") == (ROOT / "cluster/deploy/slurm.sh").read_text()
    settings = json.loads(txl("config", "show", "quickstart", "seed=7", "--json"))
    assert (settings["seed"], settings["directory"]) == (7, "runs/quickstart")
    assert "wt103-base" in txl("reproduce", "--list")
    assert not [*elsewhere.iterdir()]
