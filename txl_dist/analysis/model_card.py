"""The model card of `txl export --format hf`: what a checkpoint, its run and its data tell.

    checkpoint   model, settings, steps, digests of the data, ranks
    run          seconds (goodput.json), device (logs/rank-0.log), scores (evaluations/)
    dataset      its parts, if it still lies at `data.path` with the digest of the training
    --scores     results of `txl eval --json`; without it those that the run keeps (run_results.py)

Nothing is guessed: a fact that none of them has is left out. The first lines are the YAML that
model hubs read (https://huggingface.co/docs/hub/model-cards). Licence and language are never
written: no run knows them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.shards.manifest import ShardManifest, load_manifest
from data_pipeline.system.sources import is_url
from data_pipeline.tokenizers import Tokenizer
from data_pipeline.tokenizers.ids import IdTokenizer
from txl_dist.analysis.run_results import Evaluation
from txl_dist.checkpoint.directory import CheckpointDirectory, run_of
from txl_dist.checkpoint.manifest import CheckpointManifest
from txl_dist.config.data_config import dataset_paths
from txl_dist.config.redaction import redact_field
from txl_dist.convert.hub import FILE_NAME, require_supported
from txl_dist.errors import TxlError
from txl_dist.training.goodput import read_goodput
from txl_dist.training.run_log import read_log
from txl_dist.training.scores import ScoreTable, StepScore
from txl_dist.training.state import CorpusEntry, load_state

MEMORY_TEXTS = {
    "recurrent": "the inputs of every layer for the previous {mem_len} tokens",
    "tokens": "{memory_tokens} vectors that the model reads and writes as tokens",
    "recurrent+tokens": "the inputs of every layer for the previous {mem_len} tokens, and "
    "{memory_tokens} vectors that the model reads and writes as tokens",
}
_TRAINING = (
    "training.num_steps", "training.num_tokens", "training.num_epochs", "data.num_lanes",
    "data.lanes_per_step", "data.tgt_len", "data.reset", "training.backprop_segments", "seed",
    "precision", "deepspeed.zero_stage", "model.dropout", "model.dropatt",
)  # fmt: skip
"""Settings in the table; those of the optimizer follow."""
_DEVICE = re.compile(r"\d+ ranks? on (\w+)")
_SCORE_NAMES = ("perplexity", "bits_per_byte", "bits_per_token", "word_perplexity")


@dataclass(frozen=True, kw_only=True, slots=True)
class CardFacts:
    """Everything that a card shows."""

    name: str
    manifest: CheckpointManifest
    num_parameters: int
    tokenizer: Tokenizer
    corpora: Sequence[CorpusEntry]
    """What the run read at last."""
    datasets: Mapping[str, ShardManifest]
    """By digest: those that are still there."""
    weights: str
    tokens: int
    """Targets trained on."""
    train_seconds: float | None
    device: str | None
    validation: StepScore | None
    """The score that training computed for this step."""
    results: Sequence[Evaluation]


def read_facts(
    checkpoint: Path,
    manifest: CheckpointManifest,
    *,
    num_parameters: int,
    tokenizer: Tokenizer,
    weights: str,
    results: Sequence[Evaluation] = (),
    name: str,
) -> CardFacts:
    """The facts of a checkpoint. Its run directory may be gone.

    Raises ConfigError for a model that the standalone file cannot compute.
    """
    require_supported(manifest.architecture)
    state = load_state(checkpoint, manifest)
    corpora = state.phases[-1].corpora if state.phases else ()
    if (path := manifest.run.get("data.path")) and len(corpora) == 1:
        corpora = (
            corpora[0].model_copy(update={"name": str(path).rstrip("/").rpartition("/")[2]}),
        )
    run = run_of(checkpoint)
    goodput = read_goodput(run / "goodput.json") if run else None
    seconds = goodput.productive.get(manifest.step) if goodput else None
    scores = ScoreTable(CheckpointDirectory(run), is_due=lambda step: False) if run else None
    return CardFacts(
        name=name,
        manifest=manifest,
        num_parameters=num_parameters,
        tokenizer=tokenizer,
        corpora=corpora,
        datasets=_datasets(manifest, {corpus.digest for corpus in corpora}),
        weights=weights,
        tokens=state.tokens,
        train_seconds=seconds,
        device=_device(run) if run else None,
        validation=scores.get(manifest.step) if scores else None,
        # A split may have been scored twice, alone and with others.
        results=list({result.key: result for result in results}.values()),
    )


def card(facts: CardFacts) -> str:
    """The text of README.md."""
    sections = [_front_matter(facts), f"# {facts.name}", _summary(facts), _how_to_run(facts)]
    for title, section in (
        ("Model", _model(facts)),
        ("Data", _data(facts)),
        ("Training", _training(facts)),
        ("Scores", _scores(facts)),
        ("Intended use and limits", _limits(facts)),
    ):
        sections += [f"## {title}", section]
    return "\n\n".join(sections) + "\n"


def _front_matter(facts: CardFacts) -> str:
    # JSON is YAML: strings from names of runs and datasets need no other escaping.
    content: dict[str, Any] = {"library_name": "pytorch"}
    if not isinstance(facts.tokenizer, IdTokenizer):
        content["pipeline_tag"] = "text-generation"
    content["tags"] = ["transformer-xl", "recurrent-memory", "txl-dist"]
    if results := [_hub_result(result) for result in facts.results]:
        content["model-index"] = [{"name": facts.name, "results": results}]
    lines = (f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in content.items())
    return "\n".join(["---", *lines, "---"])


def _hub_result(result: Evaluation) -> dict[str, Any]:
    return {
        "task": {"type": "text-generation"},
        "dataset": {"name": _dataset_name(result), "type": f"sha256-{result.data_sha256[:12]}",
                    "split": result.split},
        "metrics": [
            {"type": name, "value": value, "args": {"protocol": result.protocol}}
            for name, value in _known(result)
        ],
    }  # fmt: skip


def _known(result: Evaluation) -> list[tuple[str, float]]:
    values = ((name, getattr(result, name)) for name in _SCORE_NAMES)
    return [(name, value) for name, value in values if value is not None]


def _dataset_name(result: Evaluation) -> str:
    match = re.match(r"split \S+ of (.*?) \(sha256 ", result.protocol)
    return match[1] if match else "the dataset of the digest"


def _summary(facts: CardFacts) -> str:
    return (
        f"A Transformer-XL language model with {facts.num_parameters:,} parameters, trained with "
        f"txl-dist for {facts.manifest.step:,} steps on {facts.tokens:,} tokens. "
        "It carries a memory from segment to segment of a text, as an argument and a result."
    )


def _how_to_run(facts: CardFacts) -> str:
    description = facts.tokenizer.description.model_dump()
    library = " and `pip install tokenizers`" if "tokenizer" in description else ""
    prompt = "60 62 64" if isinstance(facts.tokenizer, IdTokenizer) else "Once upon a time"
    return f"""## How to run it

