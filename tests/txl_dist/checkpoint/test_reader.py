"""A checkpoint is read as it was saved, or refused by file name; nothing is unpickled."""

from pathlib import Path

import pytest
import torch

from tests.txl_dist.checkpoint.saving import (
    CONFIG,
    NUM_LANES,
    memory,
    model,
    save,
    save_on_one_rank,
    whole,
)
from txl_dist.checkpoint.directory import CheckpointDirectory
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
)
from txl_dist.errors import CheckpointError
from txl_dist.model.config import ModelConfig
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.training.state import TrainState


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
        assert loaded_memory.keys() == memory(3, lane).keys()
        for name, tensor in memory(3, lane).items():
            assert torch.equal(loaded_memory[name], tensor)


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
    directory = CheckpointDirectory(tmp_path)
    directory.open()
    fragments = [whole(name, p.detach()) for name, p in model(3).named_parameters()]
    for fragment in fragments:
        fragment.states[AVERAGE] = fragment.master / 2
    tensors = Snapshot(fragments, [(lane, memory(3, lane)) for lane in range(NUM_LANES)])
    path = save_on_one_rank(directory, TrainState(step=3), tensors)

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
