"""What `txl eval` prints and writes: one score, a table of scores, or a sweep.

Everything is printed and written from `Result`s (evaluation/result.py). The files of --out DIR:

result.json                 what --json prints: an object, or a list of them
by_document_position.png    with --details: a plot of each table; also by_segment_position and
                            by_token_frequency

--per-document FILE has one line of JSON for each document of the scored splits:

    {"checkpoint": "...", "split": "valid", "id": "...", "tokens": 12, "bytes": 40, "nats": 31.25}

Every target is in one document, so tokens and bytes add up to those of the score exactly, and nats
up to the rounding of float64. `bytes` is null if the bytes of the texts are not known. The workers
send the sums of each batch (breakdown.py), from which `--resume` continues. Here they take 32 bytes
per document; ids are read shard by shard.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from data_pipeline.errors import counted
from data_pipeline.shards.manifest import open_tokenizer
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.system.files import StagedDirectory, explain_disk_errors, write_synced
from txl_dist.checkpoint.manifest import load_checkpoint_manifest
from txl_dist.errors import CheckpointError
from txl_dist.evaluation.bootstrap import MIN_DOCUMENTS
from txl_dist.evaluation.breakdown import DOCUMENT, TABLES, LossTable, paired_difference
from txl_dist.evaluation.result import Result, table_columns
from txl_dist.evaluation.scores import SCORES

if TYPE_CHECKING:
    from txl_dist.evaluation.batches import PlannedJob
    from txl_dist.evaluation.distributed import Sweep, SweepResult
    from txl_dist.evaluation.result import EvaluationResult

RESULT_NAME = "result.json"

log = logging.getLogger(__name__)


def write_evaluation(staged: StagedDirectory, content: Any, results: Sequence[Result]) -> list[str]:
    """Write the files; returns their names. `content`: of result.json.

    Files of an earlier evaluation in the same directory are replaced or removed.
    """
    # Imported here: matplotlib takes a second, and RESULT_NAME is needed before the scores.
    from txl_dist.analysis.plots import plot_table, write_png

    with explain_disk_errors("writing the files of an evaluation", staged.directory):
        staging = staged.stage()
        objects = [each.to_json() for each in results]
        for name in TABLES if any(each.details for each in results) else ():
            write_png(plot_table(name, objects), staging / f"by_{name}.png")
        write_synced(
            staging / RESULT_NAME, json.dumps(content, indent=1, allow_nan=False).encode() + b"\n"
        )
        names = sorted(path.name for path in staging.iterdir())
        for name in (f"by_{table}.png" for table in TABLES):
            if name not in names:
                (staged.directory / name).unlink(missing_ok=True)
        staged.publish(names)
    return names


def document_lines(
    planned: "Sequence[PlannedJob]", results: "Sequence[EvaluationResult]"
) -> Iterator[bytes]:
    """The lines of all jobs, in the order of the splits. The jobs have no `num_ranks`."""
    for each, result in zip(planned, results, strict=True):
        names = {"checkpoint": str(each.given.checkpoint), "split": result.settings.split}
        bytes_of = _bytes_of_documents(each, result)
        for id_, nats, tokens, num_bytes in _scores_of_documents(each):
            score = {"tokens": tokens, "bytes": bytes_of(num_bytes), "nats": nats}
            yield json.dumps({**names, "id": id_, **score}).encode() + b"\n"


def _bytes_of_documents(
    planned: "PlannedJob", result: "EvaluationResult"
) -> Callable[[int], int | None]:
    """A function that is called for the documents in order, with the bytes of their tokens.

    It returns the bytes of their texts. If these do not follow from the tokens, they are those of
    the decoded texts, provided that they add up to those of the split, and None otherwise.
    """
    split = open_split(planned.job.data, planned.job.settings.split)
    tokenizer = open_tokenizer(planned.job.data, split.manifest)
    if tokenizer.token_bytes().any():
        return lambda num_bytes: num_bytes if num_bytes >= 0 else None
    if result.text.num_bytes is None:
        return lambda num_bytes: None
    sizes = [
        len(tokenizer.decode_bytes(split.read(each.block, each.start, each.stop)))
        for each in split.documents()
    ]
    if sum(sizes) != split.entry.text_bytes:
        log.warning(
            "split %s has %s bytes, its decoded texts %s, because the tokenizer is not lossless: "
            "the bytes of its documents are null",
            *(split.split, f"{split.entry.text_bytes:,}", f"{sum(sizes):,}"),
        )
        return lambda num_bytes: None
    sizes[0] -= split.entry.text_bytes - result.text.num_bytes  # of the first token of the split
    remaining = iter(sizes)
    return lambda num_bytes: next(remaining)


def _scores_of_documents(planned: "PlannedJob") -> Iterator[tuple[str, float, int, int]]:
    """Id, nats, tokens and bytes of every document of which a token was read."""
    scored = _sums_of_documents(planned)
    document = next(scored, None)
    position, stop = 0, planned.chunks[-1].stop + 1
    for stored in open_split(planned.job.data, planned.job.settings.split).documents():
        if position >= stop:  # of `max_tokens`
            return
        if document is not None and position == document[0]:
            _, nats, tokens, num_bytes = document
            yield stored.id, nats, tokens, num_bytes
            document = next(scored, None)
        else:  # one token, the first of the split, which nothing predicts
            yield stored.id, 0.0, 0, 0
        position += stored.num_tokens


def _sums_of_documents(planned: "PlannedJob") -> Iterator[tuple[int, float, int, int]]:
    """Start, nats, tokens and bytes of every document with a target, in order."""
    last: list[LossTable] = []
    for _, scores in sorted(planned.finished.batches.items()):
        assert scores.breakdown is not None, "planned with per_document"
        documents = LossTable.total([*last, scores.breakdown[DOCUMENT]])
        yield from documents.rows()[:-1]
        # The next batch may continue the last document.
        last = [LossTable(*(column[-1:] for column in documents.columns))]
    for documents in last:
        yield from documents.rows()


# --- the results, from which everything is printed and written ------------------------------------


def record_results(
    planned: "Sequence[PlannedJob]", scored: "Sequence[EvaluationResult]", num_workers: int
) -> list[Result]:
    """The result of each score, which is also kept next to its sums (RUN/evaluations)."""
    results = [
        score.record(
            checkpoint=each.given.checkpoint, data=each.given.data, num_workers=num_workers
        )
        for each, score in zip(planned, scored, strict=True)
    ]
    for each, result in zip(planned, results, strict=True):
        save_id = None
        with suppress(CheckpointError):  # an exported model, or its run has removed it since
            save_id = load_checkpoint_manifest(each.job.checkpoint).save_id
        each.finished.write_result(result.model_copy(update={"save_id": save_id}))
    return results


def with_differences(
    results: Sequence[Result], scored: "Sequence[EvaluationResult]"
) -> list[Result]:
    """The results, and with details the difference of each to the first model on its split."""
    first: dict[str, tuple[str, LossTable]] = {}
    compared = []
    for result, score in zip(results, scored, strict=True):
        compared.append(result)
        if result.details:
            assert score.breakdown is not None
            documents = score.breakdown[DOCUMENT]
            name, base = first.setdefault(result.split, (result.checkpoint, documents))
            if base is not documents:
                nats_per_token, ends = paired_difference(documents, base)
                difference = {"to": name, "nats_per_token": nats_per_token, "interval": ends}
                details = {**result.details, "difference": difference}
                compared[-1] = result.model_copy(update={"details": details})
    return compared


def record_sweep(sweep: "Sweep", result: "SweepResult", num_workers: int) -> list[Result]:
    """Of one model: all settings on the first split, then the best one on the other splits."""
    best = result.best
    candidates = record_results([jobs[0] for jobs in sweep], result.candidates, num_workers)
    reported = record_results(sweep[best][1:], result.reported, num_workers)
    return [
        *(
            each.model_copy(update={"selected": number == best})
            for number, each in enumerate(candidates)
        ),
        *(each.model_copy(update={"selected": True}) for each in reported),
    ]


def sweep_content(results: Sequence[Result], swept: Sequence[str]) -> dict[str, Any]:
    """The JSON object of one model in a sweep."""
    split = results[0].split
    candidates = [each for each in results if each.split == split]
    (best,) = (each for each in candidates if each.selected)
    return {
        "checkpoint": best.checkpoint,
        "swept": list(swept),
        "selected_on": split,
        "selected": {name: getattr(best, name) for name in swept},
        "candidates": [each.to_json() for each in candidates],
        "reported": [each.to_json() for each in results if each.split != split],
    }


def print_results(results: Sequence[Result], swept: Sequence[str] = ()) -> None:
    """For people: one result in full, several as a table with a line of protocol each."""
    if len(results) == 1:
        _print_result(results[0])
    else:
        _print_table(results, swept)


def _print_table(results: Sequence[Result], swept: Sequence[str]) -> None:
    names = table_columns(results)
    header = ["checkpoint", "split", *swept, "targets", *(SCORES[n].label for n in names)]
    rows = [
        [
            each.checkpoint,
            each.split,
            *("none" if (v := getattr(each, name)) is None else str(v) for name in swept),
            f"{each.tokens_scored:,}",
            *(SCORES[name].text(each.scores.get(name)) for name in names),
        ]
        for each in results
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    contexts = [
        f"{each.context_overhead:.1%}{'  selected' * bool(each.selected)}" for each in results
    ]
    for row, context in zip([header, *rows], ["context", *contexts], strict=True):
        cells = [
            f"{cell:{'<' if number < 2 else '>'}{width}}"
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join([*cells, context]))
    print(
        f"data {results[0].data}; context: additional tokens read, because chunks are "
        "scored independently"
    )
    if swept:
        print(f"selected: the lowest loss on split {results[0].split}, for each checkpoint")
    for each in results:
        details = each.details or {}
        if difference := details.get("difference"):
            ends = difference["interval"]
            interval = f"{ends[0]:+.4f} to {ends[1]:+.4f}" if ends else "none, too few documents"
            print(
                f"difference on {each.split}: {each.checkpoint} less {difference['to']}: "
                f"{difference['nats_per_token']:+.4f} nats per token; 95 % interval {interval}, "
                f"paired by {details['num_documents']:,} documents"
            )
    for each in results:
        if each.selected is not False:
            print(f"protocol: {each.checkpoint}: {each.protocol}")


def _print_result(result: Result) -> None:
    print(f"{result.checkpoint} on {result.data}, split {result.split} ({result.mode})")
    if result.weights == "averaged":
        print("  weights          averaged over steps; those of the last one: --weights last")
    print(f"  targets scored   {result.tokens_scored:,}")
    print(f"  nats             {result.nats:.4f}  ({result.nats_per_token:.4f} per token)")
    for name, value in result.known_scores.items():
        if name != "nats_per_token":
            print(f"  {SCORES[name].label:15}  {SCORES[name].text(value)}")
    if result.scores["bits_per_byte"] is None:
        print(f"  bytes            not known: {result.not_counted}")
    if result.details:
        print(f"  95 % interval    {_interval(result.details)}")
    print(
        f"  {counted(result.num_chunks, 'chunk')}, {result.context_overhead:.1%} more tokens "
        "read as context"
    )
    if result.context_tokens is None:
        print(
            f"  memory={result.memory} reaches back without limit, so documents are not cut "
            f"into chunks: more than {result.num_chunks:,} workers would wait"
        )
    print(f"  protocol: {result.protocol}")


def _interval(details: Mapping[str, Any]) -> str:
    if details["interval"] is None:
        documents = counted(details["num_documents"], "document")
        return f"none: of {documents}; resampling needs at least {MIN_DOCUMENTS}"
    low, high = details["interval"]["nats_per_token"]
    return f"{low:.4f} to {high:.4f} nats per token, from {details['num_documents']:,} documents"
