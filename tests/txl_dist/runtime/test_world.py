"""World: what the collectives return on two real ranks, and on one."""

import socket
from contextlib import nullcontext

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


@pytest.mark.parametrize(
    ("value", "is_refused"),
    [("0", True), ("3,4", True), ("GPU-8f1e", True), ("MIG-8f1e", True)]
    + [(value, False) for value in ("", "-1", "NoDevFiles")],
)
def test_a_gpu_that_was_assigned_and_cannot_be_used_is_no_reason_to_train_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, value: str, is_refused: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    expected = pytest.raises(ConfigError, match=rf"rank 2 on host .* was given GPU {value}")
    with expected if is_refused else nullcontext():
        World(2, 4).join(timeout_seconds=1)
