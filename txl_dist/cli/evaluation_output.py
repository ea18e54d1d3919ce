"""What `txl eval` prints and writes: one score, a table of scores, or a sweep.

Everything is printed and written from results (evaluation/result.py). --out DIR gets result.json,
which is what --json prints: an object, or a list of them.

--per-document FILE has one line of JSON for each document of the scored splits:

    {"checkpoint": "...", "split": "valid", "id": "...", "tokens": 12, "bytes": 40, "nats": 31.25}

Every target is in one document, so tokens and bytes add up to those of the score exactly, and nats
up to the rounding of float64. `bytes` is null if the tokens do not tell the bytes of the text. The
workers send the sums of each batch (breakdown.py), from which `--resume` continues.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from data_pipeline.errors import counted
from data_pipeline.shards.manifest import open_tokenizer
from data_pipeline.shards.shard_reader import open_split
from data_pipeline.system.files import StagedDirectory, explain_disk_errors, write_synced
from txl_dist.checkpoint.manifest import load_checkpoint_manifest
from txl_dist.cli.options import print_table
from txl_dist.errors import CheckpointError
from txl_dist.evaluation.breakdown import DOCUMENT, LossTable, paired_difference
from txl_dist.evaluation.result import EvaluationResult, table_columns
from txl_dist.evaluation.scores import SCORES

if TYPE_CHECKING:
    from txl_dist.evaluation.batches import PlannedEvaluation

RESULT_NAME = "result.json"


def write_evaluation(staged: StagedDirectory, content: Any) -> None:
    with explain_disk_errors("writing the result of an evaluation", staged.directory):
        text = json.dumps(content, indent=1, allow_nan=False)
        write_synced(staged.stage() / RESULT_NAME, text.encode() + b"\n")
        staged.publish([RESULT_NAME])


def document_lines(
    planned: "Sequence[PlannedEvaluation]",
) -> Iterator[bytes]:
    """The lines of all scored specs, in the order of the splits. They have no `num_ranks`."""
    for each in planned:
        sums = {start: row for start, *row in _documents(each).rows()}
        names = {"checkpoint": str(each.given.checkpoint), "split": each.spec.settings.split}
        split = open_split(each.spec.data, each.spec.settings.split)
        has_bytes = open_tokenizer(each.spec.data, split.manifest).token_bytes().any()
        position, stop = 0, each.chunks[-1].stop + 1
        for document in split.documents():
            if position >= stop:  # of `max_tokens`
                break
            # The first one has no target if it is one token: nothing predicts that.
            nats, tokens, num_bytes = sums.get(position, (0.0, 0, 0))
            # A token for unknown text counts as a negative number of bytes: the sum is not known.
            known_bytes = num_bytes if has_bytes and num_bytes >= 0 else None
            score = {"tokens": tokens, "bytes": known_bytes, "nats": nats}
            yield json.dumps({**names, "id": document.id, **score}).encode() + b"\n"
            position += document.num_tokens


def _documents(planned: "PlannedEvaluation") -> LossTable:
    """The sums of each document, in a spec that was planned with them."""
    breakdown = planned.breakdown
    assert breakdown is not None
    return breakdown[DOCUMENT]


# --- the results, from which everything is printed and written ------------------------------------


def record_results(
    planned: "Sequence[PlannedEvaluation]", scored: Sequence[EvaluationResult], num_workers: int
) -> list[EvaluationResult]:
    """The results, which are also kept next to their sums (RUN/evaluations)."""
    results = [each.model_copy(update={"workers": num_workers}) for each in scored]
    for each, result in zip(planned, results, strict=True):
        save_id = None
        with suppress(CheckpointError):  # an exported model, or its run has removed it since
            save_id = load_checkpoint_manifest(each.spec.checkpoint).save_id
        each.finished.write_result(result.model_copy(update={"save_id": save_id}))
    return results


def with_differences(
    results: Sequence[EvaluationResult], planned: "Sequence[PlannedEvaluation]"
) -> list[EvaluationResult]:
    """The results, and with details the difference of each to the first model on its split."""
    first: dict[str, tuple[str, LossTable]] = {}
    compared = []
    for result, each in zip(results, planned, strict=True):
        compared.append(result)
        if result.details:
            documents = _documents(each)
            name, base = first.setdefault(result.split, (result.checkpoint, documents))
            if base is not documents:
                nats_per_token, ends = paired_difference(documents, base)
                difference = {"to": name, "nats_per_token": nats_per_token, "interval": ends}
                details = {**result.details, "difference": difference}
                compared[-1] = result.model_copy(update={"details": details})
    return compared


def sweep_content(results: Sequence[EvaluationResult], swept: Sequence[str]) -> dict[str, Any]:
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


def print_results(results: Sequence[EvaluationResult], swept: Sequence[str] = ()) -> None:
    """For people: one result in full, several as a table with a line of protocol each."""
    if len(results) == 1:
        _print_result(results[0])
    else:
        _print_table(results, swept)


def _print_table(results: Sequence[EvaluationResult], swept: Sequence[str]) -> None:
    names = table_columns(results)
    labels = [SCORES[name].label for name in names]
    unknown = ["unknown"] if any(each.unknown_targets for each in results) else []
    rows = [["checkpoint", "split", *swept, "targets", *unknown, *labels, "context"]]
    for each in results:
        values = [getattr(each, name) for name in swept]
        rows.append(
            [
                *(each.checkpoint, each.split),
                *("none" if value is None else str(value) for value in values),
                f"{each.tokens_scored:,}",
                *(f"{each.unknown_targets / each.tokens_scored:.2%}" for _ in unknown),
                *(SCORES[name].text(each.scores.get(name)) for name in names),
                f"{each.context_overhead:.1%}{' selected' * bool(each.selected)}",
            ]
        )
    print_table(rows, num_texts=2)
    print(
        f"data {results[0].data}; context: additional tokens read, because chunks are "
        "scored independently"
    )
    if swept:
        print(f"selected: the lowest loss on split {results[0].split}, for each checkpoint")
    for each in results:
        details = each.details or {}
        if difference := details.get("difference"):
            print(
                f"difference on {each.split}: {each.checkpoint} less {difference['to']}: "
                f"{difference['nats_per_token']:+.4f} nats per token; 95 % interval "
                f"{_interval(difference['interval'], '+.4f')}, "
                f"paired by {details['num_documents']:,} documents"
            )
    for each in results:
        if each.selected is not False:
            print(f"protocol: {each.checkpoint}: {each.protocol}")


def _print_result(result: EvaluationResult) -> None:
    print(f"{result.checkpoint} on {result.data}, split {result.split} ({result.mode})")
    print(f"  targets scored   {result.tokens_scored:,}")
    if number := result.unknown_targets:
        print(f"  unknown targets  {number:,} ({number / result.tokens_scored:.2%})")
    print(f"  nats             {result.nats:.4f}  ({result.nats_per_token:.4f} per token)")
    for name, value in result.known_scores.items():
        if name != "nats_per_token":
            print(f"  {SCORES[name].label:15}  {SCORES[name].text(value)}")
    if result.scores["bits_per_byte"] is None:
        print(f"  bytes            not known: {result.not_counted}")
    if details := result.details:
        ends = (details["interval"] or {}).get("nats_per_token")
        print(
            f"  95 % interval    {_interval(ends, '.4f')} (nats per token, of "
            f"{counted(details['num_documents'], 'document')})"
        )
    print(
        f"  {counted(result.num_chunks, 'chunk')}, {result.context_overhead:.1%} more tokens "
        "read as context"
    )
    print(f"  protocol: {result.protocol}")


def _interval(ends: Sequence[float] | None, form: str) -> str:
    """`2.9000 to 3.1000`. None: of fewer documents than a resample needs."""
    return f"{ends[0]:{form}} to {ends[1]:{form}}" if ends else "none, too few documents"
