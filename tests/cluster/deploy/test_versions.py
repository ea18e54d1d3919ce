"""The deployment files use the versions of constraints.txt and pyproject.toml, and no passwords."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

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
    needed = {"pyproject.toml", "setup.py", "README.md", "LICENSE", "constraints.txt", "configs"}
    assert copied == needed | {"data_pipeline", "txl_dist", "cluster"}


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
