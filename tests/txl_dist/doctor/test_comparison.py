"""Differences between nodes are attributed to the right node."""

from dataclasses import replace
from itertools import combinations

from txl_dist.doctor.comparison import (
    ClockReading,
    compare_clocks,
    compare_probes,
    compare_values,
)
from txl_dist.doctor.finding import Finding, ok
from txl_dist.doctor.network import LinkSpeed, NetworkSpeed, judge_network, pair_rounds


def dataset(node: str, digest: str) -> Finding:
    finding = ok(f"/data, digest {digest}", equal_on_all_nodes=digest)
    return replace(finding, node=node, check="dataset")


def test_the_node_with_another_dataset_is_named() -> None:
    findings = [dataset("a", "1"), dataset("b", "2"), dataset("c", "1")]
    (difference,) = compare_values(findings)
    assert (difference.node, difference.check, difference.status) == ("b", "dataset", "problem")
    assert "digest 2" in difference.found
    assert "digest 1" in difference.expected
    assert compare_values([findings[0], findings[2]]) == []


def test_the_node_whose_clock_differs_is_named_also_if_it_is_the_driver() -> None:
    here = {"this machine": ClockReading(0.0, 0.0), "a": ClockReading(7.0, 0.01)}
    (finding,) = compare_clocks({**here, "b": ClockReading(7.1, 0.01)})
    assert finding.node == "this machine"
    assert "7.0 s behind" in finding.found
    (fine,) = compare_clocks({**here, "a": ClockReading(-0.4, 0.01)})
    assert fine.status == "ok"
    # A slow answer says nothing about the clock.
    (fine,) = compare_clocks({**here, "a": ClockReading(3.0, 2.5)})
    assert fine.status == "ok"


def test_the_node_that_does_not_see_the_shared_directory_is_named() -> None:
    everyone = {"a": "seen", "b": "seen", "c": "seen"}
    (finding,) = compare_probes("/runs", {"a": everyone, "b": everyone, "c": everyone})
    assert (finding.status, finding.node) == ("ok", "all nodes")
    alone = {"a": "missing", "b": "missing", "c": "seen"}
    others = {"a": "seen", "b": "seen", "c": "missing"}
    findings = compare_probes("/runs", {"a": others, "b": others, "c": alone})
    assert [finding.node for finding in findings] == ["a", "b", "c"]
    assert "files that a, b wrote are not seen" in findings[2].found
    (finding,) = compare_probes("/runs", {"a": everyone, "b": {**everyone, "a": "lock not seen"}})
    assert (finding.status, finding.node) == ("note", "all nodes")


def test_all_pairs_are_measured_once_in_rounds_of_disjoint_pairs() -> None:
    for num_ranks in (2, 3, 4, 7, 8):
        rounds = pair_rounds(num_ranks)
        pairs = [pair for pairs in rounds for pair in pairs]
        assert sorted(pairs) == list(combinations(range(num_ranks), 2))
        for pairs in rounds:
            ranks = [rank for pair in pairs for rank in pair]
            assert len(ranks) == len(set(ranks))


def measured(pairs: dict[tuple[int, int], float]) -> list[NetworkSpeed]:
    all_reduce = LinkSpeed(1e-4, 1e9)
    links = {pair: LinkSpeed(1e-4, speed) for pair, speed in pairs.items()}
    return [NetworkSpeed("gloo", all_reduce, links)]


def test_a_slow_link_is_named_and_a_slow_node_if_all_its_links_are_slow() -> None:
    nodes = ["a", "b", "c", "d"]
    even = {(0, 1): 1e9, (0, 2): 0.9e9, (0, 3): 1e9, (1, 2): 1e9, (1, 3): 1e9, (2, 3): 1e9}
    (fine,) = judge_network(nodes, measured(even))
    assert fine.status == "ok"
    assert "slowest pair a - c: 900 MB/s" in fine.found
    *_, link = judge_network(nodes, measured({**even, (1, 2): 1e8}))
    assert (link.status, link.node) == ("problem", "b - c")
    slow_node = {pair: 1e8 if 3 in pair else speed for pair, speed in even.items()}
    *_, node = judge_network([*nodes, "e"], measured({**slow_node, (0, 4): 1e9, (1, 4): 1e9}))
    assert (node.status, node.node) == ("problem", "d")
    three = {(0, 1): 1e9, (0, 2): 1e8, (1, 2): 1e8}
    *_, node = judge_network(nodes[:3], measured(three))
    assert (node.status, node.node) == ("problem", "c")
