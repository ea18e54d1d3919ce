"""The public API: which names `txl_dist` exports, and that the example of its docstring runs."""

import ast
import re
import textwrap
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import txl_dist
from tests.support.training_runs import TINY

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "python.md"
PUBLIC = {
    "EvaluationSpec",
    "EvaluationSettings",
    "LanePlan",
    "Memory",
    "ModelConfig",
    "Reading",
    "RunConfig",
    "Sampling",
    "SegmentStream",
    "TextLimits",
    "TrainSpec",
    "TransformerXL",
    "evaluate",
    "evaluation_spec",
    "find_launcher",
    "find_model",
    "generate_texts",
    "generate_tokens",
    "load_manifest",
    "load_run_config",
    "open_split",
    "open_tokenizer",
    "prompt_tokens",
    "relative_effective_context_length",
    "write_exported",
}


def test_these_names_are_exported() -> None:
    assert set(txl_dist.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(txl_dist, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'train_model'"):
        _ = txl_dist.train_model


def docstring_example() -> str:
    doc = txl_dist.__doc__ or ""
    return textwrap.dedent("\n".join(line for line in doc.splitlines() if line[:4] == "    "))


def examples_of_the_page() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


def test_the_first_example_of_the_page_is_that_of_the_docstring() -> None:
    example = examples_of_the_page()[0]
    imports, _, rest = example.partition("\n\n")
    statements = [line.split("  #")[0] for line in rest.splitlines()]
    assert statements == docstring_example().splitlines()[: len(statements)]
    exec(imports, {})


def test_the_second_example_of_the_page_runs(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, example = examples_of_the_page()
    monkeypatch.chdir(tmp_path)
    for text, replacement in (
        ('"data/stdlib"', repr(str(dataset))),
        ("segments, 100", "segments, 3"),
        ("max_tokens=50", "max_tokens=5"),
        ("max_tokens=10_000", "max_tokens=20"),
    ):
        assert text in example
        example = example.replace(text, replacement)
    names: dict[str, Any] = {}
    exec(example, names)
    assert 0 < names["text"].num_tokens <= 5
    assert names["result"].sums.num_tokens == 19
    stored = txl_dist.find_model("models/mine")
    assert (stored.tgt_len, stored.reset) == (64, "document")
    model, _ = stored.load_with_tokenizer()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, names["model"].state_dict()[name]), name


def test_the_examples_of_the_page_have_every_public_name_but_those_of_other_pages() -> None:
    imported = {
        alias.name
        for example in examples_of_the_page()
        for node in ast.walk(ast.parse(example))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert PUBLIC - imported == {"Memory", "RunConfig", "relative_effective_context_length"}


def test_the_example_of_the_docstring_runs_and_its_run_can_be_evaluated(
    dataset: Path, tmp_path: Path
) -> None:
    example = docstring_example()
    assert len(example.splitlines()) == 6
    overrides = [f"data.path={dataset}", f"directory={tmp_path / 'run'}", "evaluation.split=null"]
    for text, replacement in (
        ('"quickstart"', repr(str(TINY))),
        ('["training.num_steps=100"]', repr([*overrides, "training.num_steps=4"])),
        ('"data/stdlib"', repr(str(dataset))),
        ("max_tokens=10_000", "max_tokens=20"),
        ("num_ranks=2", "num_ranks=1"),  # Half the processes to start.
    ):
        assert text in example
        example = example.replace(text, replacement)
    names: dict[str, Any] = {name: getattr(txl_dist, name) for name in PUBLIC}
    exec(example, names)
    end_of_document = names["tokenizer"].end_of_document
    assert names["prompt"][0] == end_of_document, "a prompt begins as documents in training do"
    new_tokens = list(islice(names["tokens"], 3))
    assert len(new_tokens) == 3
    assert all(0 <= token < names["model"].config.vocab_size for token in new_tokens)
    result = names["result"]
    assert result.sums.num_tokens == 19
    trained = txl_dist.find_model(tmp_path / "run")
    for kind in (str, Path):
        run, data = kind(tmp_path / "run"), kind(dataset)
        assert txl_dist.find_model(run).digest == trained.digest
        spec = txl_dist.evaluation_spec(run, data, max_tokens=20)
        settings, checkpoint = spec.settings, kind(spec.checkpoint)
        assert txl_dist.evaluate(spec) == result
        as_given = txl_dist.EvaluationSpec(
            checkpoint=checkpoint, data=data, settings=settings, batch_chunks=8
        )
        assert txl_dist.evaluate(as_given).sums == result.sums
        config = txl_dist.load_run_config(kind(TINY), overrides)
        assert config.run_path == tmp_path / "run"
        content = config.model_dump() | {"directory": run}
        content["data"] |= {"path": data}
        again = txl_dist.RunConfig.model_validate(content)
        assert txl_dist.TrainSpec(config=again, resume=checkpoint).resume == str(checkpoint)
    assert (result.tgt_len, result.mem_len) == (
        trained.tgt_len,
        trained.config.mem_len,
    ), "as in training"
