"""Other versions than expected are named with both; builds for CPU and CUDA count as equal."""

from pathlib import Path

import txl_dist
from txl_dist.doctor.checks import check_versions, installed_versions, pinned_versions


def test_the_versions_of_constraints_txt_are_installed() -> None:
    pins = pinned_versions()
    assert set(pins) >= {"torch", "ray", "mlflow"}
    (finding,) = check_versions(pins, source="constraints.txt")
    assert finding.status == "ok"
    assert Path(txl_dist.__file__).parents[1].joinpath("constraints.txt").exists()


def test_every_difference_is_named_with_both_versions() -> None:
    installed = installed_versions()
    build = installed["torch"].partition("+")[0] + "+cu999"
    expected = {**installed, "torch": build, "ray": "2.59.1", "txl-dist": "0.1.0 (sources 0)"}
    ray, code = check_versions(expected, source="this machine")
    assert (ray.status, code.status) == ("problem", "problem")
    assert ray.found == f"ray {installed['ray']}"
    assert ray.expected == "ray 2.59.1 (this machine)"
    assert "same sources" in code.advice


def test_without_a_constraints_file_nothing_is_compared(tmp_path: Path) -> None:
    assert pinned_versions(tmp_path / "constraints.txt") == {}
    assert [finding.status for finding in check_versions({}, source="")] == ["note"]
