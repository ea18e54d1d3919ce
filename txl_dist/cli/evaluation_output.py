"""What `txl eval` prints and writes: one score, a table of scores, or a sweep.

The files of --out DIR are made from the objects that --json prints:

result.json                 that object, or the list of them
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
from txl_dist.evaluation.scores import SCORES

if TYPE_CHECKING:
    from txl_dist.evaluation.batches import PlannedJob
    from txl_dist.evaluation.distributed import Sweep, SweepResult
    from txl_dist.evaluation.result import EvaluationResult

RESULT_NAME = "result.json"

log = logging.getLogger(__name__)

Scored = Mapping[str, Any]
"""The JSON object of one result."""


def write_evaluation(staged: StagedDirectory, content: Any, scored: Sequence[Scored]) -> list[str]:
    """Write the files; returns their names. `content`: of result.json.

    Files of an earlier evaluation in the same directory are replaced or removed.
    """
    # Imported here: matplotlib takes a second, and RESULT_NAME is needed before the scores.
    from txl_dist.analysis.plots import plot_table, write_png

    with explain_disk_errors("writing the files of an evaluation", staged.directory):
        staging = staged.stage()
        for name in TABLES if any("details" in each for each in scored) else ():
            write_png(plot_table(name, scored), staging / f"by_{name}.png")
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


# --- the JSON objects of scores, from which everything is printed and written ---------------------


def score_objects(
    planned: "Sequence[PlannedJob]", results: "Sequence[EvaluationResult]", num_workers: int
) -> list[dict[str, Any]]:
    """The object of each score, which is also kept next to its sums (RUN/evaluations).

    There it has the id of the save that was scored, by which MLflow finds the model.
    """
    objects = [
        {
            **result.to_json(),
            "checkpoint": str(each.given.checkpoint),
            "data": str(each.given.data),
            "weights": each.given.weights,
            "workers": num_workers,
        }
        for each, result in zip(planned, results, strict=True)
    ]
    for each, content in zip(planned, objects, strict=True):
        save_id = None
        with suppress(CheckpointError):  # an exported model, or its run has removed it since
            save_id = load_checkpoint_manifest(each.job.checkpoint).save_id
        each.finished.write_result({**content, "save_id": save_id})
    return objects


def with_differences(
    objects: Sequence[Scored], results: "Sequence[EvaluationResult]"
) -> list[dict[str, Any]]:
    """The objects, and with details the difference of each to the first model on its split."""
    first: dict[str, tuple[str, LossTable]] = {}
    compared = []
    for each, result in zip(objects, results, strict=True):
        content = dict(each)
        if details := content.get("details"):
            assert result.breakdown is not None
            documents = result.breakdown[DOCUMENT]
            name, base = first.setdefault(each["split"], (each["checkpoint"], documents))
            if base is not documents:
                difference, ends = paired_difference(documents, base)
                to_first = {"to": name, "nats_per_token": difference, "interval": ends}
                content["details"] = {**details, "difference": to_first}
        compared.append(content)
    return compared


def sweep_objects(sweep: "Sweep", result: "SweepResult", num_workers: int) -> list[dict[str, Any]]:
    """Of one model: all settings on the first split, then the best one on the other splits."""
    best = result.best
    candidates = score_objects([jobs[0] for jobs in sweep], result.candidates, num_workers)
    reported = score_objects(sweep[best][1:], result.reported, num_workers)
    return [
        *({**each, "selected": number == best} for number, each in enumerate(candidates)),
        *({**each, "selected": True} for each in reported),
    ]


def sweep_content(objects: Sequence[Scored], swept: Sequence[str]) -> dict[str, Any]:
    """The object of one model in a sweep."""
    split = objects[0]["split"]
    candidates = [each for each in objects if each["split"] == split]
    (best,) = (each for each in candidates if each["selected"])
    return {
        "checkpoint": best["checkpoint"],
        "swept": list(swept),
        "selected_on": split,
        "selected": {name: best[name] for name in swept},
        "candidates": candidates,
        "reported": [each for each in objects if each["split"] != split],
    }


def print_scores(scored: Sequence[Scored], swept: Sequence[str] = ()) -> None:
    """For people: one score in full, several as a table with a line of protocol each."""
    if len(scored) == 1:
        print_score(scored[0])
    else:
        print_table(scored, swept)


def print_table(scored: Sequence[Scored], swept: Sequence[str]) -> None:
    width = max(len(name) for name in ("checkpoint", *(each["checkpoint"] for each in scored)))
    splits = max(len(name) for name in ("split", *(each["split"] for each in scored)))
    settings = "".join(f"  {name:>9}" for name in swept)
    print(
        f"{'checkpoint':{width}}  {'split':{splits}}{settings}  {'targets':>12}  "
        f"{'nats/token':>10}  {'perplexity':>11}  {'bits/byte':>9}  context"
    )
    for each in scored:
        values = ("none" if each[name] is None else each[name] for name in swept)
        settings = "".join(f"  {value:>9}" for value in values)
        print(
            f"{each['checkpoint']:{width}}  {each['split']:{splits}}{settings}  "
            f"{each['tokens_scored']:>12,}  {each['nats_per_token']:>10.4f}  "
            f"{_show(each['perplexity']):>11}  {_show(each['bits_per_byte']):>9}  "
            f"{each['context_overhead']:.1%}{'  selected' if each.get('selected') else ''}"
        )
    print(
        f"data {scored[0]['data']}; context: additional tokens read, because chunks are "
        "scored independently"
    )
    if swept:
        first = scored[0]["split"]
        print(f"selected: the lowest loss on split {first}, for each checkpoint")
    for each in scored:
        _print_difference(each)
    for each in scored:
        if each.get("selected") is not False:
            print(f"protocol: {each['checkpoint']}: {each['protocol']}")


def _print_difference(scored: Scored) -> None:
    details = scored.get("details") or {}
    if (difference := details.get("difference")) is None:
        return
    ends = difference["interval"]
    interval = f"{ends[0]:+.4f} to {ends[1]:+.4f}" if ends else "none, too few documents"
    print(
        f"difference on {scored['split']}: {scored['checkpoint']} less {difference['to']}: "
        f"{difference['nats_per_token']:+.4f} nats per token; 95 % interval {interval}, paired by "
        f"{details['num_documents']:,} documents"
    )


def print_score(scored: Scored) -> None:
    print(f"{scored['checkpoint']} on {scored['data']}, split {scored['split']} ({scored['mode']})")
    if scored["weights"] == "averaged":
        print("  weights          averaged over steps; those of the last one: --weights last")
    print(f"  targets scored   {scored['tokens_scored']:,}")
    print(f"  nats             {scored['nats']:.4f}  ({scored['nats_per_token']:.4f} per token)")
    for name, score in SCORES.items():
        if scored[name] is not None and name != "nats_per_token":
            print(f"  {score.label:15}  {_show(scored[name])}")
    if scored["bits_per_byte"] is None:
        print(f"  bytes            not known: {scored['not_counted']}")
    if details := scored.get("details"):
        _print_interval(details)
    print(
        f"  {counted(scored['num_chunks'], 'chunk')}, {scored['context_overhead']:.1%} more tokens "
        "read as context"
    )
    if scored["context_tokens"] is None:
        print(
            f"  memory={scored['memory']} reaches back without limit, so documents are not cut "
            f"into chunks: more than {scored['num_chunks']:,} workers would wait"
        )
    print(f"  protocol: {scored['protocol']}")


def _show(value: float | None) -> str:
    """Four decimals; a word perplexity of an untrained model has more than 15 digits."""
    if value is None:
        return "-"
    return f"{value:.4f}" if value < 1e6 else f"{value:.4g}"


def _print_interval(details: Mapping[str, Any]) -> None:
    if (interval := details["interval"]) is None:
        print(
            f"  95 % interval    none: of {counted(details['num_documents'], 'document')}; "
            f"resampling needs at least {MIN_DOCUMENTS}"
        )
    elif (ends := interval["nats_per_token"]) is not None:
        print(
            f"  95 % interval    {ends[0]:.4f} to {ends[1]:.4f} nats per token, from "
            f"{details['num_documents']:,} documents"
        )
