"""CUDA graphs of the layers, through steps that differ from the recorded one, against eager steps.

tests/txl_dist/training/test_cuda_graphs.py takes the same steps on a CPU.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.gpu import DEVICE
from txl_dist.model.config import ModelConfig
from txl_dist.model.dropout import LaneDropoutMasks
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.training.compilation import compile_model, record_layers

LANES, TGT_LEN, NUM_STEPS, NUM_TURNS, VOCAB_SIZE = 3, 4, 6, 2, 13
CONFIG = ModelConfig(
    vocab_size=VOCAB_SIZE, cutoffs=(5,), n_layer=5, d_model=16, n_head=2, d_head=8, d_inner=24,
    mem_len=7, dropout=0.2, dropatt=0.1, attention="auto",
)  # fmt: skip


def trained(
    device: torch.device, masks: Sequence[Any], prepare: Callable[[TransformerXL], None]
) -> dict[str, Tensor | list[Tensor]]:
    """Losses, weights, memories and an evaluation of six steps of SGD.

    Two turns have a memory each; documents begin at random places; between the third and the fourth
    step a text of another size is scored. `prepare` is called with the model before the first step.
    """
    model, generator = TransformerXL(CONFIG, seed=1).to(device), torch.Generator().manual_seed(2)
    prepare(model)
    memories = [model.empty_memory(LANES) for _ in range(NUM_TURNS)]
    ages = [torch.zeros(LANES, 1, dtype=torch.int64) for _ in range(NUM_TURNS)]
    losses, scores = [], []
    for step in range(NUM_STEPS):
        turn, t = step % NUM_TURNS, torch.arange(TGT_LEN)
        text_BT = torch.randint(VOCAB_SIZE, (LANES, TGT_LEN + 1), generator=generator)
        start_B1 = torch.randint(2 * TGT_LEN, (LANES, 1), generator=generator)  # often none
        age_BT = torch.where(t >= start_B1, t - start_B1, ages[turn] + t)
        ages[turn] = age_BT[:, -1:] + 1
        nats_BT, memories[turn] = model(
            text_BT[:, :-1].to(device), text_BT[:, 1:].contiguous(), age_BT.int().to(device),
            memories[turn], masks[step],
        )  # fmt: skip
        nats_BT.mean().backward()
        losses.append(nats_BT.detach().cpu())
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.add_(parameter.grad, alpha=-0.5)
                parameter.grad = None
            if step == NUM_STEPS // 2:
                scores.append(scored(model.eval(), device).cpu())
                model.train()
    tensors = [x.cpu() for memory in memories for x in memory.tensors().values()]
    weights = {name: x.detach().cpu() for name, x in model.named_parameters()}
    return {"losses": losses, "scores": scores, "memories": tensors, **weights}


def scored(model: TransformerXL, device: torch.device) -> Tensor:
    token_BT = torch.arange(2 * 9, device=device).view(2, 9) % VOCAB_SIZE
    age_BT = torch.arange(9, device=device, dtype=torch.int32).expand(2, -1)
    return model(token_BT, token_BT.cpu(), age_BT, model.inference_state(2))[0]


def compile_and_record(model: TransformerXL) -> None:
    compile_model(model, DEVICE)
    record_layers(model, DEVICE)


@pytest.mark.gpu
def test_resets_turns_and_an_evaluation_between_replays() -> None:
    masks = [LaneDropoutMasks(seed=3, step=step, lanes=range(LANES)) for step in range(NUM_STEPS)]
    expected, actual = (
        trained(DEVICE, masks, prepare) for prepare in (lambda model: None, compile_and_record)
    )
    assert_close(actual, expected, rtol=1e-3, atol=1e-4)
