"""A checkpoint comes back as it was saved, or is refused by name."""

import errno
import json
import math
import os
import random
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from data_pipeline.storage.manifest_file import manifest_bytes
from tests.txl_dist.checkpoint.saving import BEST, CONFIG, NUM_LANES, memory, model, save, whole
from txl_dist.checkpoint.directory import CheckpointDirectory, resolve_checkpoint
from txl_dist.checkpoint.fragments import Fragment
from txl_dist.checkpoint.manifest import load_checkpoint_manifest
from txl_dist.checkpoint.reader import (
    check_parameters,
    load_fragments,
    load_memory,
    load_model,
    verify_checkpoint,
)
from txl_dist.checkpoint.writer import update_state
from txl_dist.errors import CheckpointError, DivergedError
from txl_dist.model.config import ModelConfig
from txl_dist.model.transformer_xl import TransformerXL


def test_weights_states_memory_and_progress_come_back(tmp_path: Path) -> None:
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
    for lane, found in load_memory(directory, manifest, range(NUM_LANES)).items():
        assert torch.equal(found, memory(3, lane))


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


def test_a_manifest_cannot_point_outside_its_directory(tmp_path: Path) -> None:
    directory = save(tmp_path, step=3)
    path = directory / "manifest.json"
    content = json.loads(path.read_text())
    del content["digest"]
    content["files"]["../../escape"] = content["files"]["tokenizer.json"]
    path.write_bytes(manifest_bytes(content))
    with pytest.raises(CheckpointError, match=r"files\.\.\./\.\./escape"):
        load_checkpoint_manifest(directory)


def test_an_edited_manifest_is_refused_though_it_is_well_formed(tmp_path: Path) -> None:
    directory = save(tmp_path, step=3)
    path = directory / "manifest.json"
    content = json.loads(path.read_text())
    content["state"]["position"] += 1
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="digest"):
        load_checkpoint_manifest(directory)


@pytest.mark.parametrize("step", [None, -1, "3", 3.5, True])
def test_a_manifest_without_a_valid_step_is_refused(tmp_path: Path, step: object) -> None:
    directory = save(tmp_path, step=3)
    path = directory / "manifest.json"
    content = json.loads(path.read_text())
    del content["digest"]
    content["state"]["step"] = step
    path.write_bytes(manifest_bytes(content))
    with pytest.raises(CheckpointError, match="wrong entry: state"):
        load_checkpoint_manifest(directory)


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
    given = (token_BT, token_BT.roll(-1, 1), age_BT)
    expected, _ = model(3)(*given, model(3).empty_memory(1))
    found, _ = loaded(*given, loaded.empty_memory(1))
    assert torch.equal(found, expected)
    assert loaded.config == CONFIG
    assert tokenizer.decode([104, 105]) == "hi"


