"""`training.deterministic`: set before a GPU is used, and undone after the run."""

import os

import pytest
import torch

from txl_dist.runtime.determinism import ENVIRONMENT, deterministic


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")  # registered, so that it is restored
        monkeypatch.delenv(name)


def test_only_reproducible_operations_are_allowed_inside() -> None:
    with deterministic(enabled=True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert {name: os.environ.get(name) for name in ENVIRONMENT} == ENVIRONMENT
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory  # torch's default


def test_a_value_of_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    with deterministic(enabled=True):
        assert os.environ["NCCL_ALGO"] == "Tree"


def test_disabled_it_changes_nothing() -> None:
    with deterministic(enabled=False):
        assert not torch.are_deterministic_algorithms_enabled()
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
