"""The model card of `txl export --format hf`: what a checkpoint and its run tell.

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
from txl_dist.checkpoint.directory import CheckpointDirectory, run_of
from txl_dist.checkpoint.manifest import CheckpointManifest
from txl_dist.config.redaction import redact_field
from txl_dist.convert.hub import FILE_NAME, require_supported
from txl_dist.evaluation.result import Result
from txl_dist.evaluation.scores import SCORES
from txl_dist.events import read_events
from txl_dist.training.goodput import WallTime
from txl_dist.training.scores import ScoreTable
from txl_dist.training.state import TrainState, load_state

MEMORY_TEXTS = {
    "recurrent": "the inputs of every layer for the previous {mem_len} tokens",
    "tokens": "{memory_tokens} vectors that the model reads and writes as tokens",
    "recurrent+tokens": "the inputs of every layer for the previous {mem_len} tokens, and "
    "{memory_tokens} vectors that the model reads and writes as tokens",
}
_TRAINING = (
    "training.num_steps", "data.num_lanes", "data.lanes_per_step", "data.tgt_len", "data.reset",
    "training.backprop_segments", "seed", "precision", "deepspeed.zero_stage", "model.dropout",
    "model.dropatt",
)  # fmt: skip
"""Settings in the table; those of the optimizer follow."""
_LIMITS = f"""The model continues text in the manner of its training data, whatever that contains.
The objective of its training was the next token, and nothing else: not to follow instructions, to
be correct, or to refuse. What this card does not list was not measured for it. The licence of the
weights and the languages of the data are not recorded by the program that wrote it. `{FILE_NAME}`
computes without a cache or kernels: it is made to be read and to be correct, not to be fast."""
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
class CardFacts:
    """What a card is written from."""

    name: str
    checkpoint: Path
    manifest: CheckpointManifest
    num_parameters: int
    tokenizer: Tokenizer
    weights: str
    """`last` or `averaged`."""
    results: Sequence[Result]


def card(facts: CardFacts) -> str:
    """The text of README.md. The run directory of the checkpoint may be gone.

    Raises ConfigError for a model that the standalone file cannot compute.
    """
    manifest = facts.manifest
    require_supported(manifest.architecture)
    state = load_state(facts.checkpoint, manifest)
    summary = (
        f"A Transformer-XL language model with {facts.num_parameters:,} parameters, trained with "
        f"txl-dist for {manifest.step:,} steps on {state.tokens:,} tokens. "
        "It carries a memory from segment to segment of a text, as an argument and a result."
    )
    is_text = not isinstance(facts.tokenizer, IdTokenizer)
    has_library = "tokenizer" in facts.tokenizer.description.model_dump()
    how_to_run = _HOW_TO_RUN.format(
        file=FILE_NAME,
        library=" and `pip install tokenizers`" if has_library else "",
        prompt=json.dumps("Once upon a time" if is_text else "60 62 64"),
    )
    sections = {
        "How to run it": how_to_run,
        "Model": _table(("", ""), _model(facts)),
        "Data": _data(manifest, state),
        "Training": _table(("", ""), _training(facts, state)),
        "Scores": "\n\n".join(_scores(facts)) or "None were computed for these weights.",
        "Intended use and limits": _LIMITS,
    }
    parts = [_front_matter(facts), f"# {facts.name}", summary]
    parts += [f"## {title}\n\n{text}" for title, text in sections.items()]
    return "\n\n".join(parts) + "\n"


def _front_matter(facts: CardFacts) -> str:
    # JSON is YAML: strings from names of runs and datasets need no other escaping.
    content: dict[str, Any] = {"library_name": "pytorch"}
    if not isinstance(facts.tokenizer, IdTokenizer):
        content["pipeline_tag"] = "text-generation"
    content["tags"] = ["transformer-xl", "recurrent-memory", "txl-dist"]
    results = [
        {
            "task": {"type": "text-generation"},
            "dataset": {
                "name": PurePosixPath(result.data).name or "the dataset of the digest",
                "type": f"sha256-{result.data_sha256[:12]}",
                "split": result.split,
            },
            "metrics": [
                {"type": name, "value": value, "args": {"protocol": result.protocol}}
                for name, value in result.known_scores.items()
            ],
        }
        for result in facts.results
    ]
    if results:
        content["model-index"] = [{"name": facts.name, "results": results}]
    lines = (f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in content.items())
    return "\n".join(["---", *lines, "---"])


def _model(facts: CardFacts) -> Iterator[tuple[str, str]]:
    config = facts.manifest.architecture
    memory = "none: every segment is read by itself"
    if config.has_memory:
        names = ("mem_len", "compression_rate", "memory_tokens")
        values = {name: getattr(config, name) for name in names}
        memory = MEMORY_TEXTS[config.memory].format(**values)
    tokenizer = facts.tokenizer.description.model_dump()["type"]
    softmax = f", adaptive softmax from ids {list(config.cutoffs)}" if config.cutoffs else ""
    norm = "pre" if config.pre_lnorm else "post"
    heads = f"{config.n_head} of {config.d_head}"
    yield "parameters", f"{facts.num_parameters:,}"
    yield "layers, width, heads", f"{config.n_layer}, {config.d_model}, {heads}"
    yield "feed-forward", f"{config.d_inner}, {config.feed_forward}"
    yield "block", f"recipe {config.recipe}, {config.norm}, {norm}-norm"
    yield "memory", f"`{config.memory}`: {memory}"
    yield "distances", config.distance_encoding
    yield "segment", f"{facts.manifest.segment_len} tokens at a time in training"
    yield "vocabulary", f"{config.vocab_size:,} ids, tokenizer `{tokenizer}`{softmax}"
    yield "weights", f"fp32, {facts.weights} of the training"


def _data(manifest: CheckpointManifest, state: TrainState) -> str:
    corpora = state.phases[-1].corpora if state.phases else ()
    total = sum(corpus.weight for corpus in corpora)
    # A single corpus has no name.
    path = str(manifest.run.get("data.path") or "").rstrip("/").rpartition("/")[2]
    rows = [
        (path or c.name, f"{c.tokens:,}", f"{c.weight / total:.1%}", f"`{c.digest}`")
        for c in corpora
    ]
    text = (
        f"Digest of all training data: `{manifest.data_digest}`. A digest identifies a "
        "dataset of txl-dist: its texts, their order in the shards and the tokenizer."
    )
    table = _table(("corpus", "training tokens", "share", "sha256"), rows) if rows else ""
    return f"{text}\n\n{table}".rstrip()


def _training(facts: CardFacts, state: TrainState) -> Iterator[tuple[str, str]]:
    manifest, run = facts.manifest, run_of(facts.checkpoint)
    yield "steps", f"{manifest.step:,}"
    yield "tokens", f"{state.tokens:,}"
    yield "written by", manifest.written_by
    yield "ranks", f"{manifest.num_ranks}"
    with suppress(OSError):
        events = read_events(run) if run else []
        starts = [event.start for event in events if event.start]
        yield from (("device of a rank", start.device) for start in starts[-1:])
        seconds = WallTime.of(events).productive.get(manifest.step)
        if seconds is not None:
            yield "seconds of the steps", f"{seconds:,.0f}"
    names = [*_TRAINING, *sorted(name for name in manifest.run if name.startswith("optimizer."))]
    for name in names:
        value = redact_field(name.rpartition(".")[2], manifest.run.get(name))
        if value is not None:
            yield f"`{name}`", json.dumps(value)


def _scores(facts: CardFacts) -> Iterator[str]:
    for result in facts.results:
        known = result.known_scores.items()
        rows = ((SCORES[name].label, SCORES[name].text(value)) for name, value in known)
        yield _table(("score", "value"), rows)
        yield f"Protocol: {result.protocol}"
    if (run := run_of(facts.checkpoint)) is None:
        return
    score = ScoreTable(CheckpointDirectory(run), is_due=lambda step: False).get(facts.manifest.step)
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
