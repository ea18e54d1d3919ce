"""Models of the paper's code and of transformers compute what those compute; damaged files of every
format are refused by name, and code in them never runs.
"""

import json
import pickle
import shlex
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

from data_pipeline.system.files import sha256_file
from tests.support.commands import run_txl
from tests.support.documents import blocks
from tests.support.hostile_pickle import Hostile
from tests.support.replayed_models import (
    OWN_GOLDEN,
    golden_files,
    hf_directories,
    num_segments,
    original_arguments,
    read_arrays,
)
from tests.support.small_models import small_model
from tests.txl_dist.convert.example_files import golden_arrays, hf_copy, hf_weights, load, nats_of
from txl_dist.convert.original_model import (
    from_original,
    original_config,
    read_model,
    read_original,
    read_transformers,
    to_original,
)
from txl_dist.convert.stored_model import write_exported
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.model.transformer_xl import TransformerXL


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 cut off", b"\x80\x04\x95 cut off", b"text"])
def test_damaged_files(tmp_path: Path, data: bytes) -> None:
    source = hf_copy(tmp_path / "hf")
    (tmp_path / "bad.npz").write_bytes(data)
    (source / "pytorch_model.bin").write_bytes(data)
    for path in (source, tmp_path / "bad.npz"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_model(path)
    (source / "config.json").write_bytes(data)
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_model(source)


FILES = {path.stem: path for path in golden_files()}
SUPPORTED = [
    name for name, path in FILES.items() if original_arguments(path).get("attn_type", 0) == 0
]


# With ext_len, segments repeat the end of the last one: tests/txl_dist/model/test_golden.py.
CONTIGUOUS = [name for name in SUPPORTED if not original_arguments(FILES[name]).get("ext_len")]


@pytest.mark.parametrize("name", CONTIGUOUS)
def test_state_dict_of_the_original(name: str) -> None:
    arrays = read_arrays(FILES[name])
    segments = [
        (torch.from_numpy(arrays[f"input/{k}"]).t(), torch.from_numpy(arrays[f"target/{k}"]).t())
        for k in range(num_segments(arrays))
    ]
    nats = nats_of(read_original(FILES[name]).double(), segments)
    for k, nats_BT in enumerate(nats):
        assert_close(nats_BT, torch.from_numpy(arrays[f"nll/{k}"]).t(), rtol=0, atol=1e-10)


def test_ids_of_the_original_are_scored_by_the_commands_of_the_how_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One segment of 64 tokens, with a vocabulary of 50."""
    monkeypatch.chdir(tmp_path)
    ids = np.random.default_rng(0).integers(0, 49, 64)
    corpus = SimpleNamespace(vocab=range(50), test=torch.from_numpy(ids))
    monkeypatch.setattr(torch, "load", lambda path: corpus)
    page = blocks("docs/how_to/move_from_another_system.md")
    program, commands = (block.content for block in page if block.run_by)
    exec(program, {})
    unused = capsys.readouterr().out.split()[-1]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert run_txl("import", OWN_GOLDEN / "mem10.npz", "--out", "imported")[0] == 0
    small = commands.replace("267735", "50").replace("267734", unused)
    prepare, evaluate = (shlex.split(line)[1:] for line in small.splitlines())
    assert run_txl(*prepare)[0] == 0
    code, output = run_txl(*evaluate, "--json")
    assert code == 0, output

    model, _ = load(tmp_path / "imported")
    text = torch.tensor([[int(unused), *ids.tolist()]])
    (nats_BT,) = nats_of(model, [(text[:, :-1], text[:, 1:])])
    assert json.loads(output)["nats"] == pytest.approx(float(nats_BT.sum()), rel=1e-5)


def test_every_other_attention_of_the_original_is_rejected() -> None:
    for name in FILES.keys() - set(SUPPORTED):
        with pytest.raises(ConfigError, match="attn_type"):
            read_original(FILES[name])


def test_the_repository_has_both_kinds_of_the_originals_attention() -> None:
    kinds = [original_arguments(path)["attn_type"] for path in OWN_GOLDEN.glob("*.npz")]
    assert kinds.count(0) >= 10
    assert {1, 2} <= set(kinds)


def test_names_without_prefix(tmp_path: Path) -> None:
    arrays = golden_arrays("adapt_div2_tied_tieproj")
    plain = {"config_json": arrays["config_json"]}
    plain |= {name.removeprefix("sd/"): a for name, a in arrays.items() if name.startswith("sd/")}
    np.savez(tmp_path / "plain.npz", **plain)
    expected = read_original(OWN_GOLDEN / "adapt_div2_tied_tieproj.npz")
    loaded = read_original(tmp_path / "plain.npz")
    assert loaded.config == expected.config
    for name, weight in expected.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name


@pytest.mark.fault_row(23)
def test_arrays_with_code_are_rejected_before_it_runs(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    hostile = np.array([Hostile(mark)], dtype=object)
    np.savez(tmp_path / "bad.npz", **(golden_arrays("base_mem5") | {"sd/r_w_bias": hostile}))
    with pytest.raises(CheckpointError, match="plain arrays"):
        read_original(tmp_path / "bad.npz")
    assert not mark.exists()


def test_a_state_dict_without_its_config(tmp_path: Path) -> None:
    arrays = golden_arrays("base_mem5")
    del arrays["config_json"]
    np.savez(tmp_path / "bare.npz", **arrays)
    with pytest.raises(ConfigError, match=r"bare\.npz has no architecture.*config_json"):
        read_original(tmp_path / "bare.npz")


HF_DIRECTORIES = {path.name: path for path in hf_directories()}


def assert_nats_as_transformers(model: TransformerXL, directory: Path) -> None:
    expected = {
        key: torch.from_numpy(array)
        for key, array in read_arrays(directory / "expected.npz").items()
    }
    segments = [
        (expected[f"input/{k}"], expected[f"target/{k}"]) for k in range(num_segments(expected))
    ]
    assert segments
    for k, nats_BT in enumerate(nats_of(model, segments)):
        assert_close(nats_BT, expected[f"nll/{k}"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", HF_DIRECTORIES)
def test_transformers_directory(name: str) -> None:
    directory = HF_DIRECTORIES[name]
    assert_nats_as_transformers(read_transformers(directory), directory)


@pytest.mark.parametrize("kept", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("name", HF_DIRECTORIES)
def test_transformers_directory_of_safetensors_without_the_repeated_names(
    name: str, kept: int, tmp_path: Path
) -> None:
    directory = HF_DIRECTORIES[name]
    weights = transformers_weights(directory)
    names = defaultdict(list)
    for weight_name, tensor in weights.items():
        names[tensor.data_ptr()].append(weight_name)
    once = {same[kept]: weights[same[kept]].clone() for same in names.values()}
    shutil.copyfile(directory / "config.json", tmp_path / "config.json")
    save_file(once, tmp_path / "model.safetensors")
    assert_nats_as_transformers(read_transformers(tmp_path), directory)


def transformers_weights(directory: Path) -> dict[str, Tensor]:
    """Tied tensors share their memory where the file is a pickle."""
    safe = directory / "model.safetensors"
    if safe.exists():
        return load_file(safe)
    return torch.load(directory / "pytorch_model.bin", weights_only=True)


# --- names of tensors, there and back -------------------------------------------------------------

OPTIONS = [
    {},
    {"tie_weight": False, "n_layer": 3},
    {"d_embed": 3},
    {"d_embed": 3, "tie_projs": (True,)},
    {"d_embed": 3, "tie_weight": False, "pre_lnorm": True},
    {"untie_r": True},
    {"cutoffs": (2, 7)},
    {"cutoffs": (2, 7), "tie_weight": False, "d_embed": 3},
    {"cutoffs": (2, 7), "div_val": 2, "tie_projs": (False, True, True)},
    {"cutoffs": (4,), "div_val": 2, "tie_weight": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_conversion_and_its_inverse_restore_the_weights(options: dict) -> None:
    model = small_model(**options)
    original = to_original(model.state_dict(), model.config)
    restored = from_original(original, model.config)
    assert set(restored) == set(model.state_dict())
    for name, weight in model.state_dict().items():
        assert torch.equal(restored[name], weight), name


OTHER_BLOCKS: list[dict] = [
    {"norm": "rmsnorm"},
    {"pre_lnorm": True, "final_norm": True},
    {"qk_norm": True},
    {"qkv_biases": True},
    {"scale_embedding": False},
    {"feed_forward": "relu2"},
    {"biases": False},
    {"memory": "tokens"},
    {"mem_shares": (0.4, 1.0)},
    {"distance_encoding": "rotary"},
]


@pytest.mark.parametrize("options", OTHER_BLOCKS, ids=str)
def test_a_block_that_the_original_does_not_have_is_refused_by_name(options: dict) -> None:
    original = to_original(small_model().state_dict(), small_model().config)
    name, value = list(options.items())[-1]
    with pytest.raises(ValueError, match=f"^{name}="):
        from_original(original, small_model(**options).config)
    with pytest.raises(ConfigError, match=f"config.json: {name}="):
        original_config({"n_token": 11, name: value}, origin="config.json")


# --- what is refused by name ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"n_head": 0},
        {"d_model": "32"},
        {"d_model": 31},
        {"d_model": 2**62},
        {"n_layer": 10**9},
        {"vocab_size": 0},
        {"cutoffs": [60, 20]},
        {"tie_projs": [True] * 9},
        {"clamp_len": 1.5},
        {"attn_type": 2},
        {"model_type": "gpt2"},
    ],
    ids=str,
)
def test_an_invalid_config(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="|".join([*options, "vocabulary", "no model can have"])):
        read_transformers(hf_copy(tmp_path / "hf", config=options))


def test_the_epsilon_of_the_norms_is_that_of_the_file(tmp_path: Path) -> None:
    model = read_transformers(hf_copy(tmp_path / "hf", config={"layer_norm_epsilon": 0.1}))
    assert model.config.norm_epsilon == 0.1


@pytest.mark.parametrize("name", ["n_layer", "same_length", "untie_r", "tie_projs", "clamp_len"])
def test_an_option_that_is_missing_is_not_guessed(tmp_path: Path, name: str) -> None:
    source = hf_copy(tmp_path / "hf")
    options = json.loads((source / "config.json").read_text())
    del options[name]
    (source / "config.json").write_text(json.dumps(options))
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        read_transformers(source)


REPORTED_NAME = "layers.1.dec_attn.qkv_net.weight"
NAME = f"transformer.{REPORTED_NAME}"


@pytest.mark.fault_row(23)
@pytest.mark.parametrize("writer", ["torch", "pickle"])
def test_a_pickle_with_code_is_rejected_before_it_runs(tmp_path: Path, writer: str) -> None:
    source, mark = hf_copy(tmp_path / "hf"), tmp_path / "mark"
    hostile = hf_weights() | {NAME: Hostile(mark)}
    if writer == "torch":
        torch.save(hostile, source / "pytorch_model.bin")
    else:
        (source / "pytorch_model.bin").write_bytes(pickle.dumps(hostile))
    with pytest.raises(CheckpointError, match="never run"):
        read_transformers(source)
    assert not mark.exists()
    pickle.loads(pickle.dumps(hostile[NAME]))
    assert mark.exists(), "the rejected code does run when it is unpickled"


Tensors = dict[str, Any]


def read_damaged_transformers(folder: Path, damage: Callable[[Tensors], Tensors]) -> None:
    source = hf_copy(folder / "hf")
    torch.save(damage(hf_weights()), source / "pytorch_model.bin")
    read_transformers(source)


def read_damaged_original(folder: Path, damage: Callable[[Tensors], Tensors]) -> None:
    arrays = golden_arrays("base_mem5")
    weights = {
        name: torch.from_numpy(arrays.pop(name)) for name in [*arrays] if name.startswith("sd/")
    }
    np.savez(folder / "bad.npz", **arrays, **damage(weights))
    read_original(folder / "bad.npz")


def read_damaged_export(folder: Path, damage: Callable[[Tensors], Tensors]) -> None:
    """Other weights with a matching hash: a wrong file, not a flipped bit."""
    write_exported(folder, small_model(), None)
    save_file(damage(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["weights_sha256"] = sha256_file(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    load(folder)


FORMATS = {
    "transformers": (read_damaged_transformers, "transformer.", REPORTED_NAME),
    "original": (read_damaged_original, "sd/", REPORTED_NAME),
    "export": (read_damaged_export, "", "layers.1.feed_forward.up.weight"),
}
"""By format: its reader, the prefix of its names, and a weight as errors name it."""
DAMAGES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "NaN": (lambda x: torch.full_like(x, torch.nan), "{} is NaN or Inf in"),
    "one infinity": (lambda x: x.index_fill(0, torch.tensor([3]), torch.inf), "{} is NaN or Inf"),
    "another shape": (lambda x: x[:-1].clone(), "{} has shape"),
    "integers": (lambda x: x.long(), "{} is .*int64"),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_bad_weight_is_named_in_every_format(tmp_path: Path, kind: str, name: str) -> None:
    read, prefix, weight = FORMATS[name]
    damage, message = DAMAGES[kind]
    if (kind, name) == ("integers", "original"):
        message = "{} is array"  # only floats of an .npz become tensors
    with pytest.raises(CheckpointError, match=message.format(weight)):
        read(tmp_path, lambda x: x | {prefix + weight: damage(x[prefix + weight])})


@pytest.mark.parametrize("name", FORMATS)
def test_a_missing_or_unknown_weight_is_named_in_every_format(tmp_path: Path, name: str) -> None:
    read, prefix, weight = FORMATS[name]

    def exchange(tensors: Tensors) -> Tensors:
        kept = {each: x for each, x in tensors.items() if each != prefix + weight}
        return kept | {f"{prefix}layers.3.ghost": torch.zeros(2)}

    with pytest.raises(CheckpointError, match=rf"misses {weight} and has .*unknown.*3\.ghost"):
        read(tmp_path, exchange)


@pytest.mark.parametrize("name", ["crit.ghost", "bert.ghost"])
def test_an_unknown_weight_of_another_part(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="ghost"):
        read_damaged_transformers(tmp_path, lambda x: x | {name: torch.zeros(2)})


@pytest.mark.parametrize(
    "weight", [torch.zeros(96, 32).to_sparse(), "text"], ids=["sparse", "text"]
)
def test_a_weight_that_is_no_dense_tensor(tmp_path: Path, weight: object) -> None:
    with pytest.raises(CheckpointError, match=REPORTED_NAME):
        read_damaged_transformers(tmp_path, lambda x: x | {NAME: weight})


def test_tied_weights_that_differ(tmp_path: Path) -> None:
    name = "crit.out_layers.1.weight"
    with pytest.raises(CheckpointError, match=r"out_layers.1.weight differs from"):
        read_damaged_transformers(tmp_path, lambda x: x | {name: x[name] + 1})


def test_an_absurd_size_is_rejected_before_it_takes_memory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="shape"):
        read_transformers(hf_copy(tmp_path / "hf", config={"d_inner": 10**12}))
