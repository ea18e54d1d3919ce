"""`txl attention`: how far back each head of a trained model looks."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from txl_dist.cli.evaluate import CHECKPOINT, evaluation_job
from txl_dist.cli.paths import SEND, local_path_parser

if TYPE_CHECKING:
    from data_pipeline.storage.staged_directory import StagedDirectory
    from txl_dist.evaluation.evaluate import EvaluationJob
    from txl_dist.reporting.attention_by_distance import AttentionByDistance
    from txl_dist.reporting.attention_file import AttentionFile


def attention(
    checkpoint: Annotated[Path, typer.Argument(help=CHECKPOINT, parser=local_path_parser())],
    data: Annotated[
        str, typer.Argument(help="Directory that txl prepare wrote, or the URL of a copy.")
    ],
    split: Annotated[str, typer.Option(help="Which split to read.")] = "valid",
    max_tokens: Annotated[
        int, typer.Option(min=2, help="Read only the first so many tokens of the split.")
    ] = 20_000,
    tgt_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens a segment; default: as trained, else 128.")
    ] = None,
    mem_len: Annotated[
        int | None, typer.Option(min=0, help="Tokens of memory; default: as trained.")
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, help="Chunks read side by side; fewer need less memory.")
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write attention.json, .png and .svg to this directory.",
            parser=local_path_parser(SEND),
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, as in attention.json.")
    ] = False,
) -> None:
    """Attention by distance: what each layer and head takes of memory and of its segment.

    The text is read as txl eval reads it. Without --out nothing is written.

    Example: txl attention runs/quickstart data/stdlib --out runs/quickstart/attention
    """
    from data_pipeline.storage.atomic_files import require_writable
    from data_pipeline.storage.staged_directory import StagedDirectory
    from txl_dist.reporting.attention_file import ATTENTION_NAME

    job = evaluation_job(
        checkpoint,
        data,
        split=split,
        tgt_len=tgt_len,
        mem_len=mem_len,
        batch=batch,
        max_tokens=max_tokens,
    )
    with ExitStack() as stack:
        # Before the reading, so that an unusable --out is told at once.
        staged = out and stack.enter_context(StagedDirectory(out, last=ATTENTION_NAME))
        if out:
            require_writable(out)
        found, stored = _look(job, quiet=as_json)
        if staged:
            _write(staged, found, stored)
    if as_json:
        print(stored.model_dump_json())
    else:
        _print_table(job, found)
        if out:
            print(f"  attention.json, attention.png and attention.svg are in {out}")


def _look(job: "EvaluationJob", *, quiet: bool) -> "tuple[AttentionByDistance, AttentionFile]":
    from txl_dist.cli.progress import chunk_progress
    from txl_dist.evaluation.evaluate import plan_evaluation
    from txl_dist.reporting.attention_by_distance import attention_by_distance
    from txl_dist.reporting.attention_file import AttentionFile

    scorer = job.open()
    config = scorer.model.config
    chunks = plan_evaluation(scorer.source, job.settings, n_layer=config.n_layer)
    with chunk_progress(quiet=quiet) as on_progress:
        found = attention_by_distance(scorer, chunks, on_progress=on_progress)
    stored = AttentionFile.of(
        found, checkpoint=job.checkpoint, data=job.data, model=config, settings=job.settings
    )
    return found, stored


def _write(
    staged: "StagedDirectory", found: "AttentionByDistance", stored: "AttentionFile"
) -> None:
    from data_pipeline.storage.atomic_files import explain_disk_errors, write_synced
    from txl_dist.reporting.attention_file import ATTENTION_NAME
    from txl_dist.reporting.attention_plot import PLOT_NAMES, plot_attention, write_plots

    settings = stored.settings
    title = (
        f"{Path(stored.checkpoint).name} on split {settings.split}: {stored.num_queries:,} "
        f"queries, {found.heads.memory_LH.mean():.0%} of attention on memory\n"
        f"segment {settings.tgt_len}, memory {settings.mem_len} tokens"
    )
    with explain_disk_errors("writing attention.json and its plots", staged.directory):
        aside = staged.stage()
        write_plots(plot_attention(found, title=title), aside)
        write_synced(aside / ATTENTION_NAME, stored.model_dump_json().encode())
        staged.publish([*PLOT_NAMES, ATTENTION_NAME])


def _print_table(job: "EvaluationJob", found: "AttentionByDistance") -> None:
    heads, even = found.heads, found.even
    print(
        f"{job.checkpoint} on {job.data}, split {job.settings.split}: "
        f"{found.num_queries:,} queries, segment {found.tgt_len}, memory {job.settings.mem_len}"
    )
    print("  layer  on memory  (least to most, of its heads)  mean distance  90% within")
    shares = heads.memory_LH, heads.mean_distance.mean(1), heads.reach(0.9)
    for layer, (memory_H, mean, reach) in enumerate(zip(*shares, strict=True)):
        of_heads = f"{memory_H.min():.1%} to {memory_H.max():.1%}"
        print(f"  {layer:5}  {memory_H.mean():9.1%}  {of_heads:>29}  {mean:13,.1f}  {reach:10,}")
    mean, reach = even.mean_distance[0, 0], even.reach(0.9)[0]
    print(f"  {'even':5}  {even.memory_LH[0, 0]:9.1%}  {'':29}  {mean:13,.1f}  {reach:10,}")
    print("  even: had every query taken the same of each key it may see")
