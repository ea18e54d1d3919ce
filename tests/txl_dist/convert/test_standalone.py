"""The standalone file computes what the model computes, and imports nothing of this project."""

import ast
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from data_pipeline.shards.manifest import PrepareSettings
from data_pipeline.tokenizers import ByteTokenizer, Tokenizer, train_tokenizer
from data_pipeline.tokenizers.byte_char_word import LINE_END, UNKNOWN_WORD, WordTokenizer
from data_pipeline.tokenizers.ids import IdTokenizer
from data_pipeline.tokenizers.pretrained import HARD_STRINGS
from tests.support.small_models import MODERN, SHORT_AND_LONG, VOCAB_SIZE, random_text, small_model
from txl_dist.convert import standalone
from txl_dist.convert.hub import ENCODINGS, FILE_NAME, MEMORIES, require_supported, write_for_hub
from txl_dist.convert.stored_model import Reading
from txl_dist.errors import ConfigError
from txl_dist.generation.generate import generate_texts
from txl_dist.generation.text import Sampling, TextLimits
from txl_dist.model.choices import DISTANCE_ENCODINGS
from txl_dist.model.config import ModelConfig
from txl_dist.model.transformer_xl import TransformerXL

ADAPTIVE = {"cutoffs": (4, 9), "div_val": 2, "d_embed": 8, "tie_projs": (False, True, False)}
GENTLE = MODERN["modern"]
"""The recipe's scale is made for wide heads. With 4 numbers per head it makes rounding errors of
fp32 grow from segment to segment, in our model as well."""
CASES: dict[str, dict[str, Any]] = {
    "paper": {},
    "paper, adaptive": ADAPTIVE,
    "paper, clusters of one table": {"cutoffs": (4,), "d_embed": 4, "tie_projs": (True,)},
    "paper, untied": {"tie_weight": False, "untie_r": True, "cutoffs": (5,), "pre_lnorm": True},
    "evaluation": {"same_length": True, "clamp_len": 3},
    **(MODERN | {"modern": GENTLE}),
    "memories of two lengths": SHORT_AND_LONG,
    "no memory": {"mem_len": 0},
    "absolute": {"distance_encoding": "absolute", "mem_len": 0},
    "shaw": {"distance_encoding": "shaw", "clamp_len": 4},
    "alibi": {"distance_encoding": "alibi", "clamp_len": 6, "d_embed": 4},
    "tokens": {"memory": "tokens"},
    "recurrent+tokens": {"memory": "recurrent+tokens", "pre_lnorm": True, "norm": "rmsnorm"},
    "recurrent+tokens, pre-norm": {"memory": "recurrent+tokens", "pre_lnorm": True},
}
NUM_ROWS, SEGMENTS = 2, (4, 4, 3, 1, 4, 4, 4, 5)


def export(directory: Path, model: TransformerXL, tokenizer: Tokenizer | None = None) -> None:
    reading = Reading(tgt_len=4, reset="document")
    write_for_hub(directory, model, tokenizer, reading, card="# A model\n")


def expected(model: TransformerXL, ids: list[Tensor], starts: list[Tensor]) -> Tensor:
    """Logits [B, N, V] of our model, which counts no ages by itself."""
    memory, logits = model.empty_memory(NUM_ROWS), []
    age_B = torch.zeros(NUM_ROWS, dtype=torch.int64)
    for ids_BT, starts_BT in zip(ids, starts, strict=True):
        age_BT = torch.empty_like(ids_BT)
        for column, start_B in enumerate(starts_BT.unbind(1)):
            age_B = age_B.masked_fill(start_B, 0)
            age_BT[:, column] = age_B
            age_B = age_B + 1
        with torch.no_grad():
            hidden_BTD, memory = model.hidden(ids_BT, age_BT, memory)
            logits.append(model.logits(hidden_BTD))
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize(("seed", "name"), enumerate(CASES))
def test_logits_are_those_of_our_model_over_segments_and_documents(
    seed: int, name: str, tmp_path: Path
) -> None:
    text_BN = random_text(NUM_ROWS, sum(SEGMENTS))
    start_BN = torch.zeros_like(text_BN, dtype=torch.bool)
    # Documents that begin inside a segment, at its first token, and twice in one segment.
    start_BN[0, 6] = start_BN[1, 8] = start_BN[1, 13] = start_BN[1, 14] = True
    ids, starts = (list(x.split(SEGMENTS, dim=1)) for x in (text_BN, start_BN))
    ours = small_model(seed=seed, **CASES[name]).float().eval()
    export(tmp_path, ours)
    module = runpy.run_path(str(tmp_path / FILE_NAME))
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        model, tokenizer = module["load"](tmp_path, dtype=dtype)
        assert tokenizer is None
        memory, logits = None, []
        for ids_BT, starts_BT in zip(ids, starts, strict=True):
            before = {} if memory is None else {n: x.clone() for n, x in memory.items()}
            previous = memory
            logits_BTV, memory = model(ids_BT, memory, starts_BT)
            logits.append(logits_BTV)
            assert all(torch.equal(previous[n], x) for n, x in before.items()), "changed in place"
        logits_BNV = torch.cat(logits, dim=1)
        assert logits_BNV.dtype == dtype
        difference_BNV = logits_BNV - expected(ours.to(dtype), ids, starts)
        assert difference_BNV.abs().max() <= tolerance


