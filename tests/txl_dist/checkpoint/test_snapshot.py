"""A snapshot takes the memory of its tensors, and less than one of them more."""

import subprocess
import sys

import pytest

SNAPSHOT = """
import sys, torch
from txl_dist.checkpoint.fragments import Fragment
from txl_dist.checkpoint.snapshot import Snapshot
from txl_dist.model.memory.recurrent import Memory
from txl_dist.training.step import TrainStep

def peak():
    status = open("/proc/self/status").read()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024

NUM_LANES, SHAPE, DTYPE = 16, (2**10, 2**10), getattr(torch, sys.argv[1])
step = object.__new__(TrainStep)
step.micro_batch_rows, step.lane_of_row = NUM_LANES, range(NUM_LANES)
layers = tuple(torch.ones(NUM_LANES, *SHAPE, dtype=DTYPE) for _ in range(2))
step.memories = [Memory(layers)]
weights = [Fragment(f"w{n}", SHAPE, 0, torch.ones(2**20), {}) for n in range(4)]
before = peak()
snapshot = Snapshot(weights, step.memory_of_lanes())
print(peak() - before, snapshot.num_bytes)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_peak_is_the_share_of_the_rank_plus_less_than_one_tensor(dtype: str) -> None:
    command = [sys.executable, "-c", SNAPSHOT, dtype]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    added, share = map(int, result.stdout.split())
    assert share == 4 * 2**20 * (4 + 16 * 2)
    assert added < share + 4 * 2**20 * 2, "the memory of one lane"
