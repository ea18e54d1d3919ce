"""What a user measures of models: `txl recl`, `txl attention` and `txl bench`.

How much context models use, what they attend to, how fast they read, how far back they copy.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from data_pipeline.system.files import StagedDirectory, explain_disk_errors, write_synced
from txl_dist.cli.options import (
    CHECKPOINT_HELP,
    AsJson,
    Checkpoint,
    EvaluationData,
    MemLen,
    TgtLen,
    WorkUnit,
    checkpoint_path,
    listed_names,
    path_argument,
    print_table,
    require_order,
    staged_output,
    whole_numbers,
    work_progress,
)
from txl_dist.errors import ConfigError

if TYPE_CHECKING:
    from txl_dist.analysis.attention import AttentionByDistance
    from txl_dist.analysis.bench import RecallResult
    from txl_dist.analysis.plots import Figure
    from txl_dist.evaluation.spec import EvaluationSpec

bench_app = typer.Typer(
    help="Measure speed, and how far back a model copies.", no_args_is_help=True
)

R_VALUES = (0.1, 0.5, 1.0)
"""Fractions of hardest targets, for RECL; those of the paper."""
SPEED_ROW = "{:>6}  {:>7}  {:>10}  {:>9}  {:>7}  {:>6}  {:>7}  {:>6}  {}"
BATCH_WINDOWS = 16
"""Windows that `txl recl` and `txl bench recall` read at a time."""


# --- txl recl -------------------------------------------------------------------------------------


def recl(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(metavar="CHECKPOINT...", help=CHECKPOINT_HELP, parser=checkpoint_path),
    ],
    data: EvaluationData,
    split: Annotated[str, typer.Option(help="Split to sample targets from.")] = "valid",
    max_context: Annotated[
        int, typer.Option(min=2, max=10**6, help="Longest context in tokens.")
    ] = 512,
    delta: Annotated[
        int, typer.Option(min=1, help="Step between contexts; the first context is one step.")
    ] = 32,
    threshold: Annotated[
        float, typer.Option(min=0, max=1, help="RECL ends where a step gains less than this.")
    ] = 0.01,
    positions: Annotated[int, typer.Option(min=1, help="Targets to sample from the split.")] = 500,
    tgt_len: TgtLen = None,
    mem_len: MemLen = None,
    names: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Names of the models; default: their paths."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write recl.json, recl.png and recl.svg to this directory.",
            parser=path_argument,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how much context each model of a group uses.

    Prints the loss by context, and RECL. Each loss is that of one target after exactly c tokens,
    which the model reads with an empty memory in segments of tgt_len. RECL compares with the best
    model of the group at each context (arXiv:1901.02860, appendix C), so it is a property of the
    group. --mem-len applies to models trained with a memory. Intervals: 95 %, bootstrap over
    documents, or over targets if there are fewer than 10 documents.

    A target is read again for every context, which takes a while: fewer --positions or a larger
    --delta take less.

    Example: txl recl runs/memory runs/no_memory data/stdlib --max-context 512 --delta 32
    """
    require_order("recl", checkpoints)
    from txl_dist.analysis.recl import measure_group
    from txl_dist.convert.stored_model import find_model
    from txl_dist.evaluation.spec import evaluation_spec

    contexts = tuple(range(delta, max_context + 1, delta))
    if len(contexts) < 2:
        raise ConfigError(
            f"--max-context {max_context} has room for {len(contexts)} steps of --delta {delta}; "
            "RECL compares contexts one step apart, so take a smaller --delta"
        )
    model_names = listed_names("--names", names) if names else [*map(str, checkpoints)]
    if not len({*model_names}) == len(model_names) == len(checkpoints):
        raise ConfigError(
            f"{len(checkpoints)} models need as many different names, got {', '.join(model_names)}"
        )
    specs = [
        evaluation_spec(
            path,
            data,
            split=split,
            tgt_len=tgt_len,
            mem_len=mem_len if find_model(path).config.tokens_kept else None,
            batch=BATCH_WINDOWS,
        )
        for path in checkpoints
    ]
    with staged_output(out, "recl.json") as staged, work_progress(WorkUnit("targets")) as show:
        report = measure_group(
            dict(zip(model_names, specs, strict=True)),
            contexts,
            r_values=R_VALUES,
            threshold=threshold,
            num_positions=positions,
            seed=0,
            on_progress=lambda done, total: show("scoring", done, total),
        )
        content = json.dumps(report, allow_nan=False)
        if staged:
            from txl_dist.analysis.plots import plot_group

            _write(staged, "recl", content, plot_group(report))
    if as_json:
        print(content)
        return
    _print_recl(report)
    if out:
        print(f"recl.json, recl.png and recl.svg are in {out}")