def test_every_memory_and_encoding_that_can_be_exported_is_compared() -> None:
    configs = [ModelConfig(**({"vocab_size": VOCAB_SIZE} | options)) for options in CASES.values()]
    assert {config.memory for config in configs} == {*MEMORIES}
    assert {config.distance_encoding for config in configs} == {*ENCODINGS} == {*DISTANCE_ENCODINGS}


@pytest.mark.parametrize(
    "name",
    ["paper", "modern", "no memory", "absolute", "recurrent+tokens"],
)
def test_it_draws_the_same_tokens(name: str, tmp_path: Path) -> None:
    model = small_model(**CASES[name]).float().eval()
    ids = IdTokenizer(VOCAB_SIZE, end_of_document=0, names={1: "one", 2: "two"})
    export(tmp_path, model, ids)
    module = runpy.run_path(str(tmp_path / FILE_NAME))
    loaded, tokenizer = module["load"](tmp_path)
    for options in ({"temperature": 0}, {"temperature": 0.8}):
        # A prompt of several segments, and one token more than two of them afterwards.
        (ours,) = generate_texts(
            model, ids, ["one two 3 one two 4"], tgt_len=4, sampling=Sampling(**options),
            limits=TextLimits(max_tokens=9), seed=5,
        )  # fmt: skip
        drawn = module["generate"](
            loaded, tokenizer, "one two 3 one two 4", max_tokens=9, seed=5, **options
        )
        assert drawn == ours.text


@pytest.mark.parametrize("kind", MEMORIES)
def test_a_memory_can_be_stored_and_its_rows_selected(kind: str, tmp_path: Path) -> None:
    export(tmp_path, small_model(memory=kind))
    model, _ = standalone.load(tmp_path, dtype=torch.float64)
    first_BT, second_BT = random_text(3, 8).split(4, dim=1)
    _, memory = model(first_BT, None)
    logits_BTV, _ = model(second_BT, memory)
    stored = load_tensors(save_tensors(memory))
    rows = [2, 0]
    again_BTV, _ = model(second_BT[rows], {name: x[rows] for name, x in stored.items()})
    torch.testing.assert_close(again_BTV, logits_BTV[rows])


WORDS = ["the", "tide", UNKNOWN_WORD, LINE_END, "comes"]
TEXTS = ["the tide\ncomes  in\n\n the\ntide", "\n\n", "", "tide", " the \n", *HARD_STRINGS]


def tokenizers() -> dict[str, Tokenizer]:
    def trained(name: str) -> Tokenizer:
        settings = PrepareSettings(tokenizer=name, vocab_size=280 if name == "bpe" else None)
        return train_tokenizer(settings, lambda: iter(["the tide comes in, the tide goes out"]))

    return {
        "byte": ByteTokenizer(),
        "char": trained("char"),
        "bpe": trained("bpe"),
        "word": WordTokenizer(WORDS),
        "word, both": WordTokenizer(WORDS, lines="both", opens_documents=False),
    }


@pytest.mark.parametrize("name", tokenizers())
def test_its_tokenizer_gives_the_same_ids_and_texts(name: str) -> None:
    ours = tokenizers()[name]
    copy = standalone.Tokenizer(json.loads(ours.to_json()))
    assert (copy.end, copy.opens_documents) == (ours.end_of_document, ours.opens_documents)
    for written in TEXTS:
        ids = ours.encode(written).tolist()
        assert copy.encode(written) == ids
        assert copy.decode([ours.end_of_document, *ids]) == ours.decode(ids)


def test_it_imports_nothing_but_torch_and_the_standard_library() -> None:
    tree = ast.parse(Path(standalone.__file__).read_text("utf-8"))
    modules = [
        *(node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)),
        *(a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names),
    ]
    allowed = {"torch", "tokenizers", *sys.stdlib_module_names}
    assert {str(module).partition(".")[0] for module in modules} <= allowed


def test_what_it_cannot_compute_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="vocab_size=null"):
        require_supported(ModelConfig(vocab_size=None))
    with pytest.raises(ConfigError, match="memory=compressive is not in the standalone file"):
        require_supported(ModelConfig(memory="compressive"))


def test_a_prompt_needs_a_token() -> None:
    words = WordTokenizer(WORDS, opens_documents=False)
    tokenizer = standalone.Tokenizer(json.loads(words.to_json()))
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        standalone.generate(None, tokenizer, " ")  # type: ignore[arg-type]


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    export(tmp_path, small_model())
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(ValueError, match=r"model\.safetensors has sha256"):
        standalone.load(tmp_path)
