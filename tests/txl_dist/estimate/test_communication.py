"""Communication: a ring counted message by message, and the collectives of each stage."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.txl_dist.estimate.models import model_of
from txl_dist.estimate.communication import (
    Collective,
    Links,
    StepTime,
    collectives_of_step,
    step_time,
)
from txl_dist.estimate.memory import Parameter
from txl_dist.estimate.zero_settings import ZeroSettings

SLOW = Links(gpus_per_node=2, node_gbit=1.0, intra_node_gbit=8.0, latency_seconds=0.01)


def bytes_of(stage: int, micro_batches: int, *sizes: int, **zero: int) -> dict[str, float]:
    """By kind, in multiples of the bytes of all parameters."""
    model, whole = model_of(*sizes), 4 * sum(sizes)
    result: dict[str, float] = {}
    for each in collectives_of_step(
        model, ZeroSettings(stage=stage, **zero), num_micro_batches=micro_batches
    ):
        result[each.kind] = result.get(each.kind, 0) + each.num_bytes / whole
    return {kind: round(share, 3) for kind, share in result.items() if share > 0.001}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_a_ring_sends_what_its_messages_add_up_to(num_ranks: int) -> None:
    # A tensor of one part per rank. In each round every rank passes one part on: N - 1 rounds to
    # add up, and N - 1 more to distribute the sums.
    rounds = {"reduce_scatter": num_ranks - 1, "all_gather": num_ranks - 1}
    rounds["all_reduce"] = sum(rounds.values())
    for kind, count in rounds.items():
        collective = Collective(kind=kind, num_bytes=100 * num_ranks)  # type: ignore[arg-type]
        assert collective.bytes_sent(num_ranks) == pytest.approx(100 * count)


def test_the_collectives_of_each_stage() -> None:
    sizes = (10**6, 10**6)
    assert bytes_of(0, 3, *sizes) == {"all_reduce": 1}
    assert bytes_of(1, 3, *sizes) == {"all_reduce": 1, "all_gather": 1}
    assert bytes_of(2, 3, *sizes) == {"all_reduce": 3, "all_gather": 1}
    assert bytes_of(3, 3, *sizes) == {"all_gather": 3, "reduce_scatter": 3}


def test_stage_3_gathers_twice_what_it_cannot_keep_and_once_what_stays_whole() -> None:
    too_large = bytes_of(3, 1, 10**6, max_live_parameters=10**5)
    assert too_large == {"all_gather": 2, "reduce_scatter": 1}
    assert bytes_of(3, 5, 10**5) == {"all_gather": 1, "reduce_scatter": 5}


def test_the_slowest_link_decides() -> None:
    collective = Collective(kind="all_gather", num_bytes=10**9)
    within, between = collective.seconds(2, SLOW), collective.seconds(4, SLOW)
    assert within == pytest.approx(0.5, rel=1e-4)  # 4 of 8 Gbit through a link
    assert between == pytest.approx(6.01, abs=0.02)  # 6 Gbit, one message between nodes


def test_short_messages_take_a_tree() -> None:
    short = Collective(kind="all_reduce", num_bytes=8)
    assert short.seconds(4096, SLOW) < 2 * 12 * SLOW.latency_seconds
    assert short.seconds(1, SLOW) == 0


@given(num_ranks=st.integers(2, 4096), num_bytes=st.integers(1, 10**12), factor=st.integers(2, 9))
def test_faster_links_are_never_slower_and_more_bytes_never_faster(
    num_ranks: int, num_bytes: int, factor: int
) -> None:
    faster = Links(
        gpus_per_node=2, node_gbit=factor, intra_node_gbit=8.0 * factor, latency_seconds=0.01
    )
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        collective = Collective(kind=kind, num_bytes=num_bytes)  # type: ignore[arg-type]
        larger = Collective(kind=kind, num_bytes=factor * num_bytes)  # type: ignore[arg-type]
        seconds = collective.seconds(num_ranks, SLOW)
        assert collective.seconds(num_ranks, faster) <= seconds
        assert larger.seconds(num_ranks, SLOW) >= seconds


def test_overlapped_communication_costs_only_what_exceeds_the_compute() -> None:
    one_second = Collective(kind="all_gather", num_bytes=2 * 10**9, overlaps=1.0)
    in_backward = Collective(kind="reduce_scatter", num_bytes=2 * 10**9, overlaps=0.5)
    blocking = Collective(kind="all_gather", num_bytes=2 * 10**9)
    links = Links(gpus_per_node=2, intra_node_gbit=8.0, intra_node_latency_seconds=0.0)

    def exposed(*collectives: Collective, compute: float) -> StepTime:
        return step_time(list(collectives), compute_seconds=compute, num_ranks=2, links=links)

    assert exposed(one_second, compute=3).total == pytest.approx(3)
    assert exposed(one_second, compute=0.25).total == pytest.approx(1)
    assert exposed(one_second, blocking, compute=3).total == pytest.approx(4)
    assert exposed(one_second, blocking, compute=3).communication == pytest.approx(2)
    assert exposed(in_backward, compute=2).total == pytest.approx(2)
    assert exposed(in_backward, compute=1).total == pytest.approx(1.5)
    assert exposed(in_backward, one_second, compute=2).total == pytest.approx(2)
    assert exposed(in_backward, one_second, blocking, compute=1).total == pytest.approx(3)


@pytest.mark.parametrize(("stage", "share"), [(1, 1 / 3), (2, 1.0), (3, 1.0)])
def test_full_buckets_are_reduced_in_backward_but_not_the_embedding(
    stage: int, share: float
) -> None:
    table = Parameter(name="table.weights.0", num_elements=70, num_states=2)
    layer = Parameter(name="layers.0.w", num_elements=590, num_states=2)
    zero = ZeroSettings(stage=stage, overlap_comm=True, reduce_bucket_size=100)
    times = 3 if stage >= 2 else 1
    reductions = [
        (each.num_bytes, each.num_messages, each.overlaps)
        for each in collectives_of_step(
            replace(model_of(1), parameters=(table, layer)), zero, num_micro_batches=3
        )
        if each.num_bytes > 64 and each.kind != "all_gather"
    ]
    backward = 2 / 3
    assert reductions == [
        (4 * 500 * times, 5 * times, pytest.approx(backward * share)),
        (4 * 160 * times, 2 * times, 0.0),
    ]
