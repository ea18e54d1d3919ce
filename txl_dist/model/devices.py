"""What a device needs: copies for which the host does not wait, and triton.

Imports triton only where a kernel runs.
"""

import os
import sysconfig
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from shutil import which
from typing import Any

import torch
from torch import Tensor
from torch.library import define, impl, register_fake


def host_waits_for(device: torch.device) -> bool:
    """Whether the host waits if it reads a value on `device`, such as a number of rows.

    The embedding and the softmax have an implementation without such reads (docs/decisions/0039).
    """
    return device.type != "cpu"


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`; itself if it is there.

    A copy to a GPU goes through page-locked RAM, so the host continues immediately. The GPU
    reads the values in the order of its stream; do not change `tensor` afterwards.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    if torch.cuda.is_available():  # not if the GPU is one of torch's fake devices
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


_kernel = cache(resolve_name)


def define_operator(
    name: str, signature: str, *, kernel: str, empty_results: Callable[..., Any]
) -> None:
    """Define `torch.ops.txl_dist.NAME`, which torch.compile and fake tensors know as an operator.

    `kernel`: the function that computes it, as "module:name". Its module imports triton, and is
    imported when it first runs. `empty_results`: what it returns for these arguments, without
    values. Not `custom_op`, whose calls cost more time on the host.
    """

    def run(*arguments: Any) -> Any:
        return _kernel(kernel)(*arguments)

    define(f"txl_dist::{name}", signature)
    impl(f"txl_dist::{name}", "default")(run)
    register_fake(f"txl_dist::{name}")(empty_results)


def has_triton(device: torch.device) -> bool:
    """Whether triton can run on the device. On CPUs that is its interpreter, for tests."""
    return not triton_unavailable_reason(device)


def triton_unavailable_reason(device: torch.device) -> str:
    """Why triton cannot run on the device, and what would help; "" if it can."""
    if find_spec("triton") is None:
        return "the package triton is not installed (pip install triton)"
    if device.type != "cuda":
        return "" if os.environ.get("TRITON_INTERPRET") == "1" else "the ranks have no GPU"
    if not torch.cuda.is_available():  # torch's fake tensors can be on a GPU that is not there
        return ""
    if torch.cuda.get_device_capability(device) < (8, 0):
        name = torch.cuda.get_device_name(device)
        return f"{name} has a compute capability below 8.0, that of an A100"
    # It compiles an extension of Python, when its first kernel is loaded.
    if not (os.environ.get("CC") or which("gcc") or which("clang")):
        return "it needs a C compiler (apt install gcc libc6-dev)"
    header = python_include() / "Python.h"
    return "" if header.exists() else f"it needs {header} (apt install python3-dev)"


def python_include() -> Path:
    """Where triton looks for the headers of Python (triton/runtime/build.py)."""
    scheme = sysconfig.get_default_scheme()
    scheme = "posix_prefix" if scheme == "posix_local" else scheme  # Debian's own scheme
    return Path(sysconfig.get_paths(scheme=scheme)["include"])
