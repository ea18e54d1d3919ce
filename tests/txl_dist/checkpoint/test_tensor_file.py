"""The streamed safetensors files are those of the library, without a second copy in memory."""

import hashlib
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from txl_dist.checkpoint import tensor_file
from txl_dist.checkpoint.tensor_file import write_tensors

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
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", block_bytes)
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