`{FILE_NAME}` has the model, its memory, the tokenizer and generation in one file of Python. It
needs `pip install torch`{library}, and no other package. Nothing here is a pickle, and nothing
needs `trust_remote_code`: you import the file yourself, and can read it first.

```python
import torch
from transformer_xl import generate, load  # in this directory, or with it in sys.path

model, tokenizer = load(".")
print(generate(model, tokenizer, {json.dumps(prompt)}, max_tokens=100, seed=0))

memory = model.empty_memory(num_rows=1)
ids = torch.tensor([tokenizer.encode({json.dumps(prompt)})])
logits, memory = model(ids, memory)  # and so on, segment by segment
```

From a shell: `python {FILE_NAME} --prompt {json.dumps(prompt)}`. With txl-dist this directory is a
model like any other: `txl generate DIRECTORY --prompt TEXT`, `txl eval DIRECTORY DATA`."""


def _model(facts: CardFacts) -> str:
    config = facts.manifest.architecture
    memory = MEMORY_TEXTS[config.memory].format(**{
        name: getattr(config, name) for name in ("mem_len", "compression_rate", "memory_tokens")
    })  # fmt: skip
    if not config.has_memory:
        memory = "none: every segment is read by itself"
    description = facts.tokenizer.description.model_dump()
    rows = {
        "parameters": f"{facts.num_parameters:,}",
        "layers, width, heads": f"{config.n_layer}, {config.d_model}, "
        f"{config.n_head} of {config.d_head}",
        "feed-forward": f"{config.d_inner}, {config.feed_forward}",
        "block": f"recipe {config.recipe}, {config.norm}, "
        f"{'pre' if config.pre_lnorm else 'post'}-norm",
        "memory": f"`{config.memory}`: {memory}",
        "distances": config.distance_encoding,
        "segment": f"{facts.manifest.segment_len} tokens at a time in training",
        "vocabulary": f"{config.vocab_size:,} ids, tokenizer `{description['type']}`"
        + (f", adaptive softmax from ids {list(config.cutoffs)}" if config.cutoffs else ""),
        "weights": f"fp32, {facts.weights} of the training",
    }
    return _table(("", ""), rows.items())


def _data(facts: CardFacts) -> str:
    total = sum(corpus.weight for corpus in facts.corpora)
    rows = [
        (corpus.name, f"{corpus.tokens:,}", f"{corpus.weight / total:.1%}", f"`{corpus.digest}`")
        for corpus in facts.corpora
    ]
    parts = [
        f"Digest of all training data: `{facts.manifest.data_digest}`. A digest identifies a "
        "dataset of txl-dist: its texts, their order in the shards and the tokenizer."
    ]
    if rows:
        parts.append(_table(("corpus", "training tokens", "share", "sha256"), rows))
    for corpus in facts.corpora:
        if (dataset := facts.datasets.get(corpus.digest)) is not None:
            settings = dataset.settings
            recipe = f", recipe {settings.recipe}" if settings.recipe else ""
            splits = (
                (
                    name,
                    f"{entry.documents:,}",
                    f"{entry.tokens:,}",
                    f"{entry.text_bytes:,}" if dataset.has_text else "token ids, no text",
                )
                for name, entry in dataset.splits.items()
            )
            parts += [
                f"{corpus.name}: {dataset.input.documents:,} documents of {dataset.input.files:,} "
                f"files, tokenizer {settings.tokenizer}{recipe}.",
                _table(("split", "documents", "tokens", "bytes of text"), splits),
            ]
    return "\n\n".join(parts)


def _training(facts: CardFacts) -> str:
    run = facts.manifest.run
    names = [*_TRAINING, *sorted(name for name in run if name.startswith("optimizer."))]
    rows: list[tuple[str, str]] = [
        ("steps", f"{facts.manifest.step:,}"),
        ("tokens", f"{facts.tokens:,}"),
        ("written by", facts.manifest.written_by),
        ("ranks", f"{facts.manifest.num_ranks}"),
    ]
    if facts.device is not None:
        rows.append(("device of a rank", facts.device))
    if facts.train_seconds is not None:
        rows.append(("seconds of the steps", f"{facts.train_seconds:,.0f}"))
    values = ((name, redact_field(name.rpartition(".")[2], run.get(name))) for name in names)
    settings = [(f"`{name}`", json.dumps(value)) for name, value in values if value is not None]
    return _table(("", ""), [*rows, *settings])


def _scores(facts: CardFacts) -> str:
    parts = []
    for result in facts.results:
        scores = [(name, f"{value:.4f}") for name, value in _known(result)]
        parts += [_table(("score", "value"), scores), f"Protocol: {result.protocol}"]
    score = facts.validation
    if score is not None and score.nats is not None:
        limit = (
            "all of it" if score.max_tokens is None else f"its first {score.max_tokens:,} tokens"
        )
        parts.append(
            f"In training, after step {score.step:,}: {score.nats_per_token:.4f} nats per token "
            f"(perplexity {score.sums.perplexity:.2f}) on split `{score.split}`"
            + (f" of the dataset `{score.data_digest}`" if score.data_digest else "")
            + f", {limit}: {score.tokens_scored:,} tokens scored, mode exact, with the settings of "
            "training."
        )
    return "\n\n".join(parts) or "None were computed for these weights."


def _limits(facts: CardFacts) -> str:
    return (
        "The model continues text in the manner of its training data, whatever that contains. The "
        "objective of its training was the next token, and nothing else: not to follow "
        "instructions, to be correct, or to refuse. What this card does not list was not measured "
        "for it. The licence of the weights and the languages of the data are not recorded by the "
        f"program that wrote it. `{FILE_NAME}` computes without a cache or kernels: it is made to "
        "be read and to be correct, not to be fast."
    )


def _table(header: Sequence[str], rows: Any) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _datasets(manifest: CheckpointManifest, digests: set[str]) -> dict[str, ShardManifest]:
    """The datasets that are still at their paths, by digest."""
    found = {}
    for path in dataset_paths(manifest.run).values():
        if is_url(path):
            continue
        try:
            dataset = load_manifest(path)
        except (TxlError, OSError):
            continue  # moved, or of another machine: the card says less
        if dataset.digest in digests:
            found[dataset.digest] = dataset
    return found


def _device(run: Path) -> str | None:
    """The kind of device in the newest start of the log of rank 0."""
    with suppress(OSError):
        match = _DEVICE.match(read_log(run).ranks)
        return match[1] if match else None
    return None
