"""The model alone: imports torch and its own config; can be read, tested and exported by itself."""

from txl_dist.model.config import ModelConfig
from txl_dist.model.memory import Memory
from txl_dist.model.transformer_xl import TransformerXL

__all__ = ["Memory", "ModelConfig", "TransformerXL"]
