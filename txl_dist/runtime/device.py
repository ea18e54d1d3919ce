"""Which device computes, and how: precision, reproducible operations, speed, threads on CPUs."""

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from data_pipeline.errors import counted
from txl_dist.config.run_config import Precision
from txl_dist.errors import ConfigError
from txl_dist.model.devices import triton_unavailable_reason
from txl_dist.runtime.process import usable_cores


def default_device() -> torch.device:
    """The first GPU, or the CPU. Raises ConfigError for a GPU without triton."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    require_triton(device)
    return device


def require_triton(device: torch.device) -> None:
    """Raise ConfigError for a GPU that cannot run the kernels of the model."""
    if device.type == "cuda" and (reason := triton_unavailable_reason(device)):
        raise ConfigError(
            f"GPUs need triton, and {reason}: mend that, or use the CPUs, with "
            "CUDA_VISIBLE_DEVICES= before the command"
        )


ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
"""Read when a process first uses cuBLAS and NCCL. Values that are set already stay."""


@contextmanager
def deterministic(*, enabled: bool) -> Iterator[None]:
    """`training.deterministic`: operations on GPUs that give the same bits in every run.

    Enter it before the process uses a GPU. Some of torch's CUDA kernels add with atomics, in an
    order that changes. cuBLAS needs a workspace of a fixed size for reproducible products, and NCCL
    has to add in the same order, so its algorithm is fixed too. Operations on CPUs are reproducible
    in any case. Source: https://docs.pytorch.org/docs/2.13/notes/randomness.html

    An operation without a reproducible form raises RuntimeError, which names it.
    """
    if not enabled:
        yield
        return
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    before = torch.are_deterministic_algorithms_enabled()
    memory: Any = torch.utils.deterministic
    fills = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # Filling new tensors costs a pass over each; every element is written before it is read.
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        memory.fill_uninitialized_memory = fills


TORCH_DTYPE: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def autocast(
    precision: Precision, device: torch.device, *, cache_enabled: bool = True
) -> torch.autocast:
    """The context in which the model runs: with bf16 only matrix products are computed in bf16.

    Disabled for fp32. Parameters, optimizer state and losses are fp32 in either precision, so
    checkpoints are the same; the residual stream has the dtype of the memory. DeepSpeed applies its
    own autocast in training (`training/engine/deepspeed_setup.py`) and disables any other around
    its engine; evaluation and generation use this one. See docs/decisions/0006-bf16-by-autocast.md.

    `cache_enabled`: whether a weight is cast once per context, and not once per operation.
    """
    dtype = TORCH_DTYPE[precision]
    return torch.autocast(
        device.type, dtype, enabled=dtype is not torch.float32, cache_enabled=cache_enabled
    )


def describe_machine(device: torch.device) -> str:
    """`NVIDIA H100 80GB HBM3, 8 GPUs here | AMD EPYC 7B13, 64 cores, 256 GiB | Python 3.11.2`."""
    gpus = ""
    if device.type == "cuda":
        number = counted(torch.cuda.device_count(), "GPU")
        gpus = f"{torch.cuda.get_device_name(device)}, {number} here | "
    cpu = platform.processor() or platform.machine()
    with suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as file:
        names = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
        cpu = next(names, cpu)
    memory = f"{psutil.virtual_memory().total / 2**30:,.0f} GiB"
    return f"{gpus}{cpu}, {usable_cores()} cores, {memory} | Python {platform.python_version()}"


def synchronize(device: torch.device) -> None:
    """Wait for the work of a GPU; on a CPU results are there already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


SIZES = {"cpu": (256, 1024, 2048), "cuda": (4096, 8192)}
"""Rows of the square matrices of `device_peak_flops`, ascending. Smaller ones do not fill a large
GPU."""
SECONDS_PER_SIZE = 0.15
MAX_PRODUCT_SECONDS = 1.0
"""A product that would take longer is left out: in bf16, a CPU without instructions for it needs
a minute for 2,048 rows."""


def device_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of this process in the fastest product of two square matrices, measured.

    Data-sheet figures assume clock rates and core counts that a process may not have.
    """
    best = 0.0
    for size in SIZES[device.type]:
        if best == 0 or 2 * size**3 <= best * MAX_PRODUCT_SECONDS:
            best = max(best, product_flops(size, dtype, device, seconds=SECONDS_PER_SIZE))
    return best


def product_flops(size: int, dtype: torch.dtype, device: torch.device, *, seconds: float) -> float:
    """FLOP/s of the fastest repetition, because other processes may slow down some of them."""
    generator = torch.Generator(device).manual_seed(0)  # the run's random state does not change
    try:
        matrix = torch.randn(size, size, dtype=dtype, device=device, generator=generator)
        if device.type == "cuda":  # the first product of a process loads cuBLAS
            matrix @ matrix
            synchronize(device)
        best, deadline = 0.0, time.monotonic() + seconds
        while best == 0 or time.monotonic() < deadline:
            start = time.perf_counter()
            matrix @ matrix
            synchronize(device)
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
    except torch.OutOfMemoryError:  # the run uses the GPU memory; skip this measurement
        return 0.0
    return best


EXACT_THREADS = 1
"""Threads of evaluation on the CPU. The last bit of a matrix product depends on their number, so it
must not depend on the number of workers. More workers use more cores."""


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Compute with this many threads, then with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