def _write(staged: StagedDirectory, name: str, content: str, figure: "Figure") -> None:
    from txl_dist.analysis.plots import write_figure

    with explain_disk_errors(f"writing {name}.json and its plots", staged.directory):
        staging = staged.stage()
        plots = write_figure(figure, staging, name)
        write_synced(staging / f"{name}.json", content.encode())
        staged.publish([*plots, f"{name}.json"])


def _print_recl(report: dict[str, Any]) -> None:
    models = report["models"]
    print("mean nats per token after exactly c tokens, with half the width of its interval")
    rows = [["context", *(model["name"] for model in models)]]
    for column, context in enumerate(report["contexts"]):
        points = [model["curve"][column] for model in models]
        cells = [f"{p['nats']:.4f} ±{(p['high'] - p['low']) / 2:.4f}" for p in points]
        rows.append([f"{context:,}", *cells])
    print_table(rows)
    print(f"\nRECL in tokens, with its interval; group: {report['group']}")
    r_values = [f"RECL r={result['r']:g}" for result in models[0]["recl"]]
    rows = [["model", *r_values, "last gain ends"]]
    for model in models:
        cells = [
            f"{'>=' * each['is_lower_bound']}{each['recl']:,} ({each['low']:,}-{each['high']:,})"
            for each in model["recl"]
        ]
        ends = "/".join(f"{each['last_gain_ends']:,}" for each in model["recl"])
        rows.append([model["name"], *cells, ends])
    print_table(rows)
    print("last gain ends: the context from which on no step reaches the threshold, per r")
    print(f"\n{report['protocol']}")


# --- txl attention --------------------------------------------------------------------------------


