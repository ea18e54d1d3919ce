"""A checkpoint is read as it was saved, or refused by file name; a snapshot takes the memory of its
tensors and less than one more; its files are safetensors.
"""

import hashlib
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.txl_dist.checkpoint.saving import (
    CONFIG,
    NUM_LANES,
    fragments_of,
    memory,
    model,
    save,
    save_on_one_rank,
)
from txl_dist.checkpoint import tensors as module
from txl_dist.checkpoint.manifest import load_checkpoint_manifest
from txl_dist.checkpoint.tensors import (
    AVERAGE,
    Fragment,
    Snapshot,
    Weights,
    check_parameters,
    load_fragments,
    load_memory,
    load_model,
    verify_checkpoint,
    write_tensors,
)
from txl_dist.errors import CheckpointError
from txl_dist.model.config import ModelConfig
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.training.state import TrainState


def test_weights_states_memory_and_progress_are_loaded_as_saved(tmp_path: Path) -> None:
    directory, expected = save(tmp_path, step=3), fragments_of(3)
    manifest = verify_checkpoint(directory)
    assert (manifest.step, manifest.state["position"]) == (3, 12)
    loaded = fragments_of(4)
    load_fragments(directory, manifest, loaded)
    for actual, saved in zip(loaded, expected, strict=True):
        assert torch.equal(actual.master, saved.master)
        for state, tensor in saved.states.items():
            assert torch.equal(actual.states[state], tensor)
    for lane, loaded_memory in load_memory(directory, manifest, range(NUM_LANES)).items():
        assert loaded_memory.keys() == memory(3, lane).keys()
        for name, tensor in memory(3, lane).items():
            assert torch.equal(loaded_memory[name], tensor)


def test_any_range_of_a_parameter_can_be_read(tmp_path: Path) -> None:
    directory = save(tmp_path, step=3)
    manifest = load_checkpoint_manifest(directory)
    full = next(each for each in fragments_of(3) if each.name == "table.weights.0")
    for start, stop in ((0, 1), (7, 11), (0, full.stop), (full.stop - 1, full.stop)):
        part = Fragment("table.weights.0", full.shape, start, torch.zeros(stop - start), {})
        load_fragments(directory, manifest, [part])
        assert torch.equal(part.master, full.master[start:stop])


def test_another_models_checkpoint_is_refused_with_the_parameters_that_differ(
    tmp_path: Path,
) -> None:
    directory = save(tmp_path, step=3)
    other = ModelConfig(vocab_size=257, n_layer=2, d_model=8, n_head=3, d_head=2, d_inner=7)
    shapes = {name: tuple(p.shape) for name, p in TransformerXL(other).named_parameters()}
    with pytest.raises(CheckpointError, match=r"another model.*content_bias|attention"):
        check_parameters(directory, load_checkpoint_manifest(directory), shapes)


def test_a_loaded_model_scores_like_the_saved_one(tmp_path: Path) -> None:
    directory = save(tmp_path, step=3)
    loaded, tokenizer, _ = load_model(directory)
    token_BT, age_BT = torch.tensor([[256, 104, 105]]), torch.arange(3)[None]
    inputs = (token_BT, token_BT.roll(-1, 1), age_BT)
    expected, _ = model(3)(*inputs, model(3).empty_memory(1))
    nats_BT, _ = loaded(*inputs, loaded.empty_memory(1))
    assert torch.equal(nats_BT, expected)
    assert loaded.config == CONFIG
    assert tokenizer.decode([104, 105]) == "hi"


@pytest.mark.parametrize(("weights", "kind"), [("last", "weights"), ("averaged", "optimizer")])
def test_the_files_of_the_weights_that_are_loaded_are_verified(
    tmp_path: Path, weights: Weights, kind: str
) -> None:
    fragments = fragments_of(3)
    for fragment in fragments:
        fragment.states[AVERAGE] = fragment.master / 2
    tensors = Snapshot(fragments, [(lane, memory(3, lane)) for lane in range(NUM_LANES)])
    path = save_on_one_rank(tmp_path, TrainState(step=3), tensors)

    factor = 2 if weights == "averaged" else 1
    loaded, _, _ = load_model(path, weights=weights)
    for parameter, expected in zip(loaded.parameters(), model(3).parameters(), strict=True):
        assert torch.equal(parameter * factor, expected)
    (file,) = path.glob(f"{kind}*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{file.name} has sha256"):
        load_model(path, weights=weights)


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
    monkeypatch.setattr(module, "BLOCK_BYTES", block_bytes)
    entry = write_tensors(tmp_path / "ours", ARRAYS)
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
        write_tensors(tmp_path / "file", arrays)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * 250_000, "less than one parameter"


def test_other_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="x has dtype float64"):
        write_tensors(tmp_path / "file", {"x": np.ones(3)})
