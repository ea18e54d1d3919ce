"""A sweep: the setting with the lowest loss on the first split is reported on the others."""

from pathlib import Path

import pytest

from data_pipeline.system.workers import InProcess
from tests.support.exported_model import export_small_model
from txl_dist.errors import ConfigError
from txl_dist.evaluation import sweep
from txl_dist.evaluation.distributed import PlannedJob, evaluate_on_workers, plan_job
from txl_dist.evaluation.job import evaluation_job
from txl_dist.evaluation.sweep import PlannedSweep, combinations, evaluate_sweep, parse_sweep


def test_the_combinations_are_the_cross_product() -> None:
    values = parse_sweep(["mem_len=0,128 clamp_len=0,400", "tgt_len=64"])
    assert combinations(values) == [
        {"mem_len": 0, "clamp_len": 0, "tgt_len": 64},
        {"mem_len": 0, "clamp_len": 400, "tgt_len": 64},
        {"mem_len": 128, "clamp_len": 0, "tgt_len": 64},
        {"mem_len": 128, "clamp_len": 400, "tgt_len": 64},
    ]
    assert combinations({}) == [{}]


@pytest.mark.parametrize(
    "text",
    [
        "mem_len",
        "mem_len=",
        "mem_len=1,,2",
        "mem_len=-1",
        "mem_len=1.5",
        "mem_len=1,1",
        "tgt_len=0",
        "batch=1",
        "mem_len=1 mem_len=2",
    ],
)
def test_a_wrong_assignment_is_named(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_sweep([text])
    assert text.rsplit(maxsplit=1)[-1] in str(error.value)


@pytest.fixture(scope="module")
def planned(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> list[PlannedSweep]:
    """Two models, three settings, two splits."""
    sweeps = []
    for seed in range(2):
        path = tmp_path_factory.mktemp("model") / f"seed{seed}"
        model = export_small_model(path, dataset, seed=seed)
        settings = combinations({"mem_len": [0, 8], "tgt_len": [50, 100]})
        sweeps.append(
            PlannedSweep(
                [
                    [plan(model, dataset, split=split, **setting) for split in ("valid", "train")]
                    for setting in settings
                ]
            )
        )
    return sweeps


def plan(model: Path, data: Path, *, split: str, **options: int) -> PlannedJob:
    return plan_job(evaluation_job(model, data, split=split, max_tokens=401, **options))


def test_the_lowest_loss_on_the_first_split_is_reported_on_the_others(
    planned: list[PlannedSweep],
) -> None:
    for model, result in zip(planned, evaluate_sweep(planned, InProcess()), strict=True):
        losses = [candidate.sums.nats for candidate in result.candidates]
        assert losses[result.best] == min(losses)
        assert len(set(losses)) == 4
        settings = [jobs[0].job.settings for jobs in model.candidates]
        assert [candidate.settings for candidate in result.candidates] == settings
        assert result.reported == evaluate_on_workers(
            model.candidates[result.best][1:], InProcess()
        )
        assert [each.settings.split for each in result.reported] == ["train"]


def test_only_the_best_setting_is_scored_on_the_other_splits(
    planned: list[PlannedSweep], monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[str] = []

    def recorded(jobs, *args, **options):  # type: ignore[no-untyped-def]
        scored.extend(job.job.settings.split for job in jobs)
        return evaluate_on_workers(jobs, *args, **options)

    monkeypatch.setattr(sweep, "evaluate_on_workers", recorded)
    evaluate_sweep(planned[:1], InProcess())
    assert scored == ["valid"] * 4 + ["train"]


def test_equal_losses_select_the_first_setting(planned: list[PlannedSweep]) -> None:
    jobs = planned[0].candidates[0]
    (result,) = evaluate_sweep([PlannedSweep([jobs[:1], jobs[:1]])], InProcess())
    assert result.best == 0
    assert result.reported == []
