"""The document table: small, unpacked unchanged, and refused if damaged."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from data_pipeline.shards.document_table import pack_documents, unpack_documents

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
    table = unpack_documents(pack_documents(starts, ids), num_documents=len(ids))
    assert np.array_equal(table.starts, starts)
    assert [table.document_id(number) for number in range(len(ids))] == ids


def test_a_sentence_takes_less_than_two_bytes() -> None:
    lengths = np.random.default_rng(0).integers(5, 60, 20_000)
    starts = np.cumsum(lengths) - lengths
    packed = pack_documents(starts, [f"corpus/part-1.txt:{n}" for n in range(1, 20_001)])
    assert len(packed) < 2 * 20_000


@given(bit=st.integers(0))
def test_a_flipped_bit_is_refused_or_changes_nothing(bit: int) -> None:
    ids = [f"a:{n}" for n in range(5)]
    packed = bytearray(pack_documents(np.arange(5), ids))
    place = bit % (len(packed) * 8)
    packed[place // 8] ^= 1 << place % 8
    try:
        table = unpack_documents(bytes(packed), num_documents=5)
    except ValueError:
        return
    # zstd ignores some bits of a frame
    assert [table.document_id(number) for number in range(5)] == ids
    assert np.array_equal(table.starts, np.arange(5))


def test_another_number_of_documents_is_refused() -> None:
    packed = pack_documents(np.arange(5), list("abcde"))
    with pytest.raises(ValueError, match="not of 6 documents"):
        unpack_documents(packed, num_documents=6)
