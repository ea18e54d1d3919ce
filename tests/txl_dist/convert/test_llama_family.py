"""Llama, Mistral, Qwen2 and Qwen3: the numbers of transformers, there and back."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.testing import assert_close

from data_pipeline.tokenizers import ByteTokenizer
from data_pipeline.tokenizers.loading import OWN_NAME, load_tokenizer
from tests.support.commands import run_txl
from tests.support.small_models import MODERN, random_text, small_model
from tests.support.tokenizer_families import LIBRARY_OF, tokenizer_of_family
from txl_dist.convert.hub import write_for_transformers
from txl_dist.convert.llama_family import family_config, read_family
from txl_dist.convert.original_model import read_model
from txl_dist.convert.stored_model import FAMILY_READING, Reading, find_model, write_exported
from txl_dist.errors import CheckpointError, ConfigError, DataError
from txl_dist.generation.generate import prompt_tokens
from txl_dist.generation.text import GrowingText, TextLimits
from txl_dist.harness.model import TransformerXLModel
from txl_dist.model import encodings
from txl_dist.model.config import RotaryScaling
from txl_dist.model.transformer_xl import TransformerXL

B, N, VOCAB, WINDOW = 2, 29, 53, 7
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 20, "intermediate_size": 33, "num_hidden_layers": 3,
    "num_attention_heads": 4, "head_dim": 6, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.5}
WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, one head of keys, llama3": (
        "Llama",
        {"num_key_value_heads": 1, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    ),
    "llama, linear": ("Llama", {"num_key_value_heads": 4, "rope_parameters": LINEAR}),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": WINDOW}),
    "mistral without a window": (
        "Mistral",
        {"num_key_value_heads": 4, "sliding_window": None, "tie_word_embeddings": True},
    ),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2, "max_window_layers": 0, **WINDOWS}),
    "qwen2 without a window": (
        "Qwen2",
        {"num_key_value_heads": 1, "tie_word_embeddings": True, "sliding_window": WINDOW},
    ),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "max_window_layers": 0, **WINDOWS}),
    "qwen3, a window in the last layers": (
        "Qwen3",
        {"num_key_value_heads": 4, "max_window_layers": 1, "tie_word_embeddings": True, **WINDOWS},
    ),
}


def random_model(kind: str, options: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """A model of transformers with random weights; gains and biases are random, too."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    return model.to(dtype)


