"""The table of documents in an index: small, exact, and refused if damaged."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from data_pipeline.shards.shard_index import DocumentIds, pack_documents, unpack_documents

IDS = st.one_of(
    st.text(max_size=9),
    st.builds("{}:{}".format, st.sampled_from(["a.txt", "b:c", ""]), st.integers(0, 10**20)),
)


@given(
    documents=st.lists(st.tuples(st.integers(0, 2**40), IDS), max_size=9),
)
@example([(0, "a:01"), (3, "a:"), (0, ":7"), (5, "a:-1"), (9, "a:٣"), (1, "a:1\n")])
def test_starts_and_ids_are_unpacked_unchanged(documents: list[tuple[int, str]]) -> None:
    starts = np.array([start for start, _ in documents], np.int64)
    ids = [id_ for _, id_ in documents]
    packed = pack_documents(starts, [DocumentIds.of(ids)])
    unpacked_starts, unpacked_ids = unpack_documents(packed, num_documents=len(ids))
    assert np.array_equal(unpacked_starts, starts)
    assert [unpacked_ids.id_of(number) for number in range(len(ids))] == ids


def test_a_sentence_takes_less_than_two_bytes() -> None:
    lengths = np.random.default_rng(0).integers(5, 60, 20_000)
    starts = np.cumsum(lengths) - lengths
    packed = pack_documents(
        starts, [DocumentIds.of([f"corpus/part-1.txt:{n}" for n in range(1, 20_001)])]
    )
    assert len(packed) < 2 * 20_000


@given(bit=st.integers(0))
def test_a_flipped_bit_is_refused_or_changes_nothing(bit: int) -> None:
    ids = [f"a:{n}" for n in range(5)]
    packed = bytearray(pack_documents(np.arange(5), [DocumentIds.of(ids)]))
    place = bit % (len(packed) * 8)
    packed[place // 8] ^= 1 << place % 8
    try:
        starts, unpacked_ids = unpack_documents(bytes(packed), num_documents=5)
    except ValueError:
        return
    # zstd ignores some bits of a frame
    assert [unpacked_ids.id_of(number) for number in range(5)] == ids
    assert np.array_equal(starts, np.arange(5))


def test_another_number_of_documents_is_refused() -> None:
    packed = pack_documents(np.arange(5), [DocumentIds.of("abcde")])
    with pytest.raises(ValueError, match="not of 6 documents"):
        unpack_documents(packed, num_documents=6)
