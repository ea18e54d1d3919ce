"""Precision: bf16 by autocast, so that only matrix products are computed in bf16.

Parameters, optimizer state, memory and losses are fp32 in either precision, so checkpoints are the
same. DeepSpeed applies its own autocast in training (`training/engine/settings.py`) and disables
any other around its engine; evaluation and generation use this one.
See docs/decisions/0006-bf16-by-autocast.md.
"""

import torch

from txl_dist.config.run_config import Precision

TORCH_DTYPE: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""The dtype that a precision names."""


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """The context in which the model runs; disabled for fp32."""
    dtype = TORCH_DTYPE[precision]
    return torch.autocast(device.type, dtype, enabled=dtype is not torch.float32)
