"""`txl eval`: score splits of a dataset with trained models, on any number of workers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from data_pipeline.errors import counted
from data_pipeline.system.files import require_writable, write_file
from txl_dist.cli.options import (
    CHECKPOINT_HELP,
    TOKENS,
    AsJson,
    MemLen,
    TgtLen,
    checkpoint_path,
    file_argument,
    listed_names,
    note,
    open_workers,
    path_argument,
    require_order,
    running,
    staged_output,
    stoppable,
    work_progress,
)
from txl_dist.errors import ConfigError

if TYPE_CHECKING:
    from txl_dist.evaluation.batches import PlannedEvaluation
    from txl_dist.evaluation.result import EvaluationResult


def evaluate(
    context: typer.Context,
    checkpoints: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="CHECKPOINT...",
            help=CHECKPOINT_HELP,
            parser=path_argument,  # those of a job need not exist here
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA",
            help="Directory that txl prepare wrote, or the URL of a copy.",
            show_default=False,
        ),
    ] = None,
    watch: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Instead of checkpoints: score each checkpoint of this run whose evaluation is "
            "due, by the settings of its config.yaml, until the run has ended. BEST moves to the "
            "best one. Uses --workers and --on, and --split if the config names no split.",
            parser=path_argument,
        ),
    ] = None,
    split: Annotated[
        str, typer.Option(metavar="NAME,...", help="Splits to score, such as valid,test.")
    ] = "valid",
    max_tokens: Annotated[
        int | None,
        typer.Option(min=2, metavar="N", help="Score only the first N tokens of each split."),
    ] = None,
    mode: Annotated[
        Literal["exact", "fast"],
        typer.Option(
            help="exact: the score of one sequential pass. fast: less context before each chunk, "
            "so the score is approximate."
        ),
    ] = "exact",
    tgt_len: TgtLen = None,
    mem_len: MemLen = None,
    clamp_len: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=10**6,
            help="Larger distances share one encoding; 0: no limit. Default: as in training.",
        ),
    ] = None,
    same_length: Annotated[
        bool, typer.Option("--same-length", help="Every query sees exactly mem_len keys.")
    ] = False,
    precision: Annotated[
        Literal["fp32", "bf16"],
        typer.Option(help="Precision of matrix products; sums are always fp32."),
    ] = "fp32",
    batch: Annotated[int, typer.Option(min=1, help="Chunks per batch.")] = 8,
    workers: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of workers. On a CPU each has one thread, so that the score does not "
            "depend on their number: take one per core.",
        ),
    ] = 1,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="processes|ray|ADDRESS",
            help="processes: on this machine, one worker in this process. ray: a Ray started for "
            "this command. An address, or auto for that of this host: a running Ray cluster, "
            "whose nodes must all see the checkpoints and the data. Default: processes for one "
            "worker, else ray.",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Do not score again the chunks that a stopped command has finished."
        ),
    ] = False,
    details: Annotated[
        bool,
        typer.Option(
            "--details",
            help="Also: loss by position in document and segment, loss by token frequency, and a "
            "95 % interval by resampling documents; of several models also the difference to the "
            "first one, with its interval.",
        ),
    ] = False,
    per_document: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the id, tokens, bytes and nats of each document to this file, one JSON "
            "object per line.",
            parser=file_argument,
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=N,...",
            help="Score every combination of these values of tgt_len, mem_len and clamp_len on the "
            "first split, and the best one on the other splits. Can be repeated.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write what --json prints to result.json in this directory. There, chunks of "
            "models without a run are kept for --resume; of a run, in RUN/evaluations.",
            parser=path_argument,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Score splits. Every target is scored once, with the memory of one sequential pass.

    Several checkpoints or splits give one table, with --json a list. If a worker dies, another one
    scores its chunks. Each score has its protocol, one line with all that it depends on.

    Example: txl eval runs/quickstart data/stdlib --split valid --workers 2

    Example: txl eval runs/quickstart data/stdlib --split valid,test --details --out scores

    Example: txl eval runs/quickstart data/stdlib --per-document documents.jsonl

    Example: txl eval runs/quickstart data/stdlib --split valid,test --sweep mem_len=0,64,128

    Example: txl eval --watch runs/quickstart
    """
    on = on or ("processes" if workers == 1 else "ray")
    if watch is not None:
        _require_no_more_than(context, "watch", "split", "workers", "on")
        _watch(checkpoint_path(str(watch)), split, on, workers)
        return
    if not checkpoints or data is None:
        raise ConfigError("give CHECKPOINT... and DATA, or --watch RUN; see txl eval -h")
    for path in checkpoints:
        checkpoint_path(str(path))  # before torch is imported
    require_order("eval", checkpoints)
    with running("loading torch"):
        from txl_dist.checkpoint.directory import run_of
        from txl_dist.cli.evaluation_output import print_results
        from txl_dist.evaluation.distributed import plan_spec
        from txl_dist.evaluation.scores import FOLDER
        from txl_dist.evaluation.spec import combinations, evaluation_spec, parse_sweep

    options: dict[str, Any] = {"tgt_len": tgt_len, "mem_len": mem_len, "clamp_len": clamp_len}
    swept = parse_sweep(sweep or [])
    if twice := [name for name in swept if options[name] is not None]:
        raise ConfigError(f"--sweep {twice[0]}=... and one value of {twice[0]}: give one of them")
    if per_document and swept:
        raise ConfigError(
            "--per-document and --sweep: give one of them; score the best setting afterwards"
        )
    if per_document:
        require_writable(per_document.parent)

    def plan(checkpoint: Path, name: str, setting: Mapping[str, int]) -> "PlannedEvaluation":
        spec = evaluation_spec(
            checkpoint,
            data,
            split=name,
            max_tokens=max_tokens,
            mode=mode,
            same_length=same_length,
            batch=batch,
            precision=precision,
            **{**options, **setting},
        )
        run = run_of(spec.checkpoint.resolve())
        return plan_spec(
            spec,
            run / FOLDER if run else out,
            resume=resume,
            details=details,
            per_document=per_document is not None,
        )

    # All are planned first, so that an impossible one is refused before anything starts.
    splits, settings = listed_names("--split", split), combinations(swept)
    if len(set(splits)) < len(splits):
        raise ConfigError(f"--split {split!r}: expected different names, such as valid,test")
    with running("reading the checkpoints and the data"):
        sweeps = [
            [[plan(checkpoint, name, setting) for name in splits] for setting in settings]
            for checkpoint in checkpoints
        ]
    results, content = _score(
        sweeps, [*swept], on=on, workers=workers, per_document=per_document, out=out
    )
    if as_json:
        print(json.dumps(content, allow_nan=False))
    else:
        print_results(results, [*swept])


