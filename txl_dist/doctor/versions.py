"""Versions of Python, of libraries and of our code, compared with the expected ones.

On the machine of the command the expected versions are those of `constraints.txt`; on the nodes of
a cluster they are those of the machine of the command.
"""

import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import txl_dist
from txl_dist.doctor.finding import Finding, note, ok, problem
from txl_dist.runtime.source_digest import source_digest

LIBRARIES = ("torch", "deepspeed", "ray", "mlflow", "webdataset", "numpy")
CODE = "txl-dist"
MISSING = "not installed"


def installed_versions() -> dict[str, str]:
    """Name -> version, of Python, LIBRARIES and our code."""
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in LIBRARIES},
        CODE: f"{_version(CODE)} (sources {source_digest()[:12]})",
    }


def pinned_versions(constraints: Path | None = None) -> dict[str, str]:
    """Versions of LIBRARIES in `constraints.txt`, which a source checkout has; else {}."""
    path = constraints or Path(txl_dist.__file__).parents[1] / "constraints.txt"
    if not path.is_file():
        return {}
    pins = dict(re.findall(r"(?m)^([\w.-]+)==([^\s;#]+)", path.read_text(encoding="utf-8")))
    return {name: pins[name] for name in LIBRARIES if name in pins}


def check_versions(expected: Mapping[str, str], *, source: str) -> list[Finding]:
    """Compare with `expected`, which are the versions of `source`, e.g. "constraints.txt"."""
    installed = installed_versions()
    summary = ", ".join(f"{name} {found}" for name, found in installed.items())
    missing = [name for name, found in installed.items() if found == MISSING]
    different = [
        name
        for name, value in expected.items()
        if name not in missing and _public(installed[name]) != _public(value)
    ]
    findings = [
        problem(
            f"{name} {installed[name]}",
            expected=f"{name} {expected.get(name, 'installed')}" + f" ({source})" * bool(expected),
            advice="install the same sources of txl-dist on every node, and start its Ray again"
            if name == CODE
            else "use the Python that created the other environments (make PYTHON=... setup)"
            if name == "python"
            else "make setup, or pip install --constraint constraints.txt in this environment",
        )
        for name in (*missing, *different)
    ]
    if not expected:
        findings.append(
            note(
                f"{summary}; not compared: no constraints.txt next to the package",
                advice="install from a source checkout to compare versions: make setup",
            )
        )
    return findings or [ok(summary)]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return MISSING


def _public(text: str) -> str:
    """Without the build: 2.13.0+cpu and 2.13.0+cu130 have the same sources."""
    return text.partition("+")[0]
