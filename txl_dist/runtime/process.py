"""This process: how it was started, its GPUs, allocator and code, and what it is doing.

Imports no torch, so that commands that need no tensor start quickly.
"""

import ctypes
import hashlib
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

TORCHRUN_VARIABLES = (
    "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID",
)  # fmt: skip


def usable_cores() -> int:
    """The CPU cores that Slurm, a container's set of cores or taskset leaves this process."""
    return len(os.sched_getaffinity(0))


def is_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun started this process as a rank: it has the complete set of variables.

    RANK or MASTER_ADDR alone are not sufficient, because they often remain set in shells, notebooks
    and job scripts. A job script that starts the ranks itself sets the complete set
    (`cluster/deploy/slurm.sh`).
    """
    return all(environment.get(name) for name in TORCHRUN_VARIABLES)


def without_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for processes whose rank another launcher sets.

    With TORCHELASTIC_USE_AGENT_STORE, rank 0 would wait for a store that nobody opens.
    """
    return {
        name: value
        for name, value in environment.items()
        if name not in TORCHRUN_VARIABLES and not name.startswith("TORCHELASTIC_")
    }


DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Device files of NVIDIA, of NVIDIA under WSL, and of AMD."""


def num_gpus() -> int:
    """GPUs that torch can use."""
    if not any(Path(name).exists() for name in DRIVER_FILES):
        return 0
    import torch

    return torch.cuda.device_count()


def free_port(address: str) -> int:
    """A free TCP port of an address of this machine, IPv4 or IPv6.

    Another program could take it before rank 0 listens on it: the run then fails at its start, and
    the same command works again.
    """
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h
_NEVER = -1


def keep_freed_memory() -> bool:
    """Make this process keep the host memory that it frees; False if the C library is not glibc.

    A training step on CPUs frees and allocates the same few hundred MiB repeatedly. By default
    glibc returns large blocks to the system and gets them again page by page, and the kernel zeroes
    each page: a tenth of a step or more (docs/experiments.md). GPU memory has torch's allocator.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Blocks in maps of their own would be returned, whatever the thresholds: so there are none.
    settings = {_TRIM_THRESHOLD: _NEVER, _MMAP_MAX: 0}
    return all(mallopt(name, value) == 1 for name, value in settings.items())


SPIN_COUNT = "5000"
"""About 0.1 ms. libgomp's default is 60 times as long."""


def limit_spinning() -> None:
    """Let threads on the CPU that wait for each other sleep soon, as libgomp reads it with torch.

    A thread that spins keeps the core that the thread it waits for needs, if other programs use the
    cores too. Threads that sleep immediately are slower on a quiet machine (docs/experiments.md).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


PACKAGES = ("cluster", "data_pipeline", "txl_dist")
LIBRARIES = ("torch", "deepspeed", "numpy")
"""Libraries that affect the numbers."""


@cache
def source_digest() -> str:
    """Hex sha256 over the names and contents of all Python files of PACKAGES; under 20 ms.

    Ranks compare it before they train, because ranks with different sources compute different
    losses. A version number would not do: it stays the same while sources are edited.
    """
    digest = hashlib.sha256()
    for package in PACKAGES:
        spec = find_spec(package)
        for root in map(Path, (spec and spec.submodule_search_locations) or ()):
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


class Span(StrEnum):
    """A kind of work of the main thread of a rank, which is in exactly one at any moment.

    So the seconds of all spans add up to the time since `Activity.reset`. They are those of the
    host, from the monotonic clock. GPU kernels run asynchronously: their time is in the span that
    waits for their results. That is `optimizer`, where the loss and the gradient norm are read;
    with several ranks DeepSpeed also waits at the end of `backward`.
    """

    START_UP = "start-up"
    """Until the end of the first step of this process, which compiles and allocates."""
    DATA_WAIT = "data wait"
    FORWARD = "forward"
    BACKWARD = "backward"
    """Contains the reduction of the gradients, and so the wait for slower ranks."""
    REDUCE = "reduce"
    """The collective of the step, which sums the losses."""
    OPTIMIZER = "optimizer"
    SAVE_WAIT = "save wait"
    EVALUATION = "evaluation"
    OTHER = "other"
    """Everything else in the loop, such as logging."""


STEP_SPANS = (Span.FORWARD, Span.BACKWARD, Span.REDUCE, Span.OPTIMIZER)


@dataclass(slots=True)
class Activity:
    """What a rank is doing. `name` is for messages: `start-up`, `checkpoint of step 12`, ..."""

    name: str = "start-up"
    span: Span = Span.START_UP
    num_steps: int = 0
    """Steps that this process has done since `reset`."""
    num_collectives: int = 0
    """Collectives of `World` that this process has begun."""
    unfinished_seconds: float = 0.0
    """Of the step in progress, in STEP_SPANS."""
    _seconds: dict[Span, float] = field(
        default_factory=lambda: dict.fromkeys(Span, 0.0), repr=False
    )
    _since: float = field(default_factory=time.monotonic, repr=False)

    def reset(self) -> None:
        """Begin with the start-up of a run, at 0 seconds."""
        self.name, self.span, self.num_steps = "start-up", Span.START_UP, 0
        self._seconds, self._since = dict.fromkeys(Span, 0.0), time.monotonic()
        self.unfinished_seconds = 0.0

    def enter(self, span: Span) -> Span:
        """End the current span and begin `span`; returns the one that has ended."""
        now = time.monotonic()
        self._seconds[self.span] += now - self._since
        if self.span in STEP_SPANS:
            self.unfinished_seconds += now - self._since
        previous, self.span, self._since = self.span, span, now
        return previous

    def end_step(self) -> None:
        """Call at the end of each step. The first one belongs to the start-up."""
        self.enter(Span.OTHER)
        self.unfinished_seconds = 0.0
        self.num_steps += 1
        if self.num_steps == 1:
            for span in STEP_SPANS:
                self._seconds[Span.START_UP] += self._seconds[span]
                self._seconds[span] = 0.0

    def seconds(self) -> dict[Span, float]:
        """Seconds in each span until now."""
        self.enter(self.span)
        return self._seconds.copy()
