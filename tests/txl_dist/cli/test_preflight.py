"""`txl config`, `txl estimate` and `txl doctor`: output, exit codes, few imports."""

import json
import re
import shlex
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.commands import run_txl
from txl_dist.config.config_file import dump_run_config, load_run_config
from txl_dist.estimate import run_estimate
from txl_dist.launch.doctor import Finding, report

TINY = str(Path(__file__).parents[3] / "configs" / "tiny.yaml")


def test_show_prints_the_resolved_config_with_overrides_and_without_secrets() -> None:
    overrides = ("optimizer.lr=1e-3", "model.n_layer=6", "tracking.uri=http://u:CANARY@h")
    code, output = run_txl("config", "show", TINY, *overrides)
    assert (code, output) == (0, dump_run_config(load_run_config(TINY, overrides)))
    assert yaml.safe_load(output)["model"]["n_layer"] == 6
    shown = json.loads(run_txl("config", "show", TINY, *overrides, "--json")[1])
    assert (shown["optimizer"]["lr"], shown["tracking"]["uri"]) == (1e-3, "http://***@h")


def test_validate_reports_a_valid_config() -> None:
    code, output = run_txl("config", "validate", TINY)
    assert (code, "is a valid config" in output) == (0, True)
    content = json.loads(run_txl("config", "validate", TINY, "--json")[1])
    assert (content["valid"], content["warnings"]) == (True, [])


def test_what_is_probably_not_meant_is_shown_before_a_run(dataset: Path, tmp_path: Path) -> None:
    assert run_txl("config", "init", tmp_path / "mine", "--data", dataset)[0] == 0
    # The recipe has Muon, and a rate that AdamW needs.
    words = (tmp_path / "mine.yaml", "optimizer.lr=1e-3", f"directory={tmp_path / 'run'}")
    for command in (("config", "validate"), ("train", "--dry-run")):
        code, output = run_txl(*command, *words)
        assert (code, "WARNING: optimizer.lr=0.001" in output) == (0, True), output
    (warning,) = json.loads(run_txl("config", "validate", *words, "--json")[1])["warnings"]
    assert "AdamW's size" in warning


def test_init_writes_a_valid_config_and_overwrites_nothing(tmp_path: Path) -> None:
    path = tmp_path / "my-run.yaml"
    assert run_txl("config", "init", tmp_path / "my-run")[0] == 0
    assert load_run_config(path).directory == "runs/my-run"
    path.write_text("mine")
    code, output = run_txl("config", "init", path)
    assert (code, "exists already" in output) == (2, True)
    assert path.read_text() == "mine"


