"""Compiles our Triton kernels for GPUs that this machine need not have.

`compile_kernels` calls the code that launches them on the CPU, with the kernels replaced by
`_CompiledInstead`, so what is compiled has exactly the arguments and tiles of a real call. It needs
a process without TRITON_INTERPRET:

    python -m tests.support.triton_compiler 90 bfloat16 64

prints one JSON object per kernel: spilled_bytes, shared_bytes. Two more numbers are the lanes and
the tokens of a segment.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from txl_dist.model import kernels
from txl_dist.model.attention import triton_launch

_TYPE = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Compiled:
    """What the compiler says about one kernel."""

    kernel: str
    spilled_bytes: int
    """Of registers, per thread."""
    shared_bytes: int


class _CompiledInstead:
    """In the place of a kernel: compiles it for the arguments of a launch."""

    def __init__(self, kernel: Any, capability: int) -> None:
        self.kernel, self.capability = kernel, capability
        self.__name__ = kernel.__name__
        self.result: Compiled | None = None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.compile

    def compile(
        self, *arguments: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any
    ) -> None:
        signature, divisible = {}, {}
        for index, (name, value) in enumerate(zip(self.kernel.arg_names, arguments, strict=False)):
            is_tensor = isinstance(value, Tensor)
            number_type = "fp32" if isinstance(value, float) else "i32"
            signature[name] = _TYPE[value.dtype] if is_tensor else number_type
            # As triton specialises a launch: allocations are aligned, numbers may be, 1 is fixed.
            if isinstance(value, int) and value == 1:
                constants[name] = value
            elif is_tensor or value % 16 == 0:
                divisible[(index,)] = [["tt.divisibility", 16]]
        signature |= dict.fromkeys(constants, "constexpr")
        signature = {name: signature[name] for name in self.kernel.arg_names}
        compiled = triton.compile(
            ASTSource(self.kernel, signature, constants, divisible),
            target=GPUTarget("cuda", self.capability, 32),
            options={"num_warps": num_warps, "num_stages": num_stages},
        )
        spilled_bytes = _spilled_bytes(compiled.asm["ptx"], self.capability)
        self.result = Compiled(self.__name__, spilled_bytes, compiled.metadata.shared)


def _spilled_bytes(ptx: str, capability: int) -> int:
    architecture = f"sm_{capability}{'a' if capability == 90 else ''}"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.ptx"
        path.write_text(ptx)
        command = [
            triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name={architecture}", str(path),
            "-o", f"{path}.cubin",
        ]  # fmt: skip
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (spilled,) = re.findall(r"(\d+) bytes spill s", report)
    return int(spilled)


@contextmanager
def _compiled_instead(
    module: ModuleType, names: list[str], capability: int
) -> Iterator[list[_CompiledInstead]]:
    """Inside, launches of the kernels that `module` calls by these names compile them."""
    originals = {name: getattr(module, name) for name in names}
    replaced = {name: _CompiledInstead(kernel, capability) for name, kernel in originals.items()}
    try:
        vars(module).update(replaced)
        yield list(replaced.values())
    finally:
        vars(module).update(originals)


def compile_kernels(
    capability: int, dtype: torch.dtype, d_head: int, B: int = 16, T: int = 32
) -> Iterator[Compiled]:
    """Those of attention, with scores by distance and dropout, and those of dropout masks.

    By default sizes are divisible by 16 but d_head.
    """
    import txl_dist.model.attention.triton  # noqa: F401  # registers the operators

    H, S = 2, 64 + T
    q, k, v = (torch.zeros(H, B, n, d_head, dtype=dtype, requires_grad=True) for n in (T, S, S))
    rows, columns = -(-T // 8), 16 * (-(-(S + 7) // 16))
    distance = torch.zeros(H, 8, B, rows, columns, dtype=dtype, requires_grad=True)
    reach = torch.zeros(B, T, dtype=torch.int32)
    keep_words = torch.zeros(B, H, T, -(-S // 16), dtype=torch.int16)
    names = ["forward_kernel", "query_gradient_kernel", "key_value_gradient_kernel"]
    triton_launch._is_hopper = lambda device: capability >= 90
    with _compiled_instead(triton_launch, names, capability) as attention_kernels:
        operator = torch.ops.txl_dist.relative_attention
        mixed, _ = operator(q, k, v, distance, reach, keep_words, 1.25)
        mixed.sum().backward()
    lane_B, key_2, layer = (torch.zeros(n, dtype=torch.int64) for n in (B, 2, 1))
    mask = lane_B, key_2, layer, 3, 2**13  # place and threshold
    names = ["_scale_kernel", "_bits_kernel"]
    with _compiled_instead(kernels, names, capability) as mask_kernels:
        kernels.lane_dropout_scale(*mask, [B, T, S], dtype)
        for num_keys in (S + 1, S):  # rows of whole words, and others
            kernels.lane_dropout_bits(*mask, [B, H, T, num_keys])
    for kernel in (*attention_kernels, *mask_kernels):
        assert kernel.result is not None
        yield kernel.result


if __name__ == "__main__":
    capability, dtype, *sizes = sys.argv[1:]
    for result in compile_kernels(int(capability), getattr(torch, dtype), *map(int, sizes)):
        print(json.dumps(asdict(result)), flush=True)
