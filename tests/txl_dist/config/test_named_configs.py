"""A config is a file or a name of the package, from every directory; a file wins.

So are the deployment files, which `txl config deploy` prints.
"""

from pathlib import Path

import pytest

from tests.support.commands import run_txl
from txl_dist.config.config_file import find_config, load_run_config, named_configs
from txl_dist.errors import ConfigError

CONFIGS = Path(__file__).parents[3] / "configs"
DEPLOY = CONFIGS.parent / "cluster" / "deploy"
FILE = "directory: runs/mine\ndata: {path: d}\ntraining: {num_steps: 4}\n"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def listed(command: str) -> dict[str, str]:
    """Summaries by name, as `txl config list` and `deploy` print them."""
    code, output = run_txl("config", command)
    assert code == 0, output
    rows = output.partition("\n\n")[0].splitlines()
    summaries = {name: rest.strip() for name, _, rest in (row.partition("  ") for row in rows)}
    assert all(30 < len(summary) < 160 for summary in summaries.values())
    return summaries


def test_every_config_has_a_name_and_a_summary_of_one_line() -> None:
    assert {*named_configs().values()} == {*CONFIGS.rglob("*.yaml")}
    for name, path in named_configs().items():
        assert find_config(name) == path
    summaries = listed("list")
    assert [*summaries] == [*named_configs()]
    assert all(summary.endswith(".") for summary in summaries.values())


@pytest.mark.parametrize(
    "given", ["modern/125m", "configs/modern/125m.yaml", Path("configs/modern/125m")]
)
def test_names_and_the_paths_of_documents_work_in_every_directory(given: str | Path) -> None:
    assert load_run_config(given) == load_run_config(CONFIGS / "modern" / "125m.yaml")


def test_a_file_wins_over_a_name() -> None:
    Path("quickstart").write_text(FILE)
    assert load_run_config("quickstart").directory == "runs/mine"
    Path("configs").mkdir()
    Path("configs/tiny.yaml").write_text(FILE)
    assert load_run_config("configs/tiny.yaml").directory == "runs/mine"


def test_a_directory_is_not_a_config_and_hides_none() -> None:
    Path("quickstart").mkdir()
    assert find_config("quickstart") == CONFIGS / "quickstart.yaml"


def test_a_name_that_may_also_mean_a_file_here_is_refused() -> None:
    Path("tiny.yaml").write_text(FILE)
    with pytest.raises(ConfigError, match=r"Write tiny\.yaml .* or configs/tiny\.yaml"):
        find_config("tiny")
    assert find_config("tiny.yaml") == Path("tiny.yaml")
    assert find_config("configs/tiny.yaml") == CONFIGS / "tiny.yaml"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("quikstart", "did you mean quickstart"),
        ("125m", "did you mean modern/125m"),
        ("wt103-base", "nvidia/wt103-base or paper/wt103-base"),
        ("enwik8-bass", "paper/enwik8-base"),
        ("xyz", ". Configs of the package: txl config list"),
        ("../configs/quickstart", "does not exist"),
    ],
)
@pytest.mark.parametrize("command", [("config", "show"), ("train",)], ids=" ".join)
def test_an_unknown_name_is_refused_with_close_ones(
    command: tuple[str, ...], given: str, message: str
) -> None:
    code, output = run_txl(*command, given)
    assert code == 2
    assert message in output


def test_every_deployment_file_is_listed_with_what_it_is_for_and_printed_unchanged() -> None:
    paths = {path for path in DEPLOY.rglob("*") if path.is_file()}
    names = {path.relative_to(DEPLOY).with_suffix("").as_posix() for path in paths}
    assert {*listed("deploy")} == names
    for path in paths:
        name = path.relative_to(DEPLOY)
        for given in (name, name.with_suffix("")):
            assert run_txl("config", "deploy", given) == (0, path.read_text("utf-8"))
    code, output = run_txl("config", "deploy", "slrm")
    assert (code, "expected one of Dockerfile, README, aws" in output) == (2, True)
