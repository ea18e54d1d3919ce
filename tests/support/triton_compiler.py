"""Compiles the kernels of `attention: triton` for GPUs that this machine need not have.

`compile_kernels` calls the form's operators on the CPU, with the kernels replaced by
`_CompiledInstead`, so what is compiled has exactly the arguments and tiles of a real call. It needs
a process without TRITON_INTERPRET:

    python -m tests.support.triton_compiler 90 bfloat16 64

prints one JSON object per kernel: registers, spilled_bytes, shared_bytes.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from txl_dist.model import triton_launch

KERNELS = ("forward_kernel", "query_gradient_kernel", "key_value_gradient_kernel")
_TYPE = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
}


@dataclass(frozen=True)
class Compiled:
    """What the compiler says about one kernel."""

    kernel: str
    registers: int
    spilled_bytes: int
    shared_bytes: int


class _CompiledInstead:
    """In the place of a kernel: compiles it for the arguments of a launch."""

    def __init__(self, kernel: Any, capability: int) -> None:
        self.kernel, self.capability = kernel, capability
        self.result: Compiled | None = None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.compile

    def compile(self, *arguments: Any, num_warps: int, num_stages: int, **constants: Any) -> None:
        signature, divisible = {}, {}
        for index, (name, value) in enumerate(zip(self.kernel.arg_names, arguments, strict=False)):
            is_tensor = isinstance(value, Tensor)
            signature[name] = _TYPE[value.dtype] if is_tensor else "i32"
            # As triton specialises a launch: allocations are aligned, and numbers may be.
            if is_tensor or value % 16 == 0:
                divisible[(index,)] = [["tt.divisibility", 16]]
        signature |= dict.fromkeys(constants, "constexpr")
        signature = {name: signature[name] for name in self.kernel.arg_names}
        compiled = triton.compile(
            ASTSource(self.kernel, signature, constants, divisible),
            target=GPUTarget("cuda", self.capability, 32),
            options={"num_warps": num_warps, "num_stages": num_stages},
        )
        self.result = Compiled(
            self.kernel.__name__,
            *_registers_and_spills(compiled.asm["ptx"], self.capability),
            compiled.metadata.shared,
        )


def _registers_and_spills(ptx: str, capability: int) -> tuple[int, int]:
    architecture = f"sm_{capability}{'a' if capability == 90 else ''}"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.ptx"
        path.write_text(ptx)
        command = [
            triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name={architecture}", str(path),
            "-o", f"{path}.cubin",
        ]  # fmt: skip
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = [re.search(pattern, report) for pattern in (r"Used (\d+) regi", r"(\d+) bytes spill s")]
    registers, spilled = (int(match[1]) for match in found if match)
    return registers, spilled


def compile_kernels(capability: int, dtype: torch.dtype, d_head: int) -> Iterator[Compiled]:
    """All kernels with scores by distance and dropout, for sizes divisible by 16 but d_head."""
    import txl_dist.model.triton_attention  # noqa: F401  # registers the operators

    originals = {name: getattr(triton_launch, name) for name in KERNELS}
    replaced = {name: _CompiledInstead(kernel, capability) for name, kernel in originals.items()}
    H, B, T, M = 2, 16, 32, 64
    S = M + T
    q, k, v = (torch.zeros(H, B, n, d_head, dtype=dtype, requires_grad=True) for n in (T, S, S))
    distance = torch.zeros(H, B, T, S, dtype=dtype, requires_grad=True)
    reach = torch.zeros(B, T, dtype=torch.int32)
    keep = torch.zeros(B, H, T, S, dtype=dtype)
    try:
        vars(triton_launch).update(replaced)
        operator = torch.ops.txl_dist.relative_attention
        mixed, _ = operator(q, k, v, distance, reach, keep)
        mixed.sum().backward()
    finally:
        vars(triton_launch).update(originals)
    for kernel in replaced.values():
        assert kernel.result is not None
        yield kernel.result


if __name__ == "__main__":
    capability, dtype, d_head = sys.argv[1:]
    for result in compile_kernels(int(capability), getattr(torch, dtype), int(d_head)):
        print(json.dumps(asdict(result)), flush=True)
