"""The identity of the code that this process runs: a digest of its sources, and library versions.

Ranks compare it before they train, because ranks with different sources compute different losses. A
version number would not do: it stays the same while sources are edited.
"""

import hashlib
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("cluster", "data_pipeline", "txl_dist")
LIBRARIES = ("torch", "deepspeed", "numpy")
"""Libraries that affect the numbers."""


@cache
def source_digest() -> str:
    """Hex sha256 over the names and contents of all Python files of PACKAGES; under 20 ms."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for root in _roots(package):
            for path in sorted(root.rglob("*.py")):
                content = path.read_bytes()
                name = f"{package}/{path.relative_to(root).as_posix()}"
                # With the length, text moved from one file to the next changes the digest.
                digest.update(f"{name} {len(content)}\n".encode())
                digest.update(content)
    return digest.hexdigest()


def code_description() -> str:
    """`txl-dist 0.1.0 (sources 0123456789ab; torch 2.13.0, ...)`, as checkpoints record it."""
    libraries = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    return f"txl-dist {version('txl-dist')} (sources {source_digest()[:12]}; {libraries})"


def _roots(package: str) -> list[Path]:
    spec = find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        return []
    return [Path(location) for location in spec.submodule_search_locations]
