"""What every test may use: groups of ranks, and a small dataset of real text."""

import atexit
import os
import shutil
import signal
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

# Before torch is imported, and for every process that tests start: their products are tiny, and
# threads that wait for each other take most of the time where ranks share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before triton is imported: `attention: triton` runs in triton's interpreter. Set it to 0 to run
# the kernels on a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Two suites on one machine must not disturb each other: compilers, Ray and caches of the user get a
# folder of this session. Workers of xdist inherit it. Its path is short, because those of Ray's
# sockets are limited.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # `tmp_path` is kept
    session_folder = tempfile.tempdir = tempfile.mkdtemp(prefix="txl-")
    for name in ("TMPDIR", "XDG_CACHE_HOME", "TRITON_HOME"):
        os.environ[name] = session_folder
    atexit.register(shutil.rmtree, session_folder, ignore_errors=True)

import pytest
import torch
from hypothesis import settings
from torch.utils._pytree import tree_leaves, tree_map

import tests.support.hypothesis_examples  # noqa: F401  # registers the profiles
from data_pipeline.preparation.prepare import prepare_dataset
from data_pipeline.shards.manifest import PrepareSettings
from tests import gpu
from tests.support.gloo_ranks import RankGroups
from txl_dist.runtime.process import num_gpus

# Before test modules are imported; `--hypothesis-profile all` comes later and wins.
settings.load_profile("quick")

MODULES = ("abc.py", "bisect.py", "colorsys.py", "copy.py", "heapq.py", "keyword.py", "this.py")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not item.get_closest_marker("gpu") or gpu.ON_CPU:
        return
    if not num_gpus():
        pytest.skip("no GPU: torch finds none, or is built without CUDA (see `txl doctor`)")
    if os.environ["TRITON_INTERPRET"] == "1":
        pytest.fail("TRITON_INTERPRET=1 would not test the kernels: `make gpu`, or set it to 0")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankGroups]:
    """`ranks(2).run(function, ...)` calls `function(world, ...)` on two real gloo ranks."""
    groups = RankGroups()
    yield groups
    groups.close()


@pytest.fixture
def hangup() -> Iterator[None]:
    """SIGHUP is not ignored, neither here nor by the commands of a test: under `nohup` it is."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


class Clock:
    now = 500.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The monotonic clock of this process."""
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of a few modules of the standard library: `train` and `valid`, bytes."""
    folder = tmp_path_factory.mktemp("corpus")
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in MODULES:
        (folder / name).write_bytes((library / name).read_bytes())
    out = tmp_path_factory.mktemp("dataset") / "stdlib"
    prepare_dataset([folder], out, PrepareSettings(split={"valid": 0.3}, block_bytes=4096))
    return out


@pytest.fixture
def tiny(ranks: RankGroups, dataset: Path, tmp_path: Path) -> Any:
    """The `TinyRuns` of a test."""
    from tests.support.training_runs import TinyRuns

    return TinyRuns(ranks, dataset, tmp_path)


@pytest.fixture(scope="session")
def straight(
    ranks: RankGroups, dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """`straight(*settings, num_ranks=2)`: the run of these settings, which nothing disturbed."""
    from tests.support.training_runs import trained

    @cache
    def train_once(*settings: str, num_ranks: int = 2) -> Path:
        run = tmp_path_factory.mktemp("straight")
        return trained(ranks, dataset, run, *settings, num_ranks=num_ranks)

    return train_once


@pytest.fixture
def interpreted_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """In triton's interpreter, kernels of attention get fp32 copies of bf16, and their results are
    rounded to it: the interpreter multiplies bf16 as integers."""
    triton = pytest.importorskip("triton")
    from txl_dist.model.attention import triton_launch

    if triton.knobs.runtime.interpret:
        for name in ("forward", "backward"):
            monkeypatch.setattr(triton_launch, name, _in_fp32(getattr(triton_launch, name)))


def _in_fp32(launch: Callable[..., None]) -> Callable[..., None]:
    def wide(x: Any) -> Any:
        is_narrow = isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16
        return x.float() if is_narrow else x

    def launched(*arguments: Any) -> None:
        copies = tree_map(wide, arguments)
        launch(*copies)
        *_, results = arguments  # what it writes
        *_, computed = copies
        for own, copy in zip(tree_leaves(results), tree_leaves(computed), strict=True):
            if own is not copy:
                own.copy_(copy)

    return launched
