"""Workers on Ray: the bytes and scores of one process, and the contract of `Workers`."""

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.launcher import RayLauncher
from data_pipeline.errors import DataError, UnfinishedError
from data_pipeline.shards.manifest import load_manifest
from tests.support.commands import txl
from tests.support.failing_units import die, die_at_first, refuse
from txl_dist.evaluation.distributed import evaluate, evaluate_on_workers, plan_spec
from txl_dist.evaluation.spec import EvaluationSettings, EvaluationSpec


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
    with RayLauncher().workers(2) as workers:
        assert sorted(workers.map(die_at_first, units)) == list(enumerate("abcde"))
        assert workers.peak_memory_bytes > 2**20
        with pytest.raises(UnfinishedError, match=r"the worker for .*/b died"):
            list(workers.map(die, units))
        with pytest.raises(DataError, match=r"^[a-e] is bad$"):
            list(workers.map(refuse, units))


@pytest.mark.fault_row(49)
@pytest.mark.slow
def test_the_score_is_the_same_for_any_number_of_workers_and_any_batch(
    dataset: Path, trained: Path
) -> None:
    settings = EvaluationSettings(
        split="valid",
        mode="exact",
        tgt_len=6,
        mem_len=8,
        clamp_len=None,
        same_length=False,
        reset="document",
    )
    spec = EvaluationSpec(
        checkpoint=trained / "checkpoints" / "step-00000020",
        data=dataset,
        settings=settings,
        batch_chunks=3,
    )
    expected = evaluate(spec)
    assert expected.sums.num_tokens == load_manifest(dataset).splits["valid"].tokens - 1
    assert expected.num_chunks > 12  # so that each of three workers has something to do
    for num_workers, batch_chunks in ((1, 3), (2, 1), (3, 4)):
        with RayLauncher().workers(num_workers, use_gpus=True) as workers:
            other = replace(spec, batch_chunks=batch_chunks)
            (result,) = evaluate_on_workers([plan_spec(other)], workers)
        if batch_chunks == spec.batch_chunks:
            assert result == expected, "to the last bit"
        assert result.sums.num_tokens == expected.sums.num_tokens
        assert result.sums.nats == pytest.approx(expected.sums.nats, rel=1e-6)
