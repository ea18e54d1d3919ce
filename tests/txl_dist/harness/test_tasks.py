"""Tasks of lm-evaluation-harness over local text: perplexity of a document, and multiple choice."""

import json
import math
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

import txl_dist.harness.model  # noqa: F401  # registers `txl`
from data_pipeline.tokenizers import ByteTokenizer
from tests.support.commands import ENVIRONMENT
from tests.support.prepared import prepared
from tests.txl_dist.harness.small_harness_models import TGT_LEN, export
from txl_dist.evaluation.distributed import evaluate
from txl_dist.evaluation.spec import evaluation_spec

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
MODULES = ("this.py", "keyword.py", "abc.py", "bisect.py")


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def local_task(name: str, data: Path, **options: Any) -> dict[str, Any]:
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(data.parent)},
        "test_split": "test",
        **options,
    }


def rolling_task(data: Path) -> dict[str, Any]:
    """As the harness's task `wikitext`."""
    metrics = ("word_perplexity", "byte_perplexity", "bits_per_byte")
    return local_task(
        "local_documents", data, output_type="loglikelihood_rolling", doc_to_text="",
        doc_to_target="{{text}}", metric_list=[{"metric": metric} for metric in metrics],
    )  # fmt: skip


def choice_task(data: Path) -> dict[str, Any]:
    return local_task(
        "local_choice", data, output_type="multiple_choice", doc_to_text="{{beginning}}",
        doc_to_choice="{{choices}}", doc_to_target="label", target_delimiter="",
        metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
    )  # fmt: skip


def generation_task(data: Path) -> dict[str, Any]:
    return local_task(
        "local_generation", data, output_type="generate_until", doc_to_text="{{beginning}}",
        doc_to_target="{{choices[0]}}", metric_list=[{"metric": "exact_match"}],
        generation_kwargs={"until": ["\n"], "max_gen_toks": 12},
    )  # fmt: skip


def scores(model: str | Any, task: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Metrics of a task, and the responses of the model."""
    task_manager = TaskManager(include_defaults=False)
    results = simple_evaluate(
        model=model, tasks=[task], task_manager=task_manager, bootstrap_iters=0, **options
    )
    assert results is not None
    metrics = {
        key.partition(",")[0]: value
        for key, value in results["results"][task["task"]].items()
        if isinstance(value, float) and "stderr" not in key
    }
    responses = [sample["resps"] for sample in results["samples"][task["task"]]]
    return {"metrics": metrics, "responses": responses, "config": results["config"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and the two data sets of the tasks."""
    folder = tmp_path_factory.mktemp("harness")
    export(folder / "model", ByteTokenizer())
    texts = [(LIBRARY / name).read_text() for name in MODULES]
    write_jsonl(folder / "documents.jsonl", [{"text": text[:1500]} for text in texts])
    lines = [line for line in (LIBRARY / "textwrap.py").read_text().splitlines() if line.strip()]
    choices = [
        {
            "beginning": "\n".join(lines[n : n + 3]) + "\n",
            "choices": [lines[n + 3], lines[n + 40], lines[n + 50]],
            "label": 0,
        }
        for n in range(0, 60, 5)
    ]
    write_jsonl(folder / "choices.jsonl", choices)
    return folder


def close(metrics: dict[str, float]) -> dict[str, Any]:
    return {name: pytest.approx(value, rel=1e-6) for name, value in metrics.items()}


def test_a_document_has_the_perplexity_of_txl_eval(folder: Path, tmp_path: Path) -> None:
    """The protocols agree for one document that begins with its mark, read through the memory."""
    text = (LIBRARY / "this.py").read_text()
    prepared(tmp_path / "data", text)
    spec = evaluation_spec(
        folder / "model", str(tmp_path / "data"), split="train", tgt_len=None, mem_len=None, batch=4
    )
    sums = evaluate(spec).sums
    data = write_jsonl(tmp_path / "this.jsonl", [{"text": text}])
    arguments = {"checkpoint": str(folder / "model"), "batch_size": 2}
    harness = scores("txl", rolling_task(data), model_args=arguments)
    num_words = len(re.split(r"\s+", text))  # as the harness counts
    assert harness["metrics"] == close(
        {
            "bits_per_byte": sums.metrics["bits_per_byte"],
            "byte_perplexity": math.exp(sums.nats / len(text.encode())),
            "word_perplexity": math.exp(sums.nats / num_words),
        }
    )
    assert harness["config"]["tgt_len"] == TGT_LEN


@pytest.mark.slow
@pytest.mark.parametrize("windows", [{}, {"mem_len": 0, "tgt_len": 200}], ids=["memory", "windows"])
@pytest.mark.parametrize("kind", ["documents", "choices", "generation"])
def test_batches_and_workers_change_nothing(
    kind: str, windows: dict[str, int], folder: Path
) -> None:
    """Workers change no bit; another batch size can change the last digits of products."""
    data = folder / ("documents.jsonl" if kind == "documents" else "choices.jsonl")
    make = {"documents": rolling_task, "choices": choice_task, "generation": generation_task}
    task = make[kind](data)
    arguments = {"checkpoint": str(folder / "model"), **windows}
    one, eight = (
        scores("txl", task, model_args=arguments, batch_size=size, limit=None) for size in (1, 8)
    )
    assert eight["metrics"] == close(one["metrics"])
    assert len(one["metrics"]) == {"documents": 3, "choices": 2, "generation": 1}[kind]
    if kind == "generation":
        assert one["responses"] == eight["responses"]
    for num_workers in (2, 3):
        more = scores("txl", task, model_args=arguments | {"workers": num_workers}, batch_size=1)
        assert (more["metrics"], more["responses"]) == (one["metrics"], one["responses"])


@pytest.mark.slow
def test_the_command_line_of_the_harness_has_model_txl(folder: Path, tmp_path: Path) -> None:
    task = rolling_task(folder / "documents.jsonl")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "local.yaml").write_text(json.dumps(task))
    command = [sys.executable, "-m", "txl_dist.harness", "run", "--model", "txl"]
    options = ["--tasks", "local_documents", "--include_path", str(tmp_path / "tasks")]
    ended = subprocess.run(
        [*command, "--model_args", f"checkpoint={folder / 'model'},workers=2", *options],
        capture_output=True, text=True, check=False, env=ENVIRONMENT,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "bits_per_byte" in ended.stdout
    wrong = subprocess.run(
        [*command, "--model_args", "checkpoint=nowhere", *options],
        capture_output=True, text=True, check=False, env=ENVIRONMENT,
    )  # fmt: skip
    assert wrong.returncode == 4
    assert "nowhere" in wrong.stderr
