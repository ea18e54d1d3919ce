"""World: what the collectives return on two real ranks, and on one."""

import socket

import pytest
import torch

from tests.support.gloo_ranks import RankGroups
from txl_dist.errors import ConfigError, DataError, TxlError
from txl_dist.runtime.world import World


def use_collectives(world: World) -> tuple[list[float], list[int], list[int], int]:
    total = world.all_reduce_sum(torch.tensor([float(world.rank), 1.0]))
    world.barrier()
    ranks = world.all_gather(world.rank)
    return total.tolist(), ranks, world.run_on_all(lambda: world.rank), world.broadcast(world.rank)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_rank_gets_the_same_results(ranks: RankGroups, num_ranks: int) -> None:
    each = list(range(num_ranks))
    expected = ([float(sum(each)), float(num_ranks)], each, each, 0)
    assert ranks(num_ranks).run(use_collectives) == [expected] * num_ranks


def fail_on_both(world: World) -> str:
    def work() -> None:
        raise DataError("of rank 0") if world.is_rank_zero else ValueError("of rank 1")

    with pytest.raises(DataError) as caught:
        world.run_on_all(work)
    return str(caught.value)


def fail_on_rank_1(world: World) -> str:
    def work() -> None:
        if world.rank == 1:
            raise ValueError("text")

    with pytest.raises(TxlError) as caught:
        world.run_on_all(work)
    return str(caught.value)


def test_every_rank_raises_the_error_of_the_lowest_rank(ranks: RankGroups) -> None:
    assert ranks(2).run(fail_on_both) == ["of rank 0"] * 2
    assert ranks(2).run(fail_on_rank_1) == ["rank 1: ValueError: text"] * 2


@pytest.mark.parametrize("rank", ["x", None])
def test_variables_that_are_missing_or_no_numbers_are_a_config_error(rank: str | None) -> None:
    variables = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    environment = {name: value for name, value in variables.items() if value is not None}
    with pytest.raises(ConfigError, match="RANK, WORLD_SIZE and LOCAL_RANK must be numbers"):
        World.from_environment(environment)


@pytest.mark.fault_row(37)
def test_a_port_in_use_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(TxlError, match=rf"127\.0\.0\.1:{port}.*in use.*same command again"):
            World(0, 2, 0).join(timeout_seconds=5.0)
