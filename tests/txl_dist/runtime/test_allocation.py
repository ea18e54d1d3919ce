"""Memory that a training process frees is used again, without new pages from the system."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource
import sys

import torch

from txl_dist.runtime.allocation import keep_freed_memory

if sys.argv[1] == "kept":
    assert keep_freed_memory()


def faults_of_a_step() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(int(mib * 2**18)) for mib in (0.5, 3, 50, 70)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


for _ in range(20):  # the heap grows until its free blocks have the right sizes: up to 10 steps
    faults_of_a_step()
print(faults_of_a_step())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the allocator of glibc")
def test_a_warm_step_has_no_page_faults_for_blocks_of_any_size() -> None:
    def faults(mode: str) -> int:
        command = [sys.executable, "-c", SCRIPT, mode]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert faults("kept") < 100
    assert faults("returned") > 100, "the test would not notice memory that is returned"
