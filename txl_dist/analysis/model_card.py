"""The model card of `txl export --format transformers | hf`: what a checkpoint and its run tell.

    checkpoint   model, settings, steps, digests of the data, ranks
    run          seconds and device (events.jsonl), scores (evaluations/)
    --scores     results of `txl eval --json`; without it those that the run keeps

Nothing is guessed: a fact that none of them has is left out. The first lines are the YAML that
model hubs read (https://huggingface.co/docs/hub/model-cards). Licence and language are never
written: no run knows them.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from data_pipeline.tokenizers import Tokenizer
from data_pipeline.tokenizers.ids import IdTokenizer
from data_pipeline.tokenizers.loading import OWN_NAME
from data_pipeline.tokenizers.pretrained import library_json
from txl_dist.checkpoint.directory import CheckpointDirectory, run_of
from txl_dist.checkpoint.manifest import CheckpointManifest
from txl_dist.config.redaction import redact_field
from txl_dist.convert.hub import FILE_NAME, require_supported
from txl_dist.convert.stored_model import find_model
from txl_dist.errors import CheckpointError
from txl_dist.evaluation.result import EvaluationResult, kept_results, read_result
from txl_dist.evaluation.scores import SCORES
from txl_dist.events import WallTime, newest_attempt, read_events
from txl_dist.model.config import ModelConfig
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.training.scores import ScoreTable
from txl_dist.training.state import TrainState, load_state

_TRAINING = (
    "training.num_steps", "data.num_lanes", "data.lanes_per_step", "data.tgt_len", "data.reset",
    "training.backprop_segments", "seed", "precision", "deepspeed.zero_stage", "model.dropout",
    "model.dropatt",
)  # fmt: skip
"""Settings in the table; those of the optimizer follow."""
_LIMITS = """The model continues text in the manner of its training data, whatever that contains.
The objective of its training was the next token, and nothing else: not to follow instructions, to
be correct, or to refuse. What this card does not list was not measured for it. The licence of the
weights and the languages of the data are not recorded by the program that wrote it."""
_STANDALONE_LIMITS = f"""`{FILE_NAME}` computes without a cache or kernels: it is made to be read
and to be correct, not to be fast."""
_WITH_TRANSFORMERS = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("."), AutoTokenizer.from_pretrained(".")
ids = tokenizer({begin}{prompt}, return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=100)[0]))
```

{documents} With txl-dist this directory is a model like any other."""
_OF_THE_RUN = "Of the run in fp32 with its memory, not of these files:"
_WITHOUT_TOKENIZER = f"""`AutoModelForCausalLM.from_pretrained(".")` of transformers loads the
model. transformers has no tokenizer of its kind: token ids are those of `{OWN_NAME}`, which
txl-dist reads. With txl-dist this directory is a model like any other."""
_HOW_TO_RUN = """`{file}` has the model, its memory, the tokenizer and generation in one
file of Python. It needs `pip install torch`{library}, and no other package. Nothing here is a
pickle, and nothing needs `trust_remote_code`: you import the file yourself, and can read it first.

```python
import torch
from transformer_xl import generate, load  # in this directory, or with it in sys.path

model, tokenizer = load(".")
print(generate(model, tokenizer, {prompt}, max_tokens=100, seed=0))

memory = model.empty_memory(num_rows=1)
ids = torch.tensor([tokenizer.encode({prompt})])
logits, memory = model(ids, memory)  # and so on, segment by segment
```

From a shell: `python {file} --prompt {prompt}`. With txl-dist this directory is a
model like any other: `txl generate DIRECTORY --prompt TEXT`, `txl eval DIRECTORY DATA`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformersExport:
    """What a directory of transformers computes."""

    dtype: str
    window: int | None
    """Keys that a token sees, its own included; None: all."""
    nats: float | None = None
    """Per token of `split` of `data` in fp32, if the window was chosen by it."""
    data: str = ""
    split: str = ""

    def is_run(self, config: ModelConfig) -> bool:
        """Whether it is the function that the run has in fp32 with its memory."""
        has_window = config.same_length and {*config.mem_lens} == {self.window}
        return has_window and self.dtype == "float32"


def card(
    checkpoint: Path,
    manifest: CheckpointManifest,
    model: TransformerXL,
    tokenizer: Tokenizer,
    *,
    scores: Sequence[Path] = (),
    export: TransformersExport | None = None,
) -> str:
    """The text of README.md. The run directory of the checkpoint may be gone.

    `scores`: results of `txl eval --json`; without them all that the run keeps of these weights.
    `export`: of a directory that transformers loads; None for the standalone file.
    Raises ConfigError for a model that the standalone file cannot compute, and CheckpointError for
    the score of another model.
    """
    config = manifest.architecture
    if export is None:
        require_supported(config)
    stored, run = find_model(checkpoint), run_of(checkpoint)
    state = load_state(checkpoint, manifest)
    results = [read_result(path, model_digest=stored.digest) for path in scores]
    for path in kept_results(run) if run is not None and not scores else ():
        with suppress(OSError, CheckpointError):  # of other weights, or damaged
            results.append(read_result(path, model_digest=stored.digest))
    # A split may have been scored twice, alone and with others.
    results = list({result.key: result for result in results}.values())
    name = (run or checkpoint).resolve().name
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    is_text = not isinstance(tokenizer, IdTokenizer)
    description = tokenizer.description.model_dump()
    prompt = json.dumps("Once upon a time" if is_text else "60 62 64")
    score_texts = [*map(_score_of_result, results), *_score_of_training(run, manifest.step)]
    weights, of_files = "fp32", results
    if export:
        how_to_run = _with_transformers(tokenizer, prompt)
        how_to_run += "\n\n" + _window(export, config, manifest.segment_len)
        weights = f"{export.dtype}, window {export.window or 'none'}"
        of_files, score_texts = _scores_of_files(export, config, results, score_texts)
    else:
        library = " and `pip install tokenizers`" if "tokenizer" in description else ""
        how_to_run = _HOW_TO_RUN.format(file=FILE_NAME, library=library, prompt=prompt)
    has_memory = config.has_memory
    limits = _LIMITS if export else f"{_LIMITS} {_STANDALONE_LIMITS}"
    model_rows = {
        "parameters": f"{num_parameters:,}",
        **_architecture(manifest),
        "tokenizer": f"`{description['type']}`",
        "weights": f"{weights}, {stored.weights} of the training",
    }
    start = "" if state.origin is None else ", from the weights of another (see Training)"
    parts = [
        _front_matter(
            name,
            of_files,
            library="transformers" if export else "pytorch",
            is_text=is_text,
            has_memory=has_memory,
        ),
        f"# {name}",
        f"A language model with {num_parameters:,} parameters, trained with txl-dist for "
        f"{manifest.step:,} steps on {state.tokens:,} tokens{start}. In training it "
        + (
            "carried a memory from segment to segment of a text."
            if has_memory
            else "read every segment of a text by itself."
        ),
        f"## How to run it\n\n{how_to_run}",
        f"## Model\n\n{_table(('', ''), model_rows.items())}",
        f"## Data\n\n{_data(manifest, state)}",
        f"## Training\n\n{_table(('', ''), _training(run, manifest, state))}",
        "## Scores",
        *(score_texts or ["None were computed for these weights."]),
        f"## Intended use and limits\n\n{limits}",
    ]
    return "\n\n".join(parts) + "\n"


def _with_transformers(tokenizer: Tokenizer, prompt: str) -> str:
    if library_json(tokenizer) is None:
        return _WITHOUT_TOKENIZER
    begin, documents = "", "No token began a document in training."
    if tokenizer.opens_documents:
        # Of some models the tokenizer puts it there.
        begin = "" if tokenizer.ends_of_text else "tokenizer.bos_token + "
        documents = "Documents began with `tokenizer.bos_token` in training."
    return _WITH_TRANSFORMERS.format(begin=begin, prompt=prompt, documents=documents)


def _window(export: TransformersExport, config: ModelConfig, segment_len: int) -> str:
    sees = f"A token sees {export.window or 'all'} tokens up to itself"
    if config.same_length and export.window == min(config.mem_lens):
        return f"{sees}, as in training."
    longest = config.mem_len + segment_len
    saw = config.mem_len if config.same_length else f"up to {longest}, by its place in a segment"
    return f"{sees}. In training it saw {saw}: these files compute another function than the run."


def _scores_of_files(
    export: TransformersExport,
    config: ModelConfig,
    results: Sequence[EvaluationResult],
    texts: list[str],
) -> tuple[list[EvaluationResult], list[str]]:
    """The results that the exported files have, too, and the texts of all scores, so labelled."""
    # `--mem-len` of txl eval is another window.
    of_files = [result for result in results if result.mem_len == config.mem_len]
    if not export.is_run(config):
        of_files, texts = [], [*([_OF_THE_RUN] if texts else []), *texts]
    if export.nats is None:
        return of_files, texts
    of_window = (
        f"With the window of these files, in fp32: {export.nats:.5f} nats per token of split "
        f"`{export.split}` of `{PurePosixPath(export.data).name}`."
    )
    return of_files, [of_window, *texts]


def _front_matter(
    name: str,
    results: Sequence[EvaluationResult],
    *,
    library: str,
    is_text: bool,
    has_memory: bool,
) -> str:
    # JSON is YAML: strings from names of runs and datasets need no other escaping.
    content: dict[str, Any] = {"library_name": library}
    if is_text:
        content["pipeline_tag"] = "text-generation"
    of_memory = ["recurrent-memory"] if has_memory else []
    content["tags"] = ["transformer-xl", *of_memory, "txl-dist"]
    entries = [
        {
            "task": {"type": "text-generation"},
            "dataset": {
                "name": PurePosixPath(result.data).name or "the dataset of the digest",
                "type": f"sha256-{result.data_sha256[:12]}",
                "split": result.split,
            },
            "metrics": [
                {"type": metric, "value": value, "args": {"protocol": result.protocol}}
                for metric, value in result.known_scores.items()
            ],
        }
        for result in results
    ]
    if entries:
        content["model-index"] = [{"name": name, "results": entries}]
    lines = (f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in content.items())
    return "\n".join(["---", *lines, "---"])


def _architecture(manifest: CheckpointManifest) -> dict[str, str]:
    """What a reader compares; config.json has all of it."""
    config = manifest.architecture
    of_memory = {name: getattr(config, name) for name in config.memory_facts.settings}
    memory = ", ".join(f"{name} {value}" for name, value in of_memory.items() if value)
    return {
        "layers, width, heads": f"{config.n_layer}, {config.d_model}, {config.n_head} of "
        f"{config.d_head}",
        "feed-forward": f"{config.d_inner}, {config.feed_forward}",
        "block": f"recipe {config.recipe}, {config.norm}, {config.distance_encoding}",
        "memory": f"`{config.memory}`: {memory or 'none, every segment is read by itself'}",
        "segment": f"{manifest.segment_len} tokens at a time in training",
        "vocabulary": f"{config.vocab_size:,} ids",
    }


def _data(manifest: CheckpointManifest, state: TrainState) -> str:
    corpora = state.phases[-1].corpora if state.phases else ()
    total = sum(corpus.weight for corpus in corpora)
    # A single corpus has no name.
    path = str(manifest.run.get("data.path") or "").rstrip("/").rpartition("/")[2]
    rows = [
        (path or c.name, f"{c.tokens:,}", f"{c.weight / total:.1%}", f"`{c.digest}`")
        for c in corpora
    ]
    table = _table(("corpus", "training tokens", "share", "sha256"), rows)
    return (
        f"Digest of all training data: `{manifest.data_digest}`. A digest identifies a "
        f"dataset of txl-dist: its texts, their order in the shards and the tokenizer.\n\n{table}"
    )


def _training(
    run: Path | None, manifest: CheckpointManifest, state: TrainState
) -> Iterator[tuple[str, str]]:
    yield "steps", f"{manifest.step:,}"
    yield "tokens", f"{state.tokens:,}"
    if state.origin is not None:
        yield "started from", f"the weights of {state.origin}"
    yield "written by", manifest.written_by
    yield "ranks", f"{manifest.num_ranks}"
    events = read_events(run) if run else []
    if (attempt := newest_attempt(events)) is not None:
        yield "device of a rank", attempt.device
    seconds = WallTime.of(events).productive.get(manifest.step)
    if seconds is not None:
        yield "seconds of the steps", f"{seconds:,.0f}"
    names = [*_TRAINING, *sorted(name for name in manifest.run if name.startswith("optimizer."))]
    for name in names:
        value = redact_field(name.rpartition(".")[2], manifest.run.get(name))
        if value is not None:
            yield f"`{name}`", json.dumps(value)


def _score_of_result(result: EvaluationResult) -> str:
    known = result.known_scores.items()
    rows = ((SCORES[name].label, SCORES[name].text(value)) for name, value in known)
    return f"{_table(('score', 'value'), rows)}\n\nProtocol: {result.protocol}"


def _score_of_training(run: Path | None, step: int) -> Iterator[str]:
    if run is None:
        return
    score = ScoreTable(CheckpointDirectory(run), is_due=lambda _: False).get(step)
    if score is not None and score.nats is not None:
        part = "all of it" if score.max_tokens is None else f"its first {score.max_tokens:,} tokens"
        digest = f" of the dataset `{score.data_digest}`" if score.data_digest else ""
        yield (
            f"In training, after step {score.step:,}: {score.nats_per_token:.4f} nats per token "
            f"(perplexity {score.sums.perplexity:.2f}) on split `{score.split}`{digest}, {part}: "
            f"{score.tokens_scored:,} tokens scored, mode exact, with the settings of training."
        )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    cells = ([cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
