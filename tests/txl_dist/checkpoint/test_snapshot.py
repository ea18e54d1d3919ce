"""A snapshot takes the memory of its tensors and less than one more; its files are safetensors."""

import hashlib
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from txl_dist.checkpoint import tensors
from txl_dist.checkpoint.tensors import write_tensors

SNAPSHOT = """
import sys, torch
from txl_dist.checkpoint.tensors import Fragment
from txl_dist.checkpoint.tensors import Snapshot
from txl_dist.model.memory.recurrent import RecurrentMemory
from txl_dist.training.step import TrainStep

def peak():
    status = open("/proc/self/status").read()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024

NUM_LANES, SHAPE, DTYPE = 16, (2**10, 2**10), getattr(torch, sys.argv[1])
step = object.__new__(TrainStep)
step.micro_batch_rows, step.lanes_in_turns = NUM_LANES, [range(NUM_LANES)]
layers = tuple(torch.ones(NUM_LANES, *SHAPE, dtype=DTYPE) for _ in range(2))
step.memories = [[RecurrentMemory(layers)]]
weights = [Fragment(f"w{n}", SHAPE, 0, torch.ones(2**20), {}) for n in range(4)]
before = peak()
snapshot = Snapshot(weights, step.memory_of_lanes())
arrays = [array for kind in snapshot._tensors.values() for array in kind.values()]
print(peak() - before, sum(array.nbytes for array in arrays))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_peak_is_the_share_of_the_rank_plus_less_than_one_tensor(dtype: str) -> None:
    command = [sys.executable, "-c", SNAPSHOT, dtype]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    added, share = map(int, result.stdout.split())
    assert share == 4 * 2**20 * (4 + 16 * 2)
    assert added < share + 4 * 2**20 * 2, "the memory of one lane"


ARRAYS = {
    "b/exp_avg": np.arange(35, dtype=np.float32).reshape(5, 7),
    "a": np.array([1.5, -0.0, 3e38], dtype=np.float32),
    "lane-00001": np.zeros((2, 0, 3), dtype=np.float32),
    "scalar": np.array(4.25, dtype=np.float32),
    'a "quoted" name, é': np.ones((1, 2), dtype=np.float32),
    "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
}


@pytest.mark.parametrize("block_bytes", [8, 2**20])
def test_the_file_equals_that_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(tensors, "BLOCK_BYTES", block_bytes)
    entry = write_tensors(tmp_path / "ours", ARRAYS, before_block=lambda: None)
    save_file({name: array.copy("C") for name, array in ARRAYS.items()}, tmp_path / "theirs")
    content = (tmp_path / "ours").read_bytes()
    assert content == (tmp_path / "theirs").read_bytes()
    assert (entry.bytes, entry.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    with safe_open(tmp_path / "ours", framework="numpy") as file:
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(file.get_tensor(name), array)


def test_writing_needs_no_second_copy(tmp_path: Path) -> None:
    arrays = {f"parameter {n}": np.ones(250_000 + n, dtype=np.float32) for n in range(8)}
    tracemalloc.start()
    try:
        write_tensors(tmp_path / "file", arrays, before_block=lambda: None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * 250_000, "less than one parameter"


def test_other_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="x has dtype float64"):
        write_tensors(tmp_path / "file", {"x": np.ones(3)}, before_block=lambda: None)
