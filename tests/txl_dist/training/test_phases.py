"""Runs on several corpora: phases, shares, changes of the mixture on resume, and errors."""

import json
import shutil
from pathlib import Path

import pytest

from tests.support.commands import txl
from tests.support.gloo_ranks import RankGroups
from tests.support.prepared import prepared
from tests.support.training_runs import (
    NO_EVALUATION,
    TINY,
    losses,
    metrics,
    refusal,
    tiny_spec,
    train,
)
from txl_dist.checkpoint.manifest import load_checkpoint_manifest
from txl_dist.config.config_file import dump_run_config, load_run_config
from txl_dist.errors import ConfigError, DataError
from txl_dist.training.data import TrainingData
from txl_dist.training.phases import CorpusEntry, Phase, count_tokens, phases_from
from txl_dist.training.spec import TrainSpec
from txl_dist.training.state import TrainState, load_state

SETTINGS = (
    NO_EVALUATION,
    "training.checkpoint_interval_steps=4",
    "training.keep_checkpoints=9",
)
CHANGE = ("data.mixture",)
STEPS = ("training.num_steps",)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three small datasets of bytes: the 20 steps of a run cross the ends of epochs."""
    datasets = {}
    for name, num_documents in (("oak", 11), ("ash", 7), ("elm", 5)):
        texts = [f"{name} {number}" * (1 + number % 3) for number in range(2 * num_documents)]
        out = tmp_path_factory.mktemp(name) / "data"
        datasets[name] = prepared(out, *texts, split={"valid": 0.5}, block_bytes=512)
    return datasets


def mixed_spec(
    corpora: dict[str, Path],
    weights: dict[str, float],
    run: Path,
    *overrides: str,
    **options: object,
) -> TrainSpec:
    mixture = {
        name: {"path": str(corpora[name]), "weight": weight} for name, weight in weights.items()
    }
    data = ("data.path=null", f"data.mixture={json.dumps(mixture)}")
    return tiny_spec(corpora["oak"], run, *SETTINGS, *data, *overrides, **options)


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def state_of(path: Path) -> TrainState:
    return load_state(path, load_checkpoint_manifest(path))


def test_a_change_of_weights_begins_a_phase_that_resumes_on_any_number_of_ranks(
    ranks: RankGroups, corpora: dict[str, Path], tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    before, after = {"oak": 3.0, "ash": 1.0}, {"oak": 1.0, "elm": 2.0, "ash": 1.0}
    assert ranks(2).run(train, mixed_spec(corpora, before, first)) == [0, 0]

    at_8 = str(checkpoint(first, 8))
    spec = mixed_spec(corpora, after, second, resume=at_8)
    assert ranks(2).run(train, spec) == [4, 4]
    message = refusal(second)
    assert "data.mixture.elm: not in the checkpoint, now 50.00%" in message
    assert "data.mixture.oak: checkpoint 0.75, now 0.25" in message
    assert "data.mixture.ash" not in message, "its share is the same"
    assert "--allow-change data.mixture" in message

    spec = mixed_spec(corpora, after, second, resume=at_8, allow_change=CHANGE)
    assert ranks(2).run(train, spec) == [0, 0]
    uninterrupted = losses(second)
    assert sorted(uninterrupted) == list(range(9, 21))
    assert uninterrupted[9] != losses(first)[9], "other text"
    valid = {line["step"]: line["memory_valid"] for line in metrics(second) if "loss" in line}
    assert valid[9] == 0 < valid[10], "memory of the phase before is not used"

    phases = state_of(checkpoint(second, 12)).phases
    assert [phase.position for phase in phases] == [0, 8 * 3]
    assert phases[1].first_epoch > 0
    for at, num_ranks, tolerance in [(12, 2, 0.0), (12, 1, 2e-6), (16, 1, 2e-6)]:
        resumed = tmp_path / f"resumed-{at}-{num_ranks}"
        spec = mixed_spec(corpora, after, resumed, resume=str(checkpoint(second, at)))
        assert ranks(num_ranks).run(train, spec) == [0] * num_ranks
        expected = {step: loss for step, loss in uninterrupted.items() if step > at}
        assert losses(resumed) == pytest.approx(expected, rel=tolerance)
        assert state_of(checkpoint(resumed, 20)).phases == phases


def test_the_same_shares_are_no_change_of_the_mixture(
    ranks: RankGroups, corpora: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    short = "training.num_steps=6"
    assert ranks(1).run(train, mixed_spec(corpora, {"oak": 1, "elm": 3}, run, short)) == [0]
    again = mixed_spec(
        corpora, {"oak": 2, "elm": 6}, run, "training.num_steps=8",
        allow_change=STEPS,
    )  # fmt: skip
    assert ranks(1).run(train, again) == [0]
    assert (run / "logs" / "rank-0.log").read_text().count("mixture | oak 2") == 2


def test_one_corpus_becomes_two_and_one_again(
    ranks: RankGroups, corpora: dict[str, Path], tmp_path: Path
) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    assert ranks(1).run(train, tiny_spec(corpora["oak"], first, *SETTINGS)) == [0]
    two = mixed_spec(
        corpora, {"oak": 1, "ash": 1}, second, resume=str(checkpoint(first, 8)),
        allow_change=CHANGE,
    )  # fmt: skip
    assert ranks(1).run(train, two) == [0]
    one = tiny_spec(
        corpora["ash"], third, *SETTINGS, resume=str(checkpoint(second, 12)), allow_change=CHANGE
    )
    assert ranks(1).run(train, one) == [0]
    phases = state_of(checkpoint(third, 20)).phases
    assert [phase.position for phase in phases] == [0, 24, 36]
    assert [[c.name for c in phase.corpora] for phase in phases] == [
        ["data"],
        ["oak", "ash"],
        ["data"],
    ]
    assert ranks(1).run(train, tiny_spec(corpora["oak"], third, *SETTINGS)) == [3]


def test_a_corpus_that_changed_is_refused_by_name(
    ranks: RankGroups, corpora: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    weights = {"oak": 1.0, "ash": 1.0}
    assert ranks(1).run(train, mixed_spec(corpora, weights, run, "training.num_steps=6")) == [0]
    changed = {**corpora, "ash": corpora["elm"]}
    spec = mixed_spec(changed, weights, run)
    assert ranks(1).run(train, spec) == [3]
    assert "data.mixture.ash.path has" in refusal(run)
    assert "--allow-data-change" in refusal(run)
    moved = mixed_spec(changed, weights, run, allow_data_change=True, allow_change=STEPS)
    assert ranks(1).run(train, moved) == [0]
    assert len(state_of(checkpoint(run, 20)).phases) == 2


def test_evaluation_reads_the_first_corpus_that_has_the_split(
    ranks: RankGroups, corpora: dict[str, Path], tmp_path: Path
) -> None:
    tokens = {
        name: json.loads((path / "manifest.json").read_text())["splits"]["valid"]["tokens"]
        for name, path in corpora.items()
    }
    assert len(set(tokens.values())) == 3
    settings = ("training.num_steps=4", "evaluation.split=valid")
    spec = mixed_spec(corpora, {"ash": 1.0, "oak": 1.0}, tmp_path / "run", *settings)
    assert ranks(2).run(train, spec) == [0, 0]
    (line,) = [line for line in metrics(tmp_path / "run") if "valid/loss" in line]
    assert (line["step"], line["valid/tokens_scored"]) == (4, tokens["ash"] - 1)


def test_corpora_that_do_not_fit_together_are_refused_by_name(
    corpora: dict[str, Path], tmp_path: Path
) -> None:
    chars, copy = tmp_path / "chars", tmp_path / "copy"
    prepared(chars, "words of another tokenizer " * 9, tokenizer="char")
    shutil.copytree(corpora["oak"], copy)
    datasets = {**corpora, "chars": chars, "copy": copy}
    for other, message in (
        ("chars", "corpora 'oak' .* and 'chars' .* type byte and char, vocab_size"),
        ("copy", "data.mixture.oak .* and copy .* are the same data"),
    ):
        spec = mixed_spec(datasets, {"oak": 1.0, other: 1.0}, tmp_path / "run")
        with pytest.raises(DataError, match=message):
            TrainingData.open(spec.config, num_ranks=1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.path=d", "data.mixture={a: {path: x, weight: 1}}"], "data.path: is set, but so is"),
        (["data.path=null"], "data.path: is missing"),
        (["data.path=null", "data.mixture={a: {path: x, weight: 0}}"], "mixture.a.weight is 0"),
        (["data.path=null", "data.mixture={a: {path: x}}"], "data.mixture.a.weight is missing"),
        (["data.path=null", "data.mixture={}"], "data.mixture"),
        (["data.path=null", "data.mixture={a: {path: x, weights: 1}}"], "unknown key"),
    ],
)
def test_an_invalid_mixture_is_a_config_error(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config(TINY, overrides)
    assert message in str(caught.value)


def test_txl_data_mix_prints_the_shares(corpora: dict[str, Path], tmp_path: Path) -> None:
    config = mixed_spec(corpora, {"oak": 1.0, "elm": 3.0}, tmp_path).config
    (tmp_path / "run.yaml").write_text(dump_run_config(config))
    done = txl("data", "mix", tmp_path / "run.yaml", "data.mixture.oak.weight=9", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    oak, elm = report["corpora"]["oak"], report["corpora"]["elm"]
    assert oak["tokens_per_epoch"] + elm["tokens_per_epoch"] == report["tokens_per_epoch"]
    assert abs(oak["tokens_per_epoch"] - 0.75 * report["tokens_per_epoch"]) <= 1
    assert oak["passes"] == oak["tokens_per_epoch"] / oak["tokens"]
    text = txl("data", "mix", tmp_path / "run.yaml").stdout
    assert "elm 7" in text
    assert "times its" in text


# --- the tokens of a resume ----------------------------------------------------------------------


def phase(num_lanes: int, **fields: object) -> Phase:
    corpus = CorpusEntry(name="data", digest="0" * 64, tokens=20, weight=1.0)
    return Phase.model_validate({"corpora": (corpus,), "num_lanes": num_lanes, **fields})


def continued(**fields: object) -> Phase:
    """Two lanes of ten tokens have read three each; three lanes continue."""
    return phase(3, position=3, **fields)


@pytest.mark.parametrize(
    ("after", "lost", "twice"),
    [
        (continued(unread=((3, 10), (13, 20))), 0, 0),
        (continued(unread=((5, 10), (13, 20))), 0, 0),  # fewer than the tail of three lanes
        (continued(unread=((6, 10), (13, 20))), 3, 0),
        (continued(unread=((2, 10), (13, 20))), 0, 1),
        (continued(first_epoch=1), 14, 0),
        (continued(), 0, 6),
    ],
)
def test_lost_and_repeated_tokens_are_counted(after: Phase, lost: int, twice: int) -> None:
    count = count_tokens((phase(2),), after, position=3)
    assert (count.lost, count.twice) == (lost, twice)
    assert str(count).startswith(f"tokens lost by this resume {lost}, read twice {twice} | ")


def test_a_new_number_of_lanes_continues_the_epoch() -> None:
    phases = phases_from((phase(2),), phase(3), position=3, context_tokens=4)
    assert phases[-1] == continued(unread=((3, 10), (13, 20)), context_tokens=4)