def test_a_kill_at_any_file_operation_leaves_a_whole_newest_checkpoint(tmp_path: Path) -> None:
    sweep = [sys.executable, "-m", "tests.txl_dist.checkpoint.kill_sweep", str(tmp_path)]
    done = subprocess.run(sweep, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kill points" in done.stdout


def test_a_full_disk_names_the_place_and_keeps_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, step=1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("txl_dist.checkpoint.writer.save_file", full)
    with pytest.raises(CheckpointError, match=r"checkpoints.*No space left"):
        save(tmp_path, step=2)
    directory = CheckpointDirectory(tmp_path)
    assert directory.steps() == [1]
    assert not directory.staging.exists()
    verify_checkpoint(directory.at(1))


def test_a_file_that_cannot_grow_is_reported_like_a_full_disk(tmp_path: Path) -> None:
    """safetensors' own error, from a real limit, in a process of its own."""
    script = f"""
import resource, signal, sys
from pathlib import Path
from tests.txl_dist.checkpoint.saving import save
from txl_dist.errors import CheckpointError
save(Path({str(tmp_path)!r}), step=1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
try:
    save(Path({str(tmp_path)!r}), step=2)
except CheckpointError as error:
    sys.exit("could not be written" not in str(error))
sys.exit(2)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    assert done.returncode == 0
    directory = CheckpointDirectory(tmp_path)
    assert directory.steps() == [1]
    assert not directory.staging.exists()


@pytest.mark.parametrize("pointer", ["manifest.json", "LATEST"])
def test_a_disk_that_fills_up_late_is_a_checkpoint_error_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pointer: str
) -> None:
    save(tmp_path, step=1)
    open_file = Path.open

    def full(path: Path, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if "w" in mode and pointer in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return open_file(path, mode, *rest, **named)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(CheckpointError, match=r"No space left.*newest checkpoint, that of step"):
        save(tmp_path, step=2)
    newest = CheckpointDirectory(tmp_path).steps()[-1]
    assert verify_checkpoint(CheckpointDirectory(tmp_path).at(newest)).step == newest


@pytest.mark.parametrize("kind", ["weights", "optimizer", "memory"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_never_saved(
    tmp_path: Path, kind: str, value: float
) -> None:
    save(tmp_path, step=1)

    def poison(given: str, tensor: torch.Tensor) -> None:
        if given == kind:
            tensor.view(-1)[-1] = value

    with pytest.raises(DivergedError, match=rf"after step 2 .*{kind} .*rank 0"):
        save(tmp_path, step=2, change=poison)
    directory = CheckpointDirectory(tmp_path)
    assert directory.steps() == [1]
    assert not directory.staging.exists()


def test_checkpoint_files_follow_the_umask(tmp_path: Path) -> None:
    modes = {stat.S_IMODE(path.stat().st_mode) for path in save(tmp_path, step=3).iterdir()}
    (tmp_path / "neighbour").touch()
    assert modes == {stat.S_IMODE((tmp_path / "neighbour").stat().st_mode)}


def test_a_score_joins_its_checkpoint_and_changes_nothing_else(tmp_path: Path) -> None:
    path = save(tmp_path, step=3, evaluation_pending=True)
    before = verify_checkpoint(path)
    score = BEST.model_copy(update={"step": 3, "nats_per_token": 1.25})
    changes = {"best": score.model_dump(mode="json"), "evaluation_pending": False}
    update_state(CheckpointDirectory(tmp_path), 3, changes)
    assert verify_checkpoint(path) == before.model_copy(update={"state": before.state | changes})


def test_a_save_into_a_run_that_was_removed_is_an_error(tmp_path: Path) -> None:
    save(tmp_path / "run", step=1)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(CheckpointError, match="is gone: the run directory was removed or renamed"):
        save(tmp_path / "run", step=2, start=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["step-00000030", "superseded-step-00000004"])
def test_a_checkpoint_under_another_steps_name_is_refused(tmp_path: Path, name: str) -> None:
    copy = tmp_path / "checkpoints" / name
    shutil.copytree(save(tmp_path, step=3), copy)
    with pytest.raises(CheckpointError, match=rf"{name} holds the checkpoint of step 3"):
        verify_checkpoint(copy)
    copy.rename(tmp_path / "any other name")
    verify_checkpoint(tmp_path / "any other name")


def test_a_checkpoint_is_found_from_itself_its_run_or_its_pointer(tmp_path: Path) -> None:
    for step in (2, 11):
        save(tmp_path, step=step)
    CheckpointDirectory(tmp_path).point("BEST", 2)
    assert resolve_checkpoint(tmp_path).name == "step-00000011"
    assert resolve_checkpoint(tmp_path / "LATEST").name == "step-00000011"
    assert resolve_checkpoint(tmp_path / "BEST").name == "step-00000002"
    assert resolve_checkpoint(tmp_path / "checkpoints" / "step-00000002").name == "step-00000002"


@pytest.mark.parametrize("content", ["", "checkpoints/../../etc", "step-1", "\x00"])
def test_a_damaged_pointer_is_refused(tmp_path: Path, content: str) -> None:
    save(tmp_path, step=2)
    (tmp_path / "LATEST").write_text(content)
    with pytest.raises(CheckpointError, match="names no checkpoint"):
        resolve_checkpoint(tmp_path / "LATEST")
    assert resolve_checkpoint(tmp_path).name == "step-00000002"
