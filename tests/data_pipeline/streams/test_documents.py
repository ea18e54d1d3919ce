"""The documents named for lane positions are those whose tokens the segments there hold."""

from pathlib import Path

import numpy as np
import pytest

from data_pipeline.shards.manifest import ShardManifest, open_tokenizer
from data_pipeline.shards.shard_reader import TokenSource, open_split
from data_pipeline.streams.documents import documents_of_lanes
from data_pipeline.streams.lanes import LanePlan
from data_pipeline.streams.mixture import CyclicCorpus, MixedSource
from data_pipeline.streams.order import Shuffle
from data_pipeline.streams.segments import SegmentReader
from tests.support.token_sources import TextSource

LENGTHS = {"a": [[3, 5, 2], [9], [1, 1, 4]], "b": [[6, 2], [4, 3, 5]]}
POSITIONS = ((0, 3), (3, 9), (5, 17), (20, 29))


def numbered(lengths: list[list[int]], first: int) -> tuple[TextSource, list[tuple[int, str]]]:
    """A source whose tokens are numbers of documents, and the name of each number."""
    names: list[tuple[int, str]] = []
    blocks: list[list[list[int]]] = []
    for block, documents in enumerate(lengths):
        blocks.append([])
        for document, length in enumerate(documents):
            blocks[-1].append([first + len(names)] * length)
            names.append((0, f"block {block}, document {document}"))
    return TextSource(blocks), names


@pytest.mark.parametrize("shuffle", ["blocks", "none"])
@pytest.mark.parametrize("is_mixture", [False, True])
def test_documents_are_those_of_the_tokens_that_segments_hold(
    shuffle: Shuffle, is_mixture: bool
) -> None:
    source: TokenSource | MixedSource
    text_a, names = numbered(LENGTHS["a"], 0)
    source = text_a
    if is_mixture:
        text_b, names_b = numbered(LENGTHS["b"], len(names))
        names += [(1, name) for _, name in names_b]
        # Other shares than tokens: parts begin inside documents and blocks.
        shares = zip((text_a, text_b), (31, 14), strict=True)
        source = MixedSource(
            [
                CyclicCorpus(text, tokens_per_epoch=share, shuffle=shuffle, seed=5, key=key)
                for key, (text, share) in enumerate(shares)
            ]
        )
    plan = LanePlan(num_tokens=45 if is_mixture else 25, num_lanes=2, tgt_len=1)
    order = {"shuffle": shuffle, "seed": 5}
    reader = SegmentReader(source, plan, lanes=(0, 1), num_rows=2, reset="document", **order)
    for start, stop in POSITIONS:
        documents = documents_of_lanes(source, plan, lanes=(0, 1), start=start, stop=stop, **order)
        expected = np.concatenate([s.input for s in reader.read(start, stop - start)], axis=1)
        for lane in (0, 1):
            named = [d for d in documents if d.lane == lane]
            tokens = [(d.corpus, d.id) for d in named for _ in range(d.num_tokens)]
            assert tokens == [names[number] for number in expected[lane]]
            lengths = [d.num_tokens for d in named]
            assert [d.position for d in named] == [
                start + sum(lengths[:place]) for place in range(len(lengths))
            ]
            for document in named:
                (part,) = plan.epoch_ranges(document.position, document.position + 1)
                assert document.epoch == part.epoch


def test_ids_of_a_dataset_belong_to_the_text_at_their_positions(
    dataset: tuple[Path, ShardManifest],
) -> None:
    """One lane reads a whole epoch; every document begins with the number in its file's name."""
    directory, manifest = dataset
    source, tokenizer = open_split(directory, "train"), open_tokenizer(directory, manifest)
    plan = LanePlan(num_tokens=source.num_tokens, num_lanes=1, tgt_len=source.num_tokens)
    order = {"shuffle": "blocks", "seed": 1}
    reader = SegmentReader(source, plan, lanes=(0,), num_rows=1, reset="document", **order)
    (segment,) = reader.read(0, 1)
    documents = documents_of_lanes(
        source, plan, lanes=(0,), start=0, stop=plan.lane_tokens, **order
    )
    assert len(documents) == source.entry.documents > 3
    for document in documents:
        tokens = segment.input[0, document.position : document.position + document.num_tokens]
        name = Path(document.id).stem
        assert tokenizer.decode(tokens[1:]).startswith(f"[{int(name)}] ")
