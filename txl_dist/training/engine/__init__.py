"""DeepSpeed ZeRO behind one interface; nothing outside this package imports deepspeed.

    stages.py           Engine: what training calls, and what differs between ZeRO stages
    optimizers.py       the optimizers, their groups of parameters, the average of the weights
    deepspeed_setup.py  DeepSpeed's configuration, from ours, and what is changed in it, and why

Why checkpoints do not use DeepSpeed's own format, and which private attributes are used instead:
docs/decisions/0003-deepspeed-by-its-fragments.md.
"""

from txl_dist.config.run_config import RunConfig
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.world import World
from txl_dist.training.engine.optimizers import freeze
from txl_dist.training.engine.stages import (
    Decision,
    Engine,
    Stage0Engine,
    Stage3Engine,
    Stage12Engine,
)

__all__ = ["Decision", "Engine", "create_engine"]

_ENGINES: tuple[type[Engine], ...] = (Stage0Engine, Stage12Engine, Stage12Engine, Stage3Engine)


def create_engine(model: TransformerXL, config: RunConfig, world: World, **shape: int) -> Engine:
    """The engine of the ZeRO stage, which takes over `model`. Collective.

    `shape`: num_micro_batches and micro_batch_rows. Raises ConfigError if DeepSpeed refuses a key
    of `deepspeed.extra`, or if `optimizer.lr_factors` trains nothing.
    """
    freeze(model, config.optimizer)
    stage = config.deepspeed.computed_stage(
        num_ranks=world.num_ranks, on_gpu=world.device.type == "cuda"
    )
    return _ENGINES[stage](model, config, world, **shape)