def test_init_reads_how_much_text_there_is(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output = run_txl("config", "init", "other", "--data", "data/mine")
    assert (code, "data/mine/manifest.json" in output) == (3, True)
    assert not Path("other.yaml").exists()

    code, output = run_txl("config", "init", "mine")
    assert (code, "There is no data/mine yet" in output) == (0, True)
    without = load_run_config("mine.yaml").data
    Path("mine.yaml").unlink()
    Path("data").mkdir()
    Path("data/mine").symlink_to(dataset)
    assert "There is no" not in run_txl("config", "init", "mine")[1]
    fitting = load_run_config("mine.yaml").data
    assert run_txl("config", "init", "other", "--data", dataset, "--recipe", "paper")[0] == 0
    other = load_run_config("other.yaml")
    assert (other.model.recipe, other.data.path) == ("paper", str(dataset))
    assert without.num_lanes == 512 > fitting.num_lanes == other.data.num_lanes


@pytest.mark.parametrize("name", ["a b", "..", ".hidden", "a: b", "", "no/such/directory"])
def test_init_refuses_names_that_are_no_file_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_txl("config", "init", name)[0] == 2
    assert list(tmp_path.iterdir()) == []


# --- txl estimate


ROOT = Path(__file__).parents[3]


def estimate(*words: object) -> Any:
    """The JSON of an estimate."""
    code, output = run_txl("estimate", TINY, *words, "--json")
    assert code == 0, output
    return json.loads(output)


def test_the_json_has_every_stage_and_the_sum_of_its_parts(dataset: Path) -> None:
    content = estimate(f"data.path={dataset}", "--gpus", 5)
    assert content["legal_world_sizes"] == {"minimum": 1, "maximum": 5}
    assert (content["gpus"], content["num_steps"]) == (5, 20)
    assert set(content["stages"]) == {"0", "1", "2", "3"}
    for memory in content["stages"].values():
        parts = ("weights", "gradients", "optimizer", "buffers", "lanes", "activations")
        assert memory["device"] == sum(memory[part] for part in parts)
    assert content["days"] * 86400 == pytest.approx(20 * content["step_seconds"])
    assert content["peak_tflops"] == 19.5


def test_the_speed_follows_the_peak() -> None:
    words = ("model.vocab_size=256", "--gpus", 1)
    a100, given = (estimate(*words, *more) for more in ((), ("--peak-tflops", 39)))
    expected = 19.5e12 * 0.3 / a100["flops_per_token"]
    assert a100["tokens_per_second"] == pytest.approx(expected)
    assert given["tokens_per_second"] == pytest.approx(2 * expected)


def test_the_peak_of_a_cpu_is_measured_not_that_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_estimate, "device_peak_flops", lambda device, dtype: 5e10)
    words = ("model.vocab_size=256", "--gpus", "1", "--device", "cpu")
    content = estimate(*words)
    assert (content["device"], content["peak_tflops"]) == ("cpu", 0.05)
    speed = content["tokens_per_second"]
    assert speed == pytest.approx(5e10 * 0.3 / content["flops_per_token"])
    assert "0.05 TFLOP/s per rank" in run_txl("estimate", TINY, *words)[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("model.vocab_size=256", "deepspeed.offload=optimizer", "--gpus", 1),
            "deepspeed.offload=optimizer is not in the estimate",
        ),
        (("model.vocab_size=256", "--gpus", 6), "6 GPUs for data.num_lanes=5"),
        (("--gpus", 1), "dd model.vocab_size=N"),
    ],
)
def test_what_cannot_be_estimated_is_refused(words: tuple[object, ...], message: str) -> None:
    code, output = run_txl("estimate", TINY, *words)
    assert (code, message in output) == (2, True), output


def test_the_example_of_the_how_to_is_what_the_command_prints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = (ROOT / "docs" / "how_to" / "estimate_a_run.md").read_text("utf-8")
    command, expected = re.findall(r"```(?:bash|text)\n(.*?)```", text, re.DOTALL)[:2]
    monkeypatch.chdir(ROOT)
    code, output = run_txl(*shlex.split(command.replace("\\\n", ""))[1:])
    assert (code, output.strip()) == (0, expected.strip())


# --- txl doctor


def test_all_is_well_with_exit_code_0(tmp_path: Path) -> None:
    code, output = run_txl("doctor", "--run", tmp_path / "run", "--skip", "exposure")
    assert code == 0, output
    for check in ("versions", "devices", "network", "tracking", "storage"):
        assert f" {check} " in output
    assert "no problems found" in output


def test_a_problem_gives_exit_code_1_and_one_json_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        uri = f"http://127.0.0.1:{listener.getsockname()[1]}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    code, output = run_txl("doctor", "--run", tmp_path, "--skip", "devices", "--json")
    assert code == 1
    report = json.loads(output)
    assert not report["ok"]
    bad = {one["check"]: one for one in report["findings"] if one["status"] == "problem"}
    assert "tracking" in bad
    for row in bad.values():
        assert set(row) == {"node", "check", "status", "found", "expected", "advice"}
        assert all(row.values())
    assert "devices" not in {one["check"] for one in report["findings"]}


def test_an_unknown_check_and_a_url_as_run_directory_are_refused() -> None:
    assert run_txl("doctor", "--skip", "virus")[0] == 2
    assert run_txl("doctor", "--run", "s3://bucket/run")[0] == 2


def test_nodes_with_the_same_finding_share_a_line() -> None:
    bad = Finding("problem", "no mount", expected="a mount", advice="mount it")
    findings = [bad, *[Finding("ok", "fine")] * 3]
    nodes = [replace(each, check="storage", node=f"n{n}") for n, each in enumerate(findings, 1)]
    fine, problems, total = report(nodes).splitlines()
    assert "n2, n3, n4: fine" in fine
    assert problems.endswith("n1: no mount | expected: a mount | do: mount it")
    assert total == "1 problem found"
