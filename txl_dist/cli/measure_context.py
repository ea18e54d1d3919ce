"""`txl recl` and `txl attention`: how much context models use, and what they attend to."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data_pipeline.system.files import (
    StagedDirectory,
    explain_disk_errors,
    write_synced,
)
from txl_dist.cli.options import (
    AsJson,
    Batch,
    Checkpoint,
    Checkpoints,
    ClampLen,
    EvaluationData,
    MemLen,
    PrecisionOption,
    Seed,
    TgtLen,
    listed,
    listed_names,
    path_argument,
    print_table,
    staged_output,
)
from txl_dist.cli.progress import WorkUnit, work_progress
from txl_dist.errors import ConfigError

if TYPE_CHECKING:
    from txl_dist.analysis.attention import AttentionByDistance
    from txl_dist.analysis.plots import Figure
    from txl_dist.analysis.recl import ReclReport
    from txl_dist.evaluation.spec import EvaluationSpec


def recl(
    checkpoints: Checkpoints,
    data: EvaluationData,
    split: Annotated[str, typer.Option(help="Split to sample targets from.")] = "valid",
    max_context: Annotated[int, typer.Option(min=2, help="Longest context in tokens.")] = 512,
    delta: Annotated[
        int, typer.Option(min=1, help="Step between contexts; the first context is one step.")
    ] = 32,
    r: Annotated[
        str, typer.Option("--r", metavar="R,...", help="Fractions of hardest targets, for RECL.")
    ] = "0.1,0.5,1.0",
    threshold: Annotated[
        float, typer.Option(min=0, max=1, help="RECL ends where a step gains less than this.")
    ] = 0.01,
    positions: Annotated[int, typer.Option(min=1, help="Targets to sample from the split.")] = 500,
    seed: Seed = 0,
    batch: Batch = 16,
    tgt_len: TgtLen = None,
    mem_len: MemLen = None,
    clamp_len: ClampLen = None,
    precision: PrecisionOption = "fp32",
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
    group. --mem-len and --clamp-len apply to models trained with a memory. Intervals: 95 %,
    bootstrap over documents, or over targets if there are fewer than 10 documents.

    A target is read again for every context, which takes a while: fewer --positions or a larger
    --delta take less.

    Example: txl recl runs/memory runs/no_memory data/stdlib --max-context 512 --delta 32
    """
    from txl_dist.analysis.recl import measure_group
    from txl_dist.convert.stored_model import find_model
    from txl_dist.evaluation.spec import evaluation_spec

    contexts = tuple(range(delta, max_context + 1, delta))
    if len(contexts) < 2:
        raise ConfigError(
            f"--max-context {max_context} has room for {len(contexts)} steps of --delta {delta}; "
            "RECL compares contexts one step apart, so take a smaller --delta"
        )
    configs = [find_model(path).config for path in checkpoints]
    specs = [
        evaluation_spec(
            path,
            data,
            split=split,
            tgt_len=tgt_len,
            mem_len=mem_len if config.tokens_kept else None,
            clamp_len=clamp_len if config.has_memory else None,
            batch=batch,
            precision=precision,
        )
        for path, config in zip(checkpoints, configs, strict=True)
    ]
    model_names = listed_names("--names", names) if names else [*map(str, checkpoints)]
    if not len({*model_names}) == len(model_names) == len(checkpoints):
        raise ConfigError(
            f"{len(checkpoints)} models need as many different names, got {', '.join(model_names)}"
        )
    with staged_output(out, "recl.json") as staged, work_progress(WorkUnit("targets")) as show:
        report = measure_group(
            dict(zip(model_names, specs, strict=True)),
            contexts,
            r_values=listed("--r", r, float, expected="numbers"),
            threshold=threshold,
            num_positions=positions,
            seed=seed,
            on_progress=lambda done, total: show("scoring", done, total),
        )
        content = json.dumps(report, allow_nan=False)
        if staged:
            from txl_dist.analysis.plots import plot_group

            _write(staged, "recl", content, plot_group(report))
    if as_json:
        print(content)
    else:
        _print_recl(report)
        if out:
            print(f"recl.json, recl.png and recl.svg are in {out}")


def _write(staged: StagedDirectory, name: str, content: str, figure: "Figure") -> None:
    """Write NAME.json, NAME.png and NAME.svg."""
    from txl_dist.analysis.plots import write_figure

    with explain_disk_errors(f"writing {name}.json and its plots", staged.directory):
        staging = staged.stage()
        plots = write_figure(figure, staging, name)
        write_synced(staging / f"{name}.json", content.encode())
        staged.publish([*plots, f"{name}.json"])


def _print_recl(report: "ReclReport") -> None:
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


# --- attention ------------------------------------------------------------------------------------


def attention(
    checkpoint: Checkpoint,
    data: EvaluationData,
    split: Annotated[str, typer.Option(help="Split to read.")] = "valid",
    max_tokens: Annotated[
        int, typer.Option(min=2, help="Read at most this many tokens of the split.")
    ] = 20_000,
    tgt_len: TgtLen = None,
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
    from txl_dist.analysis.attention import attention_by_distance, attention_json
    from txl_dist.evaluation.spec import evaluation_spec, plan_evaluation

    spec = evaluation_spec(
        checkpoint,
        data,
        split=split,
        tgt_len=tgt_len,
        mem_len=mem_len,
        batch=1,
        max_tokens=max_tokens,
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
    else:
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
    print("  even: for comparison, equal weights on all keys that a query may see")
