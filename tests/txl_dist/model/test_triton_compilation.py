"""Our Triton kernels compile for GPUs, in the tiles that launches use.

The interpreter accepts more than the compiler, and knows neither registers nor shared memory. Runs
in a separate process, because TRITON_INTERPRET is read when triton is imported.
"""

import json
import os
import subprocess
import sys

import pytest

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""Shared memory of a multiprocessor of an A100 and an H100."""
MOST_SPILLED_BYTES = 164
"""Per thread. In the worst case, d_head 128 in fp32; bf16 at most 100 on an A100, 0 on an H100."""


@pytest.mark.slow
# 48: heads of 41 channels with their padding. They have the tiles of 64.
@pytest.mark.parametrize("d_head", [48, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_for_two_programs_per_multiprocessor(
    capability: int, dtype: str, d_head: int
) -> None:
    module = "tests.support.triton_compiler"
    command = [sys.executable, "-m", module, str(capability), dtype, str(d_head)]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    report = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    results = [json.loads(line) for line in report.stdout.splitlines()]
    assert [result["kernel"] for result in results] == [
        "forward_kernel",
        "query_gradient_kernel",
        "key_value_gradient_kernel",
        "_scale_kernel",
        "_bits_kernel",
    ]
    for result in results:
        assert result["spilled_bytes"] <= MOST_SPILLED_BYTES, result
        assert 2 * result["shared_bytes"] <= SHARED_BYTES[capability], result
