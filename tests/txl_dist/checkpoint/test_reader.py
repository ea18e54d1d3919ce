"""A checkpoint is read as it was saved, or refused by file name; nothing is unpickled."""

import pickle
import random
from pathlib import Path

import pytest
import torch

from data_pipeline.storage.atomic_files import sha256_file
from tests.support.hostile_pickle import Hostile
from tests.txl_dist.checkpoint import saving
from tests.txl_dist.checkpoint.saving import CONFIG, NUM_LANES, memory, model, save, whole
from txl_dist.checkpoint.fragments import Fragment
from txl_dist.checkpoint.manifest import FileEntry, load_checkpoint_manifest
from txl_dist.checkpoint.reader import (
    check_parameters,
    load_fragments,
    load_memory,
    load_model,
    verify_checkpoint,
)
from txl_dist.errors import CheckpointError
from txl_dist.model.config import ModelConfig
from txl_dist.model.transformer_xl import TransformerXL


@pytest.mark.parametrize("writer", ["torch", "pickle"])
def test_a_pickle_instead_of_weights_is_refused_and_not_run(tmp_path: Path, writer: str) -> None:
    path, mark = saving.save(tmp_path / "run", step=1), tmp_path / "mark"
    weights = path / "weights-rank-00000.safetensors"
    if writer == "torch":
        torch.save({"weight": Hostile(mark)}, weights)
    else:
        weights.write_bytes(pickle.dumps(Hostile(mark)))
    manifest = load_checkpoint_manifest(path)
    entry = FileEntry(bytes=weights.stat().st_size, sha256=sha256_file(weights))
    files = manifest.files | {weights.name: entry}
    (path / "manifest.json").write_bytes(manifest.model_copy(update={"files": files}).to_json())
    with pytest.raises(CheckpointError, match=r"weights-rank-00000\.safetensors"):
        load_model(path)
    assert not mark.exists()


def test_weights_states_memory_and_progress_are_loaded_as_saved(tmp_path: Path) -> None:
    directory = save(tmp_path, step=3)
    manifest = verify_checkpoint(directory)
    expected = {name: whole(name, p.detach()) for name, p in model(3).named_parameters()}
    loaded = {
        name: Fragment(name, f.shape, 0, torch.zeros_like(f.master), zeros(f))
        for name, f in expected.items()
    }
    load_fragments(directory, manifest, loaded.values())

    assert (manifest.step, manifest.state["position"]) == (3, 12)
    for name, fragment in expected.items():
        assert torch.equal(loaded[name].master, fragment.master)
        for state, tensor in fragment.states.items():
            assert torch.equal(loaded[name].states[state], tensor)
    for lane, loaded_memory in load_memory(directory, manifest, range(NUM_LANES)).items():
        assert torch.equal(loaded_memory, memory(3, lane))


def zeros(fragment: Fragment) -> dict[str, torch.Tensor]:
    return {state: torch.zeros_like(tensor) for state, tensor in fragment.states.items()}


def test_any_range_of_a_parameter_can_be_read(tmp_path: Path) -> None:
    directory = save(tmp_path, step=3)
    manifest = load_checkpoint_manifest(directory)
    full = whole("table.weights.0", model(3).table.weights[0].detach())
    for start, stop in ((0, 1), (7, 11), (0, full.stop), (full.stop - 1, full.stop)):
        part = Fragment("table.weights.0", full.shape, start, torch.zeros(stop - start), {})
        load_fragments(directory, manifest, [part])
        assert torch.equal(part.master, full.master[start:stop])


def test_every_flipped_bit_is_noticed_before_use(tmp_path: Path) -> None:
    directory = save(tmp_path, step=3)
    files = sorted(directory.iterdir())
    draw = random.Random(5)
    for _ in range(150):
        path = draw.choice(files)
        original = path.read_bytes()
        damaged = bytearray(original)
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=path.name):
            verify_checkpoint(directory)
        path.write_bytes(original)
    verify_checkpoint(directory)


@pytest.mark.parametrize("kind", ["manifest.json", "weights", "optimizer", "memory", "tokenizer"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut"])
def test_every_missing_or_shortened_file_is_named(tmp_path: Path, kind: str, damage: str) -> None:
    directory = save(tmp_path, step=3)
    (path,) = [path for path in directory.iterdir() if path.name.startswith(kind)]
    if damage == "missing":
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes(b"" if damage == "empty" else content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=path.name):
        verify_checkpoint(directory)


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