def _score(
    sweeps: "Sequence[Sequence[Sequence[PlannedEvaluation]]]",
    swept: Sequence[str],
    *,
    on: str,
    workers: int,
    per_document: Path | None,
    out: Path | None,
) -> "tuple[list[EvaluationResult], Any]":
    """Score, record and write. Returns one result per score, and what --json prints.

    `sweeps`: by checkpoint, setting and split. `swept`: names of the settings of --sweep.
    """
    from txl_dist.cli.evaluation_output import (
        RESULT_NAME,
        document_lines,
        record_results,
        sweep_content,
        with_differences,
        write_evaluation,
    )
    from txl_dist.evaluation.distributed import evaluate_on_workers, evaluate_sweep
    from txl_dist.tracking.process import log_evaluations

    planned = [spec for sweep in sweeps for specs in sweep for spec in specs]
    with staged_output(out, RESULT_NAME) as staged:
        with (
            stoppable(_resume_advice(planned)),
            open_workers(on, workers, use_gpus=True) as pool,
            work_progress(TOKENS, pool) as progress,
        ):

            def score(specs: "Sequence[PlannedEvaluation]") -> "list[EvaluationResult]":
                scored = evaluate_on_workers(specs, pool, progress=progress, note=note)
                return record_results(specs, scored, workers)

            if swept:
                models = [evaluate_sweep(sweep, score) for sweep in sweeps]
                results = [each for model in models for each in model]
                contents = [sweep_content(model, swept) for model in models]
            else:
                results = with_differences(score(planned), planned)
                contents = [each.to_json() for each in results]
                if per_document:
                    write_file(per_document, document_lines(planned))
                    note(f"wrote {per_document}")
        with running("recording the scores in MLflow"):
            log_evaluations(each.spec.checkpoint for each in planned)
        # What --json prints: one object, or a list of them; in a sweep one per model.
        content = contents[0] if len(contents) == 1 else contents
        if staged:
            write_evaluation(staged, content)
            note(f"wrote {out}/{RESULT_NAME}")
    return results, content


def _require_no_more_than(context: typer.Context, *names: str) -> None:
    """Raise ConfigError for what the command line gives besides these, which --watch ignores."""
    given = [
        each.opts[0] if each.param_type_name == "option" else str(each.metavar)
        for each in context.command.params
        if each.name and each.name not in names
        if getattr(context.get_parameter_source(each.name), "name", "") == "COMMANDLINE"
    ]
    if given:
        raise ConfigError(f"--watch scores a run by its config.yaml; leave out {', '.join(given)}")


def _watch(run: Path, split: str, on: str, workers: int) -> None:
    from data_pipeline.system.workers import ProcessWorkers
    from txl_dist.tracking.process import send_metrics

    with running("loading torch"):
        from txl_dist.runtime.device import EXACT_THREADS
        from txl_dist.training.scores import watch

    # Also one worker is a process: a batch that kills it must not end the watch.
    is_here = on == "processes" and workers == 1
    pool = ProcessWorkers(1) if is_here else open_workers(on, workers, use_gpus=True)
    with stoppable("finished batches are kept, and the same command continues"), pool as opened:
        num_scored = watch(run, opened, split=split, num_threads=EXACT_THREADS, note=note)
    if num_scored:  # the run may have ended before its last scores
        with running("recording the scores in MLflow"):
            send_metrics(run)
    note(f"{counted(num_scored, 'checkpoint')} scored")


def _resume_advice(planned: "Sequence[PlannedEvaluation]") -> str:
    paths = [each.finished.path for each in planned]
    places = ", ".join(sorted({str(path.parent) for path in paths if path is not None}))
    if None in paths:
        return "no score was computed. With --out DIR, finished chunks are kept for --resume"
    return (
        f"no score was computed. Finished chunks are kept in {places}: run the same command with "
        "--resume to continue"
    )
