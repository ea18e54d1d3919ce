"""`txl bench`: what a user measures of a model."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from txl_dist.cli.options import (
    AsJson,
    Batch,
    Checkpoint,
    MemLen,
    Seed,
    TgtLen,
    path_argument,
    print_table,
    whole_numbers,
)
from txl_dist.cli.progress import WorkUnit, work_progress
from txl_dist.errors import ConfigError

if TYPE_CHECKING:
    from txl_dist.analysis.eval_speed import SpeedRow
    from txl_dist.analysis.recall import RecallResult
    from txl_dist.model.config import ModelConfig
    from txl_dist.model.transformer_xl import TransformerXL

app = typer.Typer(help="Measure speed, and how far back a model copies.", no_args_is_help=True)


@app.command()
def eval_speed(
    attention_length: Annotated[
        str, typer.Option(metavar="N,N,...", help="Tokens that each token attends to.")
    ] = "800,1800,2800,3800",
    tgt_len: Annotated[int, typer.Option(min=1, help="Segment of the reuse path.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each one times both paths once.")] = 5,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Measure this model instead of one with random weights.",
            parser=path_argument,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare reused states with reading a window for every token.

    Both paths run with the same weights, alternately, on a GPU or on one CPU thread, where CPU time
    counts. The ratio of times is compared with the ratio of their floating-point operations, and
    shown next to the paper's (arXiv:1901.02860, table 9: another model on a GPU). The share says
    how well reuse turns fewer operations into less time.

    Example: txl bench eval-speed --attention-length 800,1800 --tgt-len 64 --rounds 5
    """
    from txl_dist.analysis.eval_speed import bench_eval_speed
    from txl_dist.runtime.device import default_device

    lengths = whole_numbers("--attention-length", attention_length)
    model = _model_to_time(checkpoint).to(default_device())
    name, device = str(checkpoint or "random weights"), next(model.parameters()).device.type
    if not as_json:
        _print_header(model.config, name, device)
    rows = []
    # Without a display of progress, whose CPU time would count.
    for row in bench_eval_speed(model, attention_lengths=lengths, tgt_len=tgt_len, rounds=rounds):
        rows.append(row)
        if not as_json:
            _print_row(row)
    if as_json:
        content = {
            "rows": [asdict(row) for row in rows],
            "model": {"name": name, **asdict(model.config)},
            "device": device,
            "threads": 1 if device == "cpu" else None,
        }
        print(json.dumps(content, allow_nan=False))


def _model_to_time(checkpoint: Path | None) -> "TransformerXL":
    """The model of a checkpoint or a random one; the benchmark chooses the memory."""
    from txl_dist.analysis.eval_speed import MODEL
    from txl_dist.convert.stored_model import find_model
    from txl_dist.model.transformer_xl import TransformerXL

    if checkpoint is None:
        return TransformerXL(MODEL)
    stored = find_model(checkpoint)
    return stored.load(replace(stored.config, mem_len=0, same_length=False))[0]


def _print_header(config: "ModelConfig", name: str, device: str) -> None:
    clock = "CPU time of one thread" if device == "cpu" else "wall time"
    print(
        f"{name}: {config.n_layer} layers, d_model {config.d_model}, {config.n_head} x "
        f"{config.d_head} heads, d_inner {config.d_inner}, vocabulary {config.vocab_size}, "
        f"{config.distance_encoding}; {device}, {clock}"
    )
    print("ms per token: medians; share = time ratio / FLOP ratio")
    print(
        f"{'length':>6}  {'tgt_len':>7}  {'window ms':>10}  {'reuse ms':>9}  {'ratio':>7}  "
        f"{'paper':>6}  {'FLOPs':>7}  {'share':>6}  limit"
    )


def _print_row(row: "SpeedRow") -> None:
    from txl_dist.analysis.eval_speed import MAX_SHARE

    paper = f"{row.paper_ratio:,.0f}" if row.paper_ratio else "-"
    print(
        f"{row.attention_length:>6,}  {row.tgt_len:>7}  {row.ms_per_token_window:>10,.1f}  "
        f"{row.ms_per_token_reuse:>9.3f}  {row.ratio:>7,.0f}  {paper:>6}  "
        f"{row.flops_ratio:>7,.0f}  {row.share_of_flops_ratio:>6.3f}  {row.limit:g} to "
        f"{MAX_SHARE:g} {'holds' if row.holds else 'MISSED'}",
        flush=True,
    )


@app.command()
def recall(
    checkpoint: Checkpoint,
    distances: Annotated[
        str, typer.Option(metavar="N,N,...", help="Distances between the occurrences, in tokens.")
    ] = "16,32,64,128,256,512",
    seed: Seed = 0,
    batch: Batch = 16,
    tgt_len: TgtLen = None,
    mem_len: MemLen = None,
    as_json: AsJson = False,
) -> None:
    """Measure from how far back a model copies.

    The text is of random token ids. For each distance: the loss of a repeated span of tokens, the
    gain over the same text without the first occurrence, its 95 % interval over sequences, and its
    share of the loss.

    Example: txl bench recall runs/quickstart --distances 16,64,256
    """
    from txl_dist.analysis.recall import CUE, NUM_SEQUENCES, SPAN, measure_recall
    from txl_dist.analysis.windows import UNLIMITED, WindowScorer
    from txl_dist.convert.stored_model import find_model
    from txl_dist.runtime.device import default_device

    stored, lengths = find_model(checkpoint), whole_numbers("--distances", distances)
    try:
        config = stored.config.with_mem_len(mem_len)
    except ValueError as error:
        raise ConfigError(f"{stored.path}: {error}") from None
    model, tokenizer = stored.load(config)
    scorer = WindowScorer(model=model.to(default_device()), tgt_len=tgt_len or stored.tgt_len)
    with work_progress(WorkUnit("distances")) as show:
        result = measure_recall(
            scorer,
            lengths,
            seed=seed,
            excluded=[tokenizer.end_of_document] if tokenizer else [],
            batch_windows=batch,
            on_progress=lambda done, total: show("reading", done, total),
        )
    settings = {
        "checkpoint": str(stored.path),
        "text": "random tokens",
        "tgt_len": scorer.tgt_len,
        "mem_len": config.tokens_kept,
        "max_context": None if scorer.max_context == UNLIMITED else scorer.max_context,
        "distances": lengths,
        "span": SPAN,
        "cue": CUE,
        "num_sequences": NUM_SEQUENCES,
        "seed": seed,
    }
    if as_json:
        print(json.dumps({**settings, **asdict(result)}, allow_nan=False))
    else:
        _print_recall(result, settings)


def _print_recall(result: "RecallResult", settings: dict[str, object]) -> None:
    print(
        "{checkpoint} on {text}: span {span}, cue {cue}, {num_sequences} sequences, seed {seed}; "
        "tgt_len {tgt_len}, mem_len {mem_len}, at most ".format(**settings)
        + f"{settings['max_context'] or 'any number of'} tokens of context"
    )
    table = [["distance", "nats/token", "gain", "95 % interval", "share"]]
    table += [
        [
            f"{row.distance:,}",
            f"{row.nats:.4f}",
            f"{row.gain:.4f}",
            f"{row.low:.4f} to {row.high:.4f}",
            f"{row.share:.1%}",
        ]
        for row in result.rows
    ]
    print_table(table)
    print(f"control: {result.control_nats:.4f} nats/token without the first occurrence")
    print(
        f"reach: {result.reach:,} tokens (every distance up to it gains at least "
        f"{result.min_share:.0%})"
    )