def save(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory, max_shard_size="12KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    return directory


def readings(model: TransformerXL, ids_BN: Tensor) -> dict[str, Tensor]:
    """Logits in one pass, in segments with memory, and token by token with the KV cache."""
    ways = {"one pass": N, "segments of 8": 8, "token by token": 1}
    age_BN, results = torch.arange(N).expand(B, N), {}
    for name, tgt_len in ways.items():
        memory = model.inference_state(B) if tgt_len == 1 else model.empty_memory(B)
        logits = []
        for ids_BT, age_BT in zip(ids_BN.split(tgt_len, 1), age_BN.split(tgt_len, 1), strict=True):
            hidden_BTD, memory = model.hidden(ids_BT, age_BT, memory)
            logits.append(model.logits(hidden_BTD))
        results[name] = torch.cat(logits, dim=1)
    return results


def rms_norm(self: Any, x: Tensor) -> Tensor:
    """That of transformers, which computes it in fp32 for any dtype, in the dtype of x."""
    return self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()


@pytest.fixture
def fp32_angles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rotary tables of transformers, which computes them in fp32 for any dtype.

    For a text of N tokens in one pass: its first token has position 0, the memory is before it.
    """

    def prepare(config: Any, num_keys: int, like: Tensor, dropout: Any) -> Any:
        exponent = torch.arange(0, config.d_head, 2).float() / config.d_head
        frequency = 1.0 / config.rotary_base**exponent
        if config.rotary_scaling is not None:
            frequency = encodings.scaled_frequency(frequency, config.rotary_scaling)
        angle_SK = torch.arange(N - num_keys, N).float()[:, None] * frequency.repeat(2)
        return encodings.DistanceTerms(
            rotary_SK=(angle_SK.cos().to(like.dtype), angle_SK.sin().to(like.dtype))
        )

    monkeypatch.setattr(encodings.Rotary, "prepare", staticmethod(prepare))


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_logits_are_those_of_transformers_in_every_way_to_read(name: str, tmp_path: Path) -> None:
    theirs = random_model(*CASES[name])
    model, ids_BN = read_family(save(theirs, tmp_path)), random_text(B, N)
    expected = theirs(ids_BN).logits
    assert expected.std() > 0.3
    for way, logits in readings(model, ids_BN).items():
        assert_close(logits, expected, atol=1e-5, rtol=1e-5, msg=lambda m, way=way: f"{way}: {m}")


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
@pytest.mark.usefixtures("fp32_angles")
def test_in_float64_only_rotary_tables_and_norms_differ(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = random_model(*CASES[name])
    monkeypatch.setattr(type(theirs.model.norm), "forward", rms_norm)
    model, ids_BN = read_family(save(theirs, tmp_path)).double(), random_text(B, N)
    expected = theirs.double()(ids_BN).logits
    assert_close(readings(model, ids_BN)["one pass"], expected, atol=1e-9, rtol=1e-9)


def test_numbers_in_bf16_stay_exact(tmp_path: Path) -> None:
    theirs = random_model(*CASES["qwen3"], dtype=torch.bfloat16)
    model = read_family(save(theirs, tmp_path))
    table = theirs.model.embed_tokens.weight.detach()
    assert torch.equal(model.table.weights[0].detach(), table.float())


LEAVING: dict[str, dict[str, Any]] = {
    "qwen3": MODERN["modern"] | {"same_length": True},
    "qwen3, tied and scaled": MODERN["modern"] | {"same_length": True, "tie_weight": True},
    "mistral": MODERN["modern"] | {"same_length": True, "qk_norm": False},
    "llama": MODERN["modern"]
    | {
        "qk_norm": False,
        "d_model": 8,
        "mem_len": 40,
        "n_head": 4,
        "n_kv_head": 2,
        "rotary_base": 90.0,
        "rotary_scaling": RotaryScaling(kind="llama3", factor=3.0, original_len=16),
    },
    "qwen2": MODERN["modern"] | {"same_length": True, "qk_norm": False, "qkv_biases": True},
    "qwen3, two windows": MODERN["modern"]
    | {"same_length": True, "mem_len": 40, "mem_shares": (0.1, 1.0)},
}


@pytest.mark.parametrize("name", LEAVING)
@torch.no_grad()
def test_transformers_loads_what_is_exported_and_it_comes_back(name: str, tmp_path: Path) -> None:
    options = LEAVING[name] | {"vocab_size": 257, "norm_epsilon": 1e-5}
    model, ids_BN = small_model(**options).float(), random_text(B, N)
    window = min(model.config.mem_lens) if model.config.same_length else None
    first, second = tmp_path / "first", tmp_path / "second"
    write_for_transformers(first, model, ByteTokenizer(), 8, window=window, card=None)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(first)
    assert theirs.config.model_type == name.split(",", maxsplit=1)[0]
    # Random weights of this size have logits of up to 30.
    for logits in readings(model, ids_BN).values():
        assert_close(theirs(ids_BN).logits, logits, atol=2e-4, rtol=1e-4)
    stored = find_model(first)
    assert stored.config.mem_lens == model.config.mem_lens
    again, tokenizer = stored.load(stored.config)
    assert tokenizer is not None
    assert tokenizer.digest == ByteTokenizer().digest
    write_for_transformers(second, again, tokenizer, 8, window=window, card=None)
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (first / file).read_bytes() == (second / file).read_bytes(), file


@pytest.mark.parametrize("is_whole", [False, True])
def test_the_window_of_an_exported_model_is_that_of_its_training(
    tmp_path: Path, is_whole: bool
) -> None:
    """A memory and half a segment; none if it is of a model that read whole documents."""
    model = small_model(**MODERN["modern"]).float()
    reading = Reading(tgt_len=8, reset="document", whole_documents=is_whole)
    write_exported(tmp_path / "ours", model, None, reading)
    words = ("export", tmp_path / "ours", "--format", "transformers", "--out", tmp_path / "theirs")
    code, output = run_txl(*words, "--scores", "none.json")
    assert code == 2
    assert "--scores is for the model card of a run" in output
    code, output = run_txl(*words, "--json")
    assert code == 0, output
    assert json.loads(output)["window"] == (None if is_whole else model.config.mem_len + 4)


def test_an_export_in_bf16_and_in_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txl_dist.convert.hub.MAX_SHARD_BYTES", 400)
    model = small_model(**LEAVING["qwen3"]).float()
    write_for_transformers(tmp_path, model, None, 8, window=5, dtype=torch.bfloat16, card="a card")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.dtype == torch.bfloat16
    table = model.table.weights[0].detach() * 6**0.5
    assert torch.equal(theirs.model.embed_tokens.weight, table.bfloat16())
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 3
    assert read_family(tmp_path).config.n_layer == 2


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "class": ({"model_type": "gemma3"}, "model_type is 'gemma3'; of transformers, llama, mistral"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    "biases": ({"attention_bias": True}, "attention_bias=True is not supported"),
    "experts": ({"num_experts": 8}, "num_experts=8 is not supported"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config="),
    "partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
    "partial, new": (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "a rotation of a part of the channels",
    ),
    "rotation": ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn' is not supported"),
    "rotation, incomplete": ({"rope_parameters": {"rope_type": "llama3"}}, "factor=None; expected"),
    "rotation, two": (
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        "transformers ignores the first",
    ),
    "rotation, a list": ({"rope_parameters": [1, 2]}, r"the rotation \[1, 2\] is not supported"),
    "rotation, a factor": (
        {"rope_parameters": {"rope_type": "linear", "factor": "two"}},
        "factor='two'",
    ),
    "rotation, its base": ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta='x'"),
    "class, a list": ({"model_type": ["llama"]}, r"model_type is \['llama'\]"),
    "half a layer": ({"num_hidden_layers": 2.5}, "num_hidden_layers=2.5; expected a number from 1"),
    "too many layers": ({"num_hidden_layers": 2_000_000_000}, "expected a number from 1 to 65,535"),
    "layers": ({"layer_types": ["chunked_attention"] * 3}, "layer_types="),
    "windows": (
        {"use_sliding_window": True, "layer_types": None, "max_window_layers": "a"},
        "max_window_layers='a'; expected a number",
    ),
    "no size": ({"hidden_size": None}, "hidden_size=None; expected a number from 1"),
    "text for a size": ({"num_hidden_layers": "3"}, "num_hidden_layers='3'"),
    "heads": ({"num_key_value_heads": 3}, "n_kv_head=3 must divide n_head=4"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_of_another_function_is_refused_by_name(name: str) -> None:
    config = random_model(*CASES["qwen3"]).config.to_dict()
    change, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        family_config(config | change, origin="config.json")


def test_old_spellings_of_the_rotation_are_read() -> None:
    config = random_model("Llama", {}).config.to_dict()
    del config["rope_parameters"]
    old = config | {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    read = family_config(old, origin="config.json")
    assert (read.rotary_base, read.rotary_scaling) == (
        500.0,
        RotaryScaling(kind="linear", factor=2.0),
    )


GATE = "model.layers.1.mlp.gate_proj.weight"
DAMAGES: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda tensors: tensors.pop(GATE), f"misses {GATE}"),
    "superfluous": (lambda tensors: tensors.update(x=torch.ones(1)), "unknown to this arch.*: x"),
    "shape": (lambda tensors: tensors.update({GATE: torch.ones(3, 5)}), f"{GATE} has shape"),
    "NaN": (lambda tensors: tensors[GATE][2].fill_(torch.nan), f"{GATE} is NaN or Inf in 20 of"),
    "integers": (
        lambda tensors: tensors.update({GATE: torch.ones(33, 20).char()}),
        f"{GATE} is torch.int8",
    ),
    "another softmax": (
        lambda tensors: tensors.update({"lm_head.weight": torch.ones(VOCAB, 20)}),
        "lm_head.weight differs from model.embed_tokens.weight",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_weights_are_refused_by_name(name: str, tmp_path: Path) -> None:
    options = CASES["qwen3, a window in the last layers"]
    random_model(*options).save_pretrained(tmp_path)
    change, message = DAMAGES[name]
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        read_family(tmp_path)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "weights.bin"])
def test_an_index_names_only_safetensors_beside_it(name: str, tmp_path: Path) -> None:
    save(random_model(*CASES["qwen3"]), tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][GATE] = name
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"expected a \.safetensors file of this"):
        read_family(tmp_path)


def test_a_file_cut_off_is_refused(tmp_path: Path) -> None:
    random_model(*CASES["qwen3"]).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_family(tmp_path)
    shutil.move(path, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="Weights are read from safetensors only"):
        read_family(tmp_path)


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({}, r"distance_encoding=sinusoidal \(not rotary\)"),
        (MODERN["modern"] | {"memory": "tokens"}, "memory=tokens"),
        (MODERN["modern"] | {"cutoffs": (4,)}, r"cutoffs=\(4,\)"),
        (MODERN["modern"] | {"qkv_biases": True}, "qk_norm together with"),
        (
            MODERN["modern"] | {"mem_shares": (0.4, 1.0)},
            r"mem_shares=\[0.4, 1.0\] \(too many different windows",
        ),
    ],
    ids=str,
)
def test_what_transformers_cannot_compute_is_refused_by_setting(
    options: dict[str, Any], setting: str, tmp_path: Path
) -> None:
    model = small_model(**options).float()
    with pytest.raises(ConfigError, match=f"model.{setting}.*--format hf"):
        write_for_transformers(tmp_path / "out", model, None, 8, window=5, card=None)
    assert not (tmp_path / "out").exists()


def test_a_width_that_llama_does_not_allow_is_a_mistral(tmp_path: Path) -> None:
    model = small_model(**LEAVING["llama"] | {"d_model": 10}).float()
    write_for_transformers(tmp_path, model, None, 8, window=None, card=None)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (theirs.config.model_type, theirs.config.sliding_window) == ("mistral", None)
    assert read_family(tmp_path).config.mem_len == 40


# --- tokenizers -----------------------------------------------------------------------------------

TEXT = "def f(x):\n    return 'é。' * 3  # <|endoftext|> isn't\n"


@pytest.mark.parametrize("name", ["gpt2", "llama3", "qwen", "qwen2.5"])
def test_a_model_and_its_tokenizer_give_the_ids_of_transformers(name: str, tmp_path: Path) -> None:
    library = LIBRARY_OF[name]()
    end = library.token_to_id("<|endoftext|>" if name != "llama3" else "<|end_of_text|>")
    size = library.get_vocab_size() + 3  # more ids than tokens, as Qwen has
    options = CASES["qwen3"][1] | {"vocab_size": size, "eos_token_id": [end, 1]}
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**SIZES | options)
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "theirs")
    library.save(str(tmp_path / "theirs" / "tokenizer.json"))
    found = read_model(tmp_path / "theirs")
    assert found.tokenizer is not None
    assert (found.tokenizer.vocab_size, found.tokenizer.end_of_document) == (size, end)
    plain = TEXT.replace("<|endoftext|>", "")
    assert found.tokenizer.encode(plain).tolist() == library.encode(plain).ids
    assert end not in found.tokenizer.encode(TEXT)  # a text cannot end itself
    write_exported(tmp_path / "own", found.model, found.tokenizer, found.reading)
    assert find_model(tmp_path / "own").config == found.model.config
    # And back: special tokens are special again.
    out = tmp_path / "back"
    write_for_transformers(out, found.model, found.tokenizer, 8, window=WINDOW, card=None)
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert theirs(TEXT).input_ids == library.encode(TEXT).ids
    assert (theirs.eos_token_id, theirs.bos_token_id) == (end, end)
    assert {*theirs.all_special_ids} >= {end}
    assert found.tokenizer.decode([*found.tokenizer.encode(plain), size - 1]) == plain


BEGINNINGS: dict[str, tuple[str, list[str], dict[str, Any], bool]] = {
    "llama 2, template": ("llama2", ["<s>", "</s>"], {}, True),
    "llama 2, option": ("llama2", ["<s>", "</s>"], {"add_bos_token": True}, False),
    "llama 3": ("llama3", ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"], {}, True),
}
"""The family, its tokens that begin and end texts, options, and whether it has a template."""


def llama_with_beginnings(directory: Path, name: str) -> tuple[int, list[int]]:
    """Write a model whose texts begin with another token than the ones that end them."""
    family, tokens, options, has_template = BEGINNINGS[name]
    library = LIBRARY_OF[family]()
    library.add_special_tokens(tokens)
    begin, *ends = (library.token_to_id(token) for token in tokens)
    if has_template:
        library.post_processor = TemplateProcessing(
            single=f"{tokens[0]} $A", special_tokens=[(tokens[0], begin)]
        )
    ids = {"vocab_size": library.get_vocab_size(), "bos_token_id": begin, "eos_token_id": ends[0]}
    config = transformers.LlamaConfig(**SIZES | ids)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
    model.save_pretrained(directory)
    library.save(str(directory / "tokenizer.json"))
    names = {"bos_token": tokens[0], "eos_token": tokens[1]}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names, **options}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return begin, ends


@pytest.mark.parametrize("name", BEGINNINGS)
def test_texts_begin_and_end_as_in_transformers(name: str, tmp_path: Path) -> None:
    begin, ends = llama_with_beginnings(tmp_path / "theirs", name)
    stored = find_model(tmp_path / "theirs")
    model, tokenizer = stored.load_with_tokenizer()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    plain = TEXT.replace("<|endoftext|>", "")
    # transformers 4 obeys the option, 5.24 the template only.
    first = [] if BEGINNINGS[name][-1] else [begin]
    assert prompt_tokens(tokenizer, plain) == first + theirs(plain).input_ids
    assert (tokenizer.end_of_document, [*tokenizer.ends_of_text]) == (begin, ends)
    assert TransformerXLModel(tmp_path / "theirs").prefix_token_id == begin
    for token in (begin, *ends):
        text = GrowingText(tokenizer, TextLimits())
        text.add(token)
        assert text.finish_reason == "end_of_document"
    # And back, also through the format of this program.
    write_exported(tmp_path / "own", model, tokenizer, FAMILY_READING)
    (model, tokenizer), out = find_model(tmp_path / "own").load_with_tokenizer(), tmp_path / "back"
    write_for_transformers(out, model, tokenizer, 8, window=None, card=None)
    end = ends if len(ends) > 1 else ends[0]
    # Generation also ends where a document of the training here begins.
    for file, id_ in (("config.json", end), ("generation_config.json", [*ends, begin])):
        options = json.loads((out / file).read_text())
        assert (options["bos_token_id"], options["eos_token_id"]) == (begin, id_)
    again = transformers.AutoTokenizer.from_pretrained(out)
    assert (again.bos_token, again.eos_token) == (theirs.bos_token, theirs.eos_token)
    assert again(TEXT).input_ids == first + theirs(TEXT).input_ids
    assert again(plain, "b").input_ids[0] == begin
    (out / OWN_NAME).unlink()
    found = find_model(out).load_with_tokenizer()[1]
    assert found.digest == tokenizer.digest


@pytest.mark.parametrize("change", ["no template", "the end begins texts, too"])
def test_where_nothing_else_begins_texts_documents_begin_with_their_end(
    change: str, tmp_path: Path
) -> None:
    _, (end,) = llama_with_beginnings(tmp_path, "llama 2, template")
    file, options = {
        "no template": ("tokenizer.json", {"post_processor": None}),
        "the end begins texts, too": ("config.json", {"bos_token_id": end}),
    }[change]
    path = tmp_path / file
    path.write_text(json.dumps(json.loads(path.read_text()) | options))
    tokenizer = find_model(tmp_path).load_with_tokenizer()[1]
    assert (tokenizer.end_of_document, tokenizer.ends_of_text) == (end, ())
    assert "ends_of_text" not in tokenizer.to_json()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", [], "config.json must hold a JSON object"),
        ("config.json", {"eos_token_id": 10**6}, "1000000, which ends a text, is not the id"),
        ("tokenizer.json", {"model": {}}, "tokenizer.json is not a usable tokenizer"),
    ],
)
def test_options_of_a_text_that_are_malformed_are_refused_by_name(
    file: str, content: object, message: str, tmp_path: Path
) -> None:
    llama_with_beginnings(tmp_path, "llama 2, template")
    path = tmp_path / file
    old = json.loads(path.read_text())
    path.write_text(json.dumps(old | content if isinstance(content, dict) else content))
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("generation_config.json", {"eos_token_id": [10**6, None, "x"]}),
        ("generation_config.json", []),
        ("tokenizer_config.json", []),
    ],
    ids=str,
)
def test_what_no_token_of_a_text_depends_on_is_left_out(
    file: str, content: object, tmp_path: Path
) -> None:
    """Such as the options of a model whose vocabulary somebody has made smaller."""
    begin, ends = llama_with_beginnings(tmp_path, "llama 2, template")
    (tmp_path / file).write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.end_of_document, [*tokenizer.ends_of_text]) == (begin, ends)


@pytest.mark.parametrize("family", LIBRARY_OF)
def test_a_new_end_of_document_gets_a_name_that_no_token_has(family: str, tmp_path: Path) -> None:
    """A file of several special tokens, read without a model, gets an id after its vocabulary."""
    tokenizer = tokenizer_of_family(family)
    options = LEAVING["qwen3"] | {"vocab_size": tokenizer.vocab_size}
    write_for_transformers(
        tmp_path, small_model(**options).float(), tokenizer, 8, window=5, card=None
    )
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (tokenizer.end_of_document,) * 2
    assert theirs(theirs.eos_token).input_ids == [tokenizer.end_of_document]


def test_bytes_are_a_tokenizer_of_transformers(tmp_path: Path) -> None:
    model = small_model(**LEAVING["qwen3"], vocab_size=257).float()
    write_for_transformers(tmp_path, model, ByteTokenizer(), 8, window=5, card=None)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = TEXT.replace("<|endoftext|>", "\x00\x7f")
    assert theirs(text).input_ids == [*text.encode()]
    assert theirs.decode([*text.encode()]) == text
    assert theirs("<|endoftext|>").input_ids == [256]
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["model_input_names"] == ["input_ids", "attention_mask"]


def test_a_vocabulary_of_another_size_is_refused(tmp_path: Path) -> None:
    random_model(*CASES["qwen3"]).save_pretrained(tmp_path)
    model = small_model(**LEAVING["qwen3"], vocab_size=257).float()
    write_exported(tmp_path / "own", model, ByteTokenizer(), Reading())
    shutil.copy(tmp_path / "own" / "tokenizer.json", tmp_path / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"vocab_size=257.*vocab_size=53"):
        find_model(tmp_path)
