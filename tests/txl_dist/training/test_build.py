"""What is refused before the model of a run is built."""

import pytest
import torch

from txl_dist.errors import ConfigError
from txl_dist.training.build import _require_attention


def test_attention_that_cannot_run_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    _require_attention("triton", cpu)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    for name in ("auto", "sdpa"):
        _require_attention(name, cpu)
    with pytest.raises(ConfigError, match=r"attention=triton .* no GPU\. Set model.attention=auto"):
        _require_attention("triton", cpu)
    monkeypatch.setattr("txl_dist.model.devices.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="package triton is not installed"):
        _require_attention("triton", cpu)
    with pytest.raises(ConfigError, match=r"GPUs need triton, and .* CUDA_VISIBLE_DEVICES="):
        _require_attention("auto", torch.device("cuda"))


@pytest.mark.parametrize("name", ["sdpa", "cpu"])
def test_attention_for_cpus_is_refused_on_gpus(name: str) -> None:
    with pytest.raises(ConfigError, match=f"attention={name} runs on CPUs only"):
        _require_attention(name, torch.device("cuda"))
