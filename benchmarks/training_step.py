"""A training step of one model, which gpu.py and model_speed.py time."""

import torch
from torch import Tensor

from txl_dist.config.run_config import Precision
from txl_dist.model.config import ModelConfig
from txl_dist.model.devices import to_device
from txl_dist.model.dropout import LaneDropoutMasks
from txl_dist.model.flops import training_flops
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.device import autocast
from txl_dist.training.compilation import compile_model, record_layers

# Shapes: B lanes, T segment tokens

CPU = torch.device("cpu")
OLD = 10**6
"""An age that makes the whole memory visible."""


class TrainingStep:
    """Forward, backward, clipping and AdamW on one segment, with a full memory. Call it repeatedly.

    `flops` are those of the matrix products of one call.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_lanes: int,
        tgt_len: int,
        device: torch.device = CPU,
        precision: Precision = "fp32",
        compiled: bool = False,
        cuda_graphs: bool = False,
        memory_dtype: torch.dtype = torch.float32,
    ) -> None:
        self._device, self._precision, self._lanes = device, precision, range(num_lanes)
        self._model = TransformerXL(config).to(device)
        if compiled:
            compile_model(self._model, device)
        if cuda_graphs:
            record_layers(self._model, device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        self._memory = self._model.empty_memory(num_lanes, dtype=memory_dtype)
        self._number = 0
        input_BT, self._target_BT = zipf_segment(config.num_ids, (num_lanes, tgt_len))
        self._input_BT = to_device(input_BT.contiguous(), device)
        self._age_BT = torch.full(input_BT.shape, OLD, dtype=torch.int32, device=device)
        tail_rows = [
            int(((self._target_BT >= low) & (self._target_BT < high)).sum())
            for low, high in config.cluster_bounds[1:]
        ]
        self.flops = training_flops(
            config, num_lanes=num_lanes, tgt_len=tgt_len, tail_rows=tail_rows
        )

    def __call__(self) -> None:
        self._number += 1
        masks = LaneDropoutMasks(seed=0, step=self._number, lanes=self._lanes)
        with autocast(self._precision, self._device):
            nats_BT, self._memory = self._model(
                self._input_BT, self._target_BT, self._age_BT, self._memory, masks
            )
        nats_BT.mean().backward()
        # On CPUs `foreach` takes 9 instead of 6 ms per step of (a), so torch decides by device.
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 0.25)
        self._optimizer.step()
        self._optimizer.zero_grad()


def zipf_segment(num_ids: int, shape_BT: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """(input, target) on the host; an id has a probability proportional to about 1 / (id + 1)."""
    num_lanes, tgt_len = shape_BT
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(num_lanes, tgt_len + 1, generator=generator, dtype=torch.float64)
    text = (num_ids**uniform - 1).long().clamp(max=num_ids - 1)
    return text[:, :-1], text[:, 1:].contiguous()
