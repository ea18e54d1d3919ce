"""Epoch orders: a fixed hash, a permutation of whole blocks, and the block of any token."""

import numpy as np
import pytest

from data_pipeline.streams.order import (
    GOLDEN_GAMMA,
    ORDERINGS,
    EpochOrder,
    hash_ids,
    splitmix64,
)

BLOCK_TOKENS = np.array([5, 1, 300, 7, 7, 40], np.int64)


def order(*, seed: int = 0, epoch: int = 0, shuffle: str = "blocks") -> EpochOrder:
    return EpochOrder.of(BLOCK_TOKENS, seed=seed, epoch=epoch, ordering=ORDERINGS[shuffle])


def documents_of(epoch_order: EpochOrder, block: int, num_documents: int) -> list[int]:
    documents = epoch_order.document_order(block, num_documents)
    assert documents is not None
    return documents.tolist()


@pytest.mark.parametrize(
    ("seed", "outputs"),
    [
        (0, [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]),
        (
            1234567,
            [
                6457827717110365317,
                3203168211198807973,
                9817491932198370423,
                4593380528125082431,
                16408922859458223821,
            ],
        ),
    ],
)
def test_splitmix64_returns_the_published_numbers(seed: int, outputs: list[int]) -> None:
    steps = np.arange(len(outputs), dtype=np.uint64)
    states = np.uint64(seed) + steps * GOLDEN_GAMMA
    assert splitmix64(states).tolist() == outputs


def test_an_order_never_changes_between_versions() -> None:
    # If this changes, every resumed run reads other text.
    assert hash_ids(7, 3, num_ids=2).tolist() == [11248596980798508817, 1173472824657711729]
    assert order(seed=7, epoch=3).blocks.tolist() == [2, 1, 3, 4, 0, 5]
    assert documents_of(order(seed=7, epoch=3), 2, 6) == [2, 5, 3, 4, 0, 1]


def test_every_epoch_and_seed_has_another_permutation() -> None:
    orders = [order(seed=seed, epoch=epoch) for seed in (0, 1, 2**63 - 1) for epoch in range(4)]
    assert all(sorted(o.blocks.tolist()) == list(range(6)) for o in orders)
    assert len({tuple(o.blocks.tolist()) for o in orders}) == len(orders)


def test_documents_of_two_blocks_or_epochs_are_permuted_differently() -> None:
    permutations = [
        tuple(documents_of(order(epoch=epoch), block, 20))
        for epoch in range(3)
        for block in range(3)
    ]
    assert all(sorted(p) == list(range(20)) for p in permutations)
    assert len(set(permutations)) == len(permutations)


@pytest.mark.parametrize("shuffle", ORDERINGS)
def test_locate_finds_the_block_of_every_token(shuffle: str) -> None:
    epoch = order(shuffle=shuffle)
    by_hand = [
        (block, start)
        for block, start in zip(epoch.blocks.tolist(), epoch.starts[:-1].tolist(), strict=True)
        for _ in range(BLOCK_TOKENS[block])
    ]
    assert [epoch.locate(p) for p in range(epoch.num_tokens)] == by_hand


@pytest.mark.parametrize("position", [-1, 360])
def test_locate_refuses_a_position_outside_the_epoch(position: int) -> None:
    with pytest.raises(ValueError, match=f"position={position} is outside the epoch's 360 tokens"):
        order().locate(position)
