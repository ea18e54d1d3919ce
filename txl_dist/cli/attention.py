"""`txl attention`: attention of a trained model by distance, per layer and head."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from txl_dist.cli.options import AsJson, Checkpoint, EvaluationData, MemLen, TgtLen
from txl_dist.cli.paths import COPY_TO_URL, local_path_parser

if TYPE_CHECKING:
    from data_pipeline.system.files import StagedDirectory
    from txl_dist.evaluation.evaluate import EvaluationJob
    from txl_dist.evaluation.scoring import Scorer
    from txl_dist.reporting.attention_by_distance import AttentionByDistance


def attention(
    checkpoint: Checkpoint,
    data: EvaluationData,
    split: Annotated[str, typer.Option(help="Split to read.")] = "valid",
    max_tokens: Annotated[
        int, typer.Option(min=2, help="Read at most this many tokens of the split.")
    ] = 20_000,
    tgt_len: TgtLen = None,
    mem_len: MemLen = None,
    batch: Annotated[
        int, typer.Option(min=1, help="Chunks per batch; fewer need less memory.")
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write attention.json, attention.png and attention.svg to this directory.",
            parser=local_path_parser(COPY_TO_URL),
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how much attention each layer and head pays to the memory, and to which distances.

    The text is read as in txl eval. Without --out no file is written.

    Example: txl attention runs/quickstart data/stdlib --out runs/quickstart/attention
    """
    from data_pipeline.system.files import StagedDirectory, require_writable
    from txl_dist.evaluation.job import evaluation_job
    from txl_dist.reporting.attention_file import ATTENTION_NAME, attention_json

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
        # Opened first: an unusable --out must be an error before minutes of computing.
        staged = out and stack.enter_context(StagedDirectory(out, last=ATTENTION_NAME))
        if out:
            require_writable(out)
        scorer = job.open()
        result = _measure(scorer, job, quiet=as_json)
        content = attention_json(result, job, scorer.model.config)
        if staged:
            _write(staged, job, result, content)
    if as_json:
        print(content)
    else:
        _print_table(job, result)
        if out:
            print(f"  attention.json, attention.png and attention.svg are in {out}")


def _measure(scorer: "Scorer", job: "EvaluationJob", *, quiet: bool) -> "AttentionByDistance":
    from txl_dist.cli.progress import chunk_progress
    from txl_dist.evaluation.evaluate import plan_evaluation
    from txl_dist.reporting.attention_by_distance import attention_by_distance

    chunks = plan_evaluation(scorer.source, job.settings, scorer.model.config)
    with chunk_progress(quiet=quiet) as on_progress:
        return attention_by_distance(scorer, chunks, on_progress=on_progress)


def _write(
    staged: "StagedDirectory", job: "EvaluationJob", result: "AttentionByDistance", content: str
) -> None:
    from data_pipeline.system.files import explain_disk_errors, write_synced
    from txl_dist.reporting.attention_file import ATTENTION_NAME, as_utf8
    from txl_dist.reporting.attention_plot import PLOT_NAMES, plot_attention, write_plots

    settings = job.settings
    title = (
        f"{as_utf8(job.checkpoint.name)} on split {settings.split}: {result.num_queries:,} "
        f"queries, {result.heads.memory_LH.mean():.0%} of attention on memory\n"
        f"segment {settings.tgt_len}, memory {settings.mem_len} tokens"
    )
    with explain_disk_errors("writing attention.json and its plots", staged.directory):
        staging = staged.stage()
        write_plots(plot_attention(result, title=title), staging)
        write_synced(staging / ATTENTION_NAME, content.encode())
        staged.publish([*PLOT_NAMES, ATTENTION_NAME])


def _print_table(job: "EvaluationJob", result: "AttentionByDistance") -> None:
    heads, even = result.heads, result.even
    print(
        f"{job.checkpoint} on {job.data}, split {job.settings.split}: "
        f"{result.num_queries:,} queries, segment {result.tgt_len}, memory {job.settings.mem_len}"
    )
    print("  layer  on memory        (lowest to highest head)  mean distance  90% within")
    columns = heads.memory_LH, heads.mean_distance.mean(1), heads.reach(0.9)
    for layer, (memory_H, mean, reach) in enumerate(zip(*columns, strict=True)):
        head_range = f"{memory_H.min():.1%} to {memory_H.max():.1%}"
        print(f"  {layer:5}  {memory_H.mean():9.1%}  {head_range:>29}  {mean:13,.1f}  {reach:10,}")
    mean, reach = even.mean_distance[0, 0], even.reach(0.9)[0]
    print(f"  {'even':5}  {even.memory_LH[0, 0]:9.1%}  {'':29}  {mean:13,.1f}  {reach:10,}")
    print("  even: for comparison, equal weights on all keys that a query may see")
