"""Precision: bf16 is autocast, so that nothing but matrix products is computed in it.

Parameters, optimizer state, memory and losses are fp32 in every precision; a checkpoint does not
tell them apart. Training has its autocast from DeepSpeed (`training/deepspeed_settings.py`), which
switches off any other around its engine; evaluation and generation have this one.
See docs/decisions/0006-bf16-by-autocast.md.
"""

import torch

from txl_dist.config.run_config import Precision

PRODUCT_DTYPE: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""What matrix products are computed in."""


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """The context to run the model in."""
    dtype = PRODUCT_DTYPE[precision]
    return torch.autocast(device.type, dtype, enabled=dtype is not torch.float32)