def attention(
    checkpoint: Checkpoint,
    data: EvaluationData,
    split: Annotated[str, typer.Option(help="Split to read.")] = "valid",
    max_tokens: Annotated[
        int, typer.Option(min=2, help="Read at most this many tokens of the split.")
    ] = 20_000,
    mem_len: MemLen = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write attention.json, attention.png and attention.svg to this directory.",
            parser=path_argument,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how much each layer and head attends to the memory.

    Also to which distances. The text is read as in txl eval. Without --out no file is written.

    Example: txl attention runs/quickstart data/stdlib --out runs/quickstart/attention
    """
    require_order("attention", [checkpoint])
    from txl_dist.analysis.attention import attention_by_distance, attention_json
    from txl_dist.evaluation.spec import evaluation_spec, plan_evaluation

    spec = evaluation_spec(
        checkpoint, data, split=split, mem_len=mem_len, batch=1, max_tokens=max_tokens
    )
    with staged_output(out, "attention.json") as staged:
        scorer = spec.open()
        chunks = plan_evaluation(scorer.source, spec.settings, scorer.model.config)
        with work_progress(WorkUnit("chunks")) as show:
            result = attention_by_distance(
                scorer, chunks, on_progress=lambda done, total: show("reading", done, total)
            )
        content = attention_json(result, spec, scorer.model.config)
        if staged:
            from txl_dist.analysis.plots import plot_attention

            title = (
                f"{spec.checkpoint.name} on split {split}: {result.num_queries:,} "
                f"queries, {result.heads.memory_LH.mean():.0%} of attention on memory\n"
                f"segment {result.tgt_len}, memory {spec.settings.mem_len} tokens"
            )
            _write(staged, "attention", content, plot_attention(result, title=title))
    if as_json:
        print(content)
        return
    _print_attention(spec, result)
    if out:
        print(f"  attention.json, attention.png and attention.svg are in {out}")


def _print_attention(spec: "EvaluationSpec", result: "AttentionByDistance") -> None:
    heads, even = result.heads, result.even
    print(
        f"{spec.checkpoint} on {spec.data}, split {spec.settings.split}: "
        f"{result.num_queries:,} queries, segment {result.tgt_len}, memory {spec.settings.mem_len}"
    )
    print("  layer  on memory        (lowest to highest head)  mean distance  90% within")
    columns = heads.memory_LH, heads.mean_distance.mean(1), heads.reach(0.9)
    for layer, (memory_H, mean, reach) in enumerate(zip(*columns, strict=True)):
        head_range = f"{memory_H.min():.1%} to {memory_H.max():.1%}"
        print(f"  {layer:5}  {memory_H.mean():9.1%}  {head_range:>29}  {mean:13,.1f}  {reach:10,}")
    mean, reach = even.mean_distance[0, 0], even.reach(0.9)[0]
    print(f"  {'even':5}  {even.memory_LH[0, 0]:9.1%}  {'':29}  {mean:13,.1f}  {reach:10,}")
    print("  even: for comparison, equal weights on all keys that a query may see (longest memory)")


# --- txl bench ------------------------------------------------------------------------------------


@bench_app.command()
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
    from txl_dist.analysis.bench import MAX_SHARE, MODEL, bench_eval_speed
    from txl_dist.convert.stored_model import find_model
    from txl_dist.model.transformer_xl import TransformerXL
    from txl_dist.runtime.device import default_device

    lengths = whole_numbers("--attention-length", attention_length)
    if checkpoint is None:
        model = TransformerXL(MODEL)
    else:  # the benchmark chooses the memory
        stored = find_model(checkpoint)
        model, _ = stored.load(replace(stored.config, mem_len=0, same_length=False))
    model = model.to(default_device())
    config, device = model.config, next(model.parameters()).device.type
    name, is_cpu = str(checkpoint or "random weights"), device == "cpu"
    if not as_json:
        print(
            f"{name}: {config.n_layer} layers, d_model {config.d_model}, {config.n_head} x "
            f"{config.d_head} heads, d_inner {config.d_inner}, vocabulary {config.vocab_size}, "
            f"{config.distance_encoding}; {device}, "
            f"{'CPU time of one thread' if is_cpu else 'wall time'}\n"
            "ms per token: medians; share = time ratio / FLOP ratio"
        )
        columns = ("length", "tgt_len", "window ms", "reuse ms", "ratio", "paper", "FLOPs", "share")
        print(SPEED_ROW.format(*columns, "limit"))
    rows = []
    # Without a display of progress, whose CPU time would count.
    for row in bench_eval_speed(model, attention_lengths=lengths, tgt_len=tgt_len, rounds=rounds):
        rows.append(asdict(row))
        if not as_json:
            cells = (
                *(f"{row.attention_length:,}", row.tgt_len, f"{row.ms_per_token_window:,.1f}"),
                *(f"{row.ms_per_token_reuse:.3f}", f"{row.ratio:,.0f}"),
                f"{row.paper_ratio:,.0f}" if row.paper_ratio else "-",
                *(f"{row.flops_ratio:,.0f}", f"{row.share_of_flops_ratio:.3f}"),
                f"{row.limit:g} to {MAX_SHARE:g} {'holds' if row.holds else 'MISSED'}",
            )
            print(SPEED_ROW.format(*cells), flush=True)
    if as_json:
        content = {
            "rows": rows,
            "model": {"name": name, **asdict(config)},
            "device": device,
            "threads": 1 if is_cpu else None,
        }
        print(json.dumps(content, allow_nan=False))


@bench_app.command()
def recall(
    checkpoint: Checkpoint,
    distances: Annotated[
        str, typer.Option(metavar="N,N,...", help="Distances between the occurrences, in tokens.")
    ] = "16,32,64,128,256,512",
    mem_len: MemLen = None,
    as_json: AsJson = False,
) -> None:
    """Measure from how far back a model copies.

    The text is of random token ids. For each distance: the loss of a repeated span of tokens, the
    gain over the same text without the first occurrence, its 95 % interval over sequences, and its
    share of the loss.

    Example: txl bench recall runs/quickstart --distances 16,64,256
    """
    from txl_dist.analysis.bench import CUE, NUM_SEQUENCES, SPAN, measure_recall
    from txl_dist.analysis.windows import UNLIMITED, WindowScorer
    from txl_dist.convert.stored_model import find_model
    from txl_dist.runtime.device import default_device

    lengths, stored = whole_numbers("--distances", distances), find_model(checkpoint)
    try:
        config = stored.config.with_mem_len(mem_len)
    except ValueError as error:
        raise ConfigError(f"{stored.path}: {error}") from None
    model, tokenizer = stored.load(config)
    scorer = WindowScorer(model=model.to(default_device()), tgt_len=stored.tgt_len)
    with work_progress(WorkUnit("distances")) as show:
        result = measure_recall(
            scorer,
            lengths,
            seed=0,
            excluded=[tokenizer.end_of_document] if tokenizer else [],
            batch_windows=BATCH_WINDOWS,
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
        "seed": 0,
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
