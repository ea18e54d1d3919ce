"""The deployment files use the versions of constraints.txt and pyproject.toml, and no passwords."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from pathspec import PathSpec

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "cluster" / "deploy"
DOCKERFILE = DEPLOY / "Dockerfile"
HOW_TO = ROOT / "docs" / "how_to" / "run_on_a_cluster.md"
COMPOSE = DEPLOY / "mlflow" / "compose.yaml"
FILES = sorted(
    path for path in DEPLOY.rglob("*") if path.suffix in (".yaml", ".sh") or path == DOCKERFILE
)
PYTHON_VERSION = "3.11"  # constraints.txt: "known to work together on Python 3.11"


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, version in pairs}


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_ray_is_that_of_the_constraints() -> None:
    found = [
        version
        for path in FILES
        for version in re.findall(r"rayVersion: (\S+)|rayproject/ray:(\S+)", path.read_text())
    ]
    assert len(found) >= 3
    assert {name or image for name, image in found} == {pinned()["ray"]}


def test_images_of_this_project_have_its_version_also_in_documents() -> None:
    documents = [ROOT / "README.md", *ROOT.glob("docs/how_to/*.md"), *DEPLOY.glob("*.md")]
    tags = {
        path: set(re.findall(r"\btxl(?:-mlflow)?:(\d[\w.]*)", path.read_text()))
        for path in (*FILES, *documents)
    }
    assert tags[HOW_TO]
    assert set().union(*tags.values()) == {project()["version"]}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_image_has_a_version(path: Path) -> None:
    images = re.findall(r"^\s*(?:image:|FROM) ([^\s$]+)", path.read_text(), re.MULTILINE)
    for image in images:
        name, _, tag = image.rpartition("/")[2].partition(":")
        assert tag not in ("", "latest") or image in ("base",), f"{name} of {path.name}"


def test_the_image_installs_only_pinned_packages() -> None:
    text = DOCKERFILE.read_text()
    assert f"PYTHON_IMAGE=python:{PYTHON_VERSION}-" in text
    installs = re.findall(r"pip install (.*)", text)
    assert len(installs) == 3
    for words in (install.rstrip("\\ ").split() for install in installs):
        if "--no-deps" in words:
            continue  # the project itself
        assert words[0] == "--constraint"
        names = [word for word in words[2:] if word not in ("--requirement", "requirements.txt")]
        assert not {*names} - {*pinned()}, "not in constraints.txt"


def test_the_image_does_not_run_as_root() -> None:
    stages = re.split(r"^FROM .* AS ", DOCKERFILE.read_text(), flags=re.MULTILINE)[2:]
    assert len(stages) == 2
    for stage in stages:
        users = re.findall(r"^USER (\S+)$", stage, re.MULTILINE)
        assert users[-1:] == ["txl"]
        # Ray's `docker_start_cmds` mounts the token below this directory; without it, below /root.
        assert re.findall(r"^ENV HOME=(\S+)$", stage, re.MULTILINE) == ["/home/txl"]


def copy_into_image(words: list[str], image: Path) -> None:
    """COPY, of what .dockerignore lets through: the last pattern that fits a file decides."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    # As Docker, and unlike git: a pattern without "**/" fits at the root only.
    rules = [re.sub(r"^(!?)(?!\*\*/|#)", r"\1/", line) for line in lines if line]
    ignored = PathSpec.from_lines("gitignore", rules)
    *sources, target = words
    for source in sources:
        path = ROOT / source
        assert path.exists()
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.is_file() and not ignored.match_file(file.relative_to(ROOT)):
                copy = image / target / file.relative_to(path if path.is_dir() else ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, copy)


@pytest.mark.slow
def test_the_image_installs_the_project_from_what_it_copies(tmp_path: Path) -> None:
    """COPY and RUN of the Dockerfile in their order, with a pip that installs no dependencies."""
    image, programs, site = (tmp_path / name for name in ("image", "programs", "site"))
    image.mkdir()
    programs.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
    pip += ["--no-index", "--quiet", "--target", str(site)]
    stubs = {
        "pip": f'[[ " $* " != *" . "* ]] || {shlex.join(pip)} .',
        "python": f'exec {sys.executable} "$@"',
        "install": "[[ $1 == --* ]] || test -f $1",
    }
    for name, line in stubs.items():
        (programs / name).write_text(f"#!/bin/bash\n{line}\n")
        (programs / name).chmod(0o755)
    text = DOCKERFILE.read_text().replace("\\\n", "")
    for instruction, words in re.findall("^(COPY|RUN) (.*)", text, re.MULTILINE):
        if instruction == "COPY":
            copy_into_image([word.removeprefix("/opt/txl/") for word in words.split()], image)
        elif "pip install" in words:
            environment = {"PATH": f"{programs}:{os.environ['PATH']}"}
            subprocess.run(["sh", "-ec", words], check=True, cwd=image, env=environment)

    for package in ("data_pipeline", "txl_dist", "cluster"):
        for path in (ROOT / package).rglob("*.py"):
            assert (site / path.relative_to(ROOT)).is_file()
    assert (site / "txl_dist" / "configs" / "quickstart.yaml").is_file()
    assert [*site.glob("*.dist-info/licenses/LICENSE")]
    extras = project()["optional-dependencies"]
    requirements = [*project()["dependencies"], *extras["s3"], *extras["http"]]
    assert (image / "requirements.txt").read_text().splitlines() == requirements
    names = {re.split(r"[^\w.-]", requirement.split("==")[0])[0] for requirement in requirements}
    assert not {name.replace("_", "-") for name in names} - {*pinned()}, "not in constraints.txt"


def test_the_build_sees_only_what_it_copies() -> None:
    lines = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert lines[0] == "*"
    allowed = {line[1:] for line in lines if line.startswith("!")}
    copied = {
        source
        for words in re.findall(r"^COPY (.*)$", DOCKERFILE.read_text(), re.MULTILINE)
        for source in words.split()[:-1]
    }
    assert copied == allowed


def test_mlflow_has_its_password_from_a_file_and_listens_on_loopback() -> None:
    compose = yaml.safe_load(COMPOSE.read_text())
    services = compose["services"]
    assert services["postgres"]["environment"]["POSTGRES_PASSWORD_FILE"].startswith("/run/secrets/")
    assert "ports" not in services["postgres"]
    [port] = services["mlflow"]["ports"]
    assert port.startswith("${MLFLOW_BIND:-127.0.0.1}:")
    variables = services["mlflow"]["environment"]
    assert ":" not in variables["MLFLOW_BACKEND_STORE_URI"].split("@")[0].split("//")[1]
    assert "*" not in variables["MLFLOW_SERVER_ALLOWED_HOSTS"].replace(":*", "")
    # Outside the repository, where no package or image is made of it; without it, an error.
    assert compose["secrets"]["postgres_password"]["file"].startswith("${MLFLOW_PASSWORD_FILE:?")
