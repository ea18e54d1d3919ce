"""The optimizers update as torch's do, and do not import its compiler."""

import subprocess
import sys

import pytest
import torch

from tests.support.commands import ENVIRONMENT
from txl_dist.training.engine.eager_optimizers import Adam, AdamW

CODE = """
import sys
import torch
from txl_dist.training.engine.eager_optimizers import Adam, AdamW
from txl_dist.training.engine.lamb import Lamb
from txl_dist.training.engine.muon import Muon

settings = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-8}
for create in (Adam, AdamW, Lamb, Muon):
    weight = torch.nn.Parameter(torch.ones(2, 3))
    weight.grad = torch.ones_like(weight)
    group = {"params": [weight], "weight_decay": 0.0, "rule": "adamw"}
    more = {"momentum": 0.9} if create is Muon else {}
    optimizer = create([group], **settings, **more)
    if create is Lamb:
        optimizer.state[weight] = {
            "step": torch.tensor(0.0), "exp_avg": torch.zeros(2, 3), "exp_avg_sq": torch.zeros(2, 3)
        }
    optimizer.step()
    optimizer.zero_grad()
    assert weight.grad is None and not torch.equal(weight, torch.ones(2, 3)), create
print("torch._dynamo" in sys.modules)
"""


def test_a_step_does_not_import_the_compiler() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CODE], check=True, capture_output=True, text=True, env=ENVIRONMENT
    )
    assert ended.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("ours", "original"), [(Adam, torch.optim.Adam), (AdamW, torch.optim.AdamW)]
)
def test_weights_are_those_of_torch_bit_for_bit(
    ours: type[torch.optim.Adam], original: type[torch.optim.Adam]
) -> None:
    weights = []
    for create in (ours, original):
        generator = torch.Generator().manual_seed(5)
        weight = torch.nn.Parameter(torch.randn(3, 5, generator=generator))
        optimizer = create([weight], lr=0.03, betas=(0.7, 0.95), weight_decay=0.2, fused=True)
        for _ in range(4):
            optimizer.zero_grad()
            (weight * torch.randn(3, 5, generator=generator)).square().sum().backward()
            optimizer.step()
        weights.append(weight.detach())
    assert torch.equal(*weights)
