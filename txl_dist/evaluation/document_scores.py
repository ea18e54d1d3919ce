"""`txl eval --per-document FILE`: one line of JSON for each document of the scored splits.

    {"checkpoint": "...", "split": "valid", "id": "...", "tokens": 12, "bytes": 40, "nats": 31.25}

Every target is in one document, so tokens and bytes add up to those of the score exactly, and nats
up to the rounding of float64. The workers send the sums of each batch (breakdown.py), from which
`--resume` continues. Here they take 32 bytes per document; ids are read shard by shard.
"""

import json
from collections.abc import Iterator, Sequence

from data_pipeline.shards.shard_reader import open_split
from txl_dist.evaluation.breakdown import DocumentSums
from txl_dist.evaluation.distributed import PlannedJob
from txl_dist.evaluation.evaluate import EvaluationResult


def document_lines(
    planned: Sequence[PlannedJob], results: Sequence[EvaluationResult]
) -> Iterator[bytes]:
    """The lines of all jobs, in the order of the splits. The jobs have no `num_ranks`."""
    for each, result in zip(planned, results, strict=True):
        names = {"checkpoint": str(each.given.checkpoint), "split": result.settings.split}
        # Words are replaced by `<unk>`, and token ids have no text: no document's bytes are known.
        has_bytes = result.sums.num_bytes > 0 and not result.text.is_word_model
        for id_, nats, tokens, num_bytes in _scores(each):
            score = {"tokens": tokens, "bytes": num_bytes if has_bytes else None, "nats": nats}
            yield json.dumps({**names, "id": id_, **score}).encode() + b"\n"


def _scores(planned: PlannedJob) -> Iterator[tuple[str, float, int, int]]:
    """Id, nats, tokens and bytes of every document of which a token was read."""
    scored = _sums(planned)
    document = next(scored, None)
    position, stop = 0, planned.chunks[-1].stop + 1
    for id_, num_tokens in open_split(planned.job.data, planned.job.settings.split).documents():
        if position >= stop:  # of `max_tokens`
            return
        if document is not None and position == document[0]:
            _, nats, tokens, num_bytes = document
            yield id_, nats, tokens, num_bytes
            document = next(scored, None)
        else:  # one token, the first of the split, which nothing predicts
            yield id_, 0.0, 0, 0
        position += num_tokens


def _sums(planned: PlannedJob) -> Iterator[tuple[int, float, int, int]]:
    """Start, nats, tokens and bytes of every document with a target, in order."""
    last: list[DocumentSums] = []
    for _, scores in sorted(planned.finished.batches.items()):
        assert scores.breakdown is not None, "planned with per_document"
        documents = DocumentSums.total([*last, scores.breakdown.documents])
        yield from documents.rows()[:-1]
        # The next batch may continue the last document.
        last = [DocumentSums(*(column[-1:] for column in documents.columns))]
    for documents in last:
        yield from documents.rows()
