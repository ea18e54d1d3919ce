"""Preparation with Ray tasks: the bytes of one process, and the contract of `Workers`."""

from pathlib import Path

import pytest

from cluster.preparation import RayWorkers
from data_pipeline.errors import DataError, UnfinishedError
from tests.support.commands import txl
from tests.support.failing_units import die, die_at_first, refuse


@pytest.mark.slow
def test_a_dataset_prepared_and_verified_on_ray_has_the_same_bytes(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "data_pipeline"
    options = ("--shuffle", 1, "--split", "valid=0.2", "--format", "text", "--json")
    contents = []
    for name, options_of_ray in (("here", ()), ("ray", ("--on", "ray", "--workers", 2))):
        out = tmp_path / name
        ended = txl("prepare", folder, "--out", out, *options, *options_of_ray)
        assert ended.returncode == 0, ended.stderr
        contents.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert contents[0] == contents[1]
    (tmp_path / "ray" / "valid-000000.tar.zst").unlink()
    ended = txl("data", "verify", tmp_path / "ray", "--on", "ray", "--workers", 2)
    assert ended.returncode == 3, ended.stderr
    assert "valid-000000.tar.zst: missing" in ended.stderr


@pytest.mark.slow
def test_workers_on_ray_keep_the_contract_of_workers(tmp_path: Path) -> None:
    units = [tmp_path / name for name in "abcde"]
    with RayWorkers(2, address=None) as workers:
        assert sorted(workers.map(die_at_first, units)) == list(enumerate("abcde"))
        assert workers.peak_memory_bytes > 2**20
        with pytest.raises(UnfinishedError, match=r"the worker for .*/b died"):
            list(workers.map(die, units))
        with pytest.raises(DataError, match=r"^[a-e] is bad$"):
            list(workers.map(refuse, units))
