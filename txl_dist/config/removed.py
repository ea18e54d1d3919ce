"""Settings and commands that earlier versions had, and what to use instead (docs/removed.md).

A removed setting that has the value which all runs have now is dropped silently, so configs and
checkpoints of earlier versions stay usable. Any other value is refused, with the way that works.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple


class Removed(NamedTuple):
    """What became of a setting."""

    remaining: Collection[Any]
    """The values that do what every run does now, or nothing that changes a result."""
    instead: str
    """What to use instead: a sentence without a full stop."""


_ASSOCIATIVE = "it belonged to `model.memory: associative`; use `tokens` or `recurrent+tokens`"
_USELESS = "leave it out: the loss was the same or lower without it"
_OLD_BLOCK = (
    "the recipe `modern` is the block of Qwen3 now, which does not have it; read models of the old "
    "block with txl-dist 0.10"
)
SETTINGS: dict[str, Removed] = {
    "model.d_memory_key": Removed((32,), _ASSOCIATIVE),
    "model.memory_decay": Removed((0.9,), _ASSOCIATIVE),
    "model.embedding_norm": Removed((False,), _USELESS),
    "model.zero_init": Removed((False,), _USELESS),
    "model.softcap": Removed((None,), _USELESS),
    "model.output_gate": Removed((False,), _OLD_BLOCK),
    "model.residual_scalars": Removed((False,), _OLD_BLOCK),
    "model.attention_scale": Removed((None,), _OLD_BLOCK),
    "model.residual_gate": Removed(("none",), _USELESS),
    "data.train_split": Removed(
        ("train",), "prepare the data with names of splits: txl prepare train=PATH valid=PATH"
    ),
    "data.cache_path": Removed(
        (None,),
        "copy the dataset to a disk of each node, or give data.path a URL: TXL_CACHE_DIR keeps "
        "what was read from it",
    ),
    "data.cache_bytes": Removed(range(2**63), "leave it out, as data.cache_path"),
    "data.prefetch_segments": Removed(range(2**31), "leave it out: 16 segments are read ahead"),
    "divergence.max_events_interval_steps": Removed(
        (1000,), "leave it out: divergence.max_events counts the last 1,000 steps"
    ),
    "evaluation.path": Removed(
        (None,),
        "prepare the split together with the training data (txl prepare train=PATH valid=PATH), or "
        "score the checkpoints by txl eval RUN DATA",
    ),
    "optimizer.ema_decay": Removed(
        (0.999,), "it belonged to `averaging: ema`; use `asgd`, the mean of the weights"
    ),
    "training.num_tokens": Removed(
        (None,),
        "give training.num_steps: the tokens divided by those of a step, the lanes of a step x "
        "data.tgt_len",
    ),
    "training.num_epochs": Removed(
        (None,), "give training.num_steps: txl train --dry-run says how many steps an epoch has"
    ),
    "training.changes": Removed(
        ((), [], "[]"),
        "stop the run at that step (training.num_steps), and continue it with the new settings and "
        "--allow-change, for example --allow-change data.num_lanes",
    ),
    "training.checkpoint_upload_timeout_seconds": Removed(
        (600.0,), "leave it out: it is 600 s, and the same command repeats the upload"
    ),
    "tracking.end_timeout_seconds": Removed(
        (30.0,),
        "set training.grace_seconds, the time that the end of a run also waits for MLflow; txl "
        "track sync RUN delivers the rest",
    ),
    "training.memory_device": Removed(
        ("default",), "the memory is stored with the weights; training.memory_dtype=bf16 halves it"
    ),
    "training.dropout_rng": Removed(
        ("lane",), "masks depend on seed, step and lane; on GPUs a kernel draws them"
    ),
    "training.cuda_graphs": Removed(
        (True, False),
        "training.compile=true records CUDA graphs where it may, training.compile=without_graphs "
        "does not",
    ),
    "training.profile_steps": Removed(
        (None,), "run a few steps in a profiler: nsys profile txl train CONFIG --on processes"
    ),
    "evaluation.on": Removed(
        ("ranks",), "set evaluation.split=null, and score the checkpoints by txl eval --watch RUN"
    ),
    "evaluation.max_waiting_checkpoints": Removed(
        (2,), "keep more checkpoints for txl eval --watch RUN by training.keep_checkpoints"
    ),
}
"""By dotted name."""
COMMANDS: dict[str, str] = {
    "bench data": "run benchmarks/data_speed.py of a checkout",
    "bench gpu": "run benchmarks/gpu.py of a checkout",
    "bench model": "run benchmarks/model_speed.py of a checkout",
    "bench recall --data": "leave it out: recall reads random token ids; txl recl measures on text",
    "bench recall --split": "leave it out, as bench recall --data",
    "data export": "write the documents as JSON lines with examples/export_documents.py",
    "attention --tgt-len": "leave it out: the text is read in segments as in training",
    "bench recall --batch": "leave it out: 16 windows are read at a time",
    "bench recall --seed": "leave it out: it is 0",
    "bench recall --tgt-len": "leave it out: the text is read in segments as in training",
    "config deploy --json": "take the names in the first column",
    "config init --json": "leave it out: the file is NAME.yaml",
    "config list --json": "take the names in the first column",
    "data push --json": "txl data inspect URL --json",
    "eval --scores": "leave it out: chunks of a run are kept in RUN/evaluations, those of other "
    "models in the directory of --out",
    "eval --weights": "leave it out for the average; for the weights of the last step use "
    'evaluation_spec(..., weights="last") in Python',
    "generate --batch": "leave it out: 8 prompts are continued at a time",
    "generate --precision": 'leave it out for fp32; bf16 is generate_texts(..., precision="bf16") '
    "in Python",
    "generate --out": "redirect the output: txl generate RUN --prompts FILE > results.jsonl",
    "prepare --min-freq": "leave out rare symbols by --vocab-size; recipe lm1b keeps its minimum",
    "recl --batch": "leave it out: 16 windows are read at a time",
    "recl --clamp-len": "leave it out: models are read with their own clamp_len",
    "recl --precision": "leave it out: losses are computed in fp32",
    "recl --r": "leave it out: r is 0.1, 0.5 and 1; in Python relative_effective_context_length "
    "takes any",
    "recl --seed": "leave it out: it is 0",
    "report --generate": "let the newest checkpoint continue a text by txl generate RUN --prompt",
    "report --results": "score the checkpoint in its run directory, whose results are shown; the "
    "tables and figures of txl recl and txl attention are in their --out",
    "job submit --env": "set the variable in the environment of the nodes, where `ray start` runs",
    "doctor --data": "txl data verify DATA --on ADDRESS reads the dataset on the nodes; ranks with "
    "other data are refused at their start",
    "doctor --min-free-gib": "leave it out: the free space is shown, less than 10 GiB is noted",
    "report --to-mlflow": "mlflow artifacts log-artifact --local-file RUN/report.html --run-id ID "
    "with MLFLOW_TRACKING_URI; txl status RUN says both",
    "report --json": "txl status RUN --json; the page is RUN/report.html",
    "track sync --json": "exit code 0: MLflow has everything; RUN/tracking.json has the run's id",
    "track sync --timeout-seconds": "leave it out, and end the command earlier by Ctrl-C",
    "data rebuild": "prepare the corpus again: the same corpus and options give the same bytes",
}
"""What to use instead, by the words of the command after `txl`."""
PAGE = "docs/removed.md"


def without_removed(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by name, nested or dotted, without the removed ones that change nothing."""
    return {
        name: without_removed(value, f"{prefix}{name}.") if isinstance(value, Mapping) else value
        for name, value in settings.items()
        if (gone := SETTINGS.get(prefix + name)) is None or value not in gone.remaining
    }
