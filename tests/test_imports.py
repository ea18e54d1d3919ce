"""Which package may import which, and which libraries: checked in the sources."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib import import_module
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED = {
    "data_pipeline": {"data_pipeline"},
    "txl_dist": {"data_pipeline", "txl_dist"},
    "cluster": {"data_pipeline", "txl_dist", "cluster"},
}
PARTS_OF_THE_MODEL = {"txl_dist/model/attention", "txl_dist/model/memory"}
"""Folders for the implementations of one interface; they count as `txl_dist/model`."""
HEAVY = {"torch", "deepspeed", "ray", "matplotlib", "mlflow", "numpy", "webdataset"}


@cache
def imports() -> dict[str, set[str]]:
    """Path of a module -> all modules that it imports, at the top or inside functions."""
    names_by_path = {}
    for package in ALLOWED:
        for path in sorted((ROOT / package).rglob("*.py")):
            names = set()
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Import):
                    names |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    assert node.level == 0, f"{path}: imports are written out in full"
                    names.add(node.module)
            names_by_path[path.relative_to(ROOT).as_posix()] = names
    assert len(names_by_path) > 40
    return names_by_path


def importers_of(library: str) -> list[str]:
    return [path for path, names in imports().items() if library in top_levels(names)]


def top_levels(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_go_one_way(package: str) -> None:
    for path, names in imports().items():
        if path.startswith(f"{package}/"):
            assert top_levels(names) & set(ALLOWED) <= ALLOWED[package], path


def folder_of(module: str) -> str | None:
    """The folder of one of our modules or packages; None for a library."""
    path = ROOT / module.replace(".", "/")
    if path.with_suffix(".py").exists():
        return path.parent.relative_to(ROOT).as_posix()
    return path.relative_to(ROOT).as_posix() if (path / "__init__.py").exists() else None


def test_no_two_packages_import_each_other() -> None:
    """The modules at the top of a package are left out: errors, the public API, `__main__`."""
    tops = set(ALLOWED)

    def package_of(folder: str | None) -> str | None:
        return "txl_dist/model" if folder in PARTS_OF_THE_MODEL else folder

    edges = {
        (folder, imported)
        for path, names in imports().items()
        if (folder := package_of(path.rpartition("/")[0])) not in tops
        for imported in map(package_of, map(folder_of, names))
        if imported not in {None, folder, *tops}
    }
    assert len(edges) > 40
    assert not {(a, b) for a, b in edges if (b, a) in edges}


def test_few_modules_are_at_the_top_of_txl_dist() -> None:
    """The API, the entry point, the errors, and how every package reads texts with a model."""
    top = {path.name for path in (ROOT / "txl_dist").glob("*.py")}
    assert top == {"__init__.py", "__main__.py", "errors.py", "events.py", "sequence.py"}


@pytest.mark.parametrize(
    ("most", "libraries"),
    [(1, ("matplotlib", "mlflow", "backports")), (2, ("deepspeed", "webdataset", "zstandard"))],
)
def test_a_difficult_library_is_imported_in_few_places(most: int, libraries: list[str]) -> None:
    for library in libraries:
        assert 1 <= len(importers_of(library)) <= most, importers_of(library)


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        (
            "txl_dist.cli.data",
            {"numpy", "pydantic", "torch", "webdataset", "zstandard", "safetensors"},
        ),
        ("txl_dist.tracking.process, txl_dist.tracking.journal", {"mlflow", "torch"}),
        # A launcher starts ranks before they import torch.
        *((f"txl_dist.{name}", {"torch"}) for name in ("launch.processes", "training.data")),
        ("cluster.rank_group", {"torch"}),
    ],
)
def test_a_module_imports_nothing_heavy(module: str, heavy: set[str]) -> None:
    program = f"import sys, {module}; sys.exit(', '.join({heavy} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, b"")


@pytest.mark.parametrize("module", ["txl_dist", "txl_dist.launch.rank_process"])
def test_folders_with_the_names_of_our_packages_change_nothing(module: str, tmp_path: Path) -> None:
    for name in ("data_pipeline", "cluster"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('of the user')")
    # After the current directory in sys.path, as site-packages is.
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-m", module, *(["config", "list"] if module == "txl_dist" else [])]
    ended = subprocess.run(
        program, cwd=tmp_path, env=environment, input=b"", capture_output=True, check=False
    )
    assert b"of the user" not in ended.stderr
    assert b"No module" not in ended.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "configs/tiny.yaml", "training.num_stepz=3"],
        ["train", "configs/tiny.yaml", "--ranks", "many"],
        ["train", "configs/tiny.yaml", "data.path=missing"],
        ["eval", "missing", "missing"],
        ["generate", "pyproject.toml", "--top-p", "7"],
        ["import", "missing", "--out", "missing"],
        ["report", "missing"],
        ["status", "missing"],
        ["data", "inspect", "missing"],
    ],
    ids=" ".join,
)
def test_a_usage_error_is_found_without_torch(arguments: list[str]) -> None:
    heavy = HEAVY if arguments[0] == "data" else HEAVY - {"numpy", "webdataset"}
    assert not heavy & loaded_by_failing(arguments)


def loaded_by_failing(arguments: list[str]) -> set[str]:
    """The modules that a command has imported when it ends with an error of the user's."""
    program = """
import sys
from txl_dist.__main__ import main
try:
    main()
finally:
    print(*sys.modules)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert ended.returncode in (2, 3, 4), ended.stderr
    modules = set(ended.stdout.splitlines()[-1].split())
    assert "typer" in modules
    return modules


@pytest.mark.parametrize(
    ("library", "folder"),
    [
        ("deepspeed", "txl_dist/training/engine"),
        ("lm_eval", "txl_dist/harness"),  # an extra, so nothing else may need it
        ("tqdm", "txl_dist/harness"),
        ("ray", "cluster"),
    ],
)
def test_a_library_is_imported_in_one_folder_only(library: str, folder: str) -> None:
    assert importers_of(library)
    assert all(path.startswith(f"{folder}/") for path in importers_of(library))


def test_plots_have_no_global_state() -> None:
    """pyplot keeps figures alive, and may choose a backend that needs a display."""
    assert not any("pyplot" in name for names in imports().values() for name in names)


# triton is on machines with GPUs, and takes time to import. numpy draws the masks of dropout: the
# stream of its generator does not change between versions.
OF_THE_MODEL = {
    "triton_kernels.py": {"triton"},
    "triton_tiles.py": {"triton"},
    "triton_launch.py": {"triton"},
    "kernels.py": {"triton"},
    "dropout.py": {"numpy"},
}


def test_the_model_imports_torch_and_itself_only() -> None:
    for path, names in imports().items():
        if path.startswith("txl_dist/model/"):
            libraries = top_levels(names) - sys.stdlib_module_names - {"torch", "txl_dist"}
            modules = {name for name in names if name.startswith("txl_dist")}
            assert libraries == OF_THE_MODEL.get(path.rpartition("/")[2], set()), path
            assert all(name.startswith("txl_dist.model") for name in modules), path


def test_every_library_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["lm-eval"], *extras["gpu"]]
    declared = {normal(re.split(r"[^\w.-]", line)[0]) for line in lines}
    used = set().union(*map(top_levels, imports().values()))
    distributions = packages_distributions()
    later = {"compression"}  # in the standard library from Python 3.14 on
    for library in used - sys.stdlib_module_names - later - set(ALLOWED):
        assert declared & set(map(normal, distributions[library])), library


def normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["data", "--help"], ["attention", "--help"]]
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "txl_dist", *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {line.rsplit("|", 1)[-1].strip() for line in ended.stderr.splitlines()}
    assert "Usage" in ended.stdout
    assert "typer" in loaded, "the output of -X importtime was parsed"
    # Typer imports pydantic for the arguments of a command, but not for the list of commands.
    assert not top_levels(loaded) & (HEAVY | ({"pydantic"} if arguments == ["--help"] else set()))


def scripts() -> list[str]:
    folders = ("benchmarks", "examples", "tests/gpu", "tests/support", "docs/site")
    return [
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


@pytest.mark.parametrize("script", scripts())
def test_scripts_import_what_exists(script: str) -> None:
    # Most of them run rarely, or need a GPU: nothing else would find a name that has moved.
    for node in ast.walk(ast.parse((ROOT / script).read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in ALLOWED:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found = hasattr(import_module(node.module), alias.name) or find_spec(name)
                assert found, f"{script} imports {name}"
