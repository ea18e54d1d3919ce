"""DeepSpeed ZeRO behind one interface; nothing outside this package imports deepspeed.

    interface.py   Engine: what training calls, and what all stages have in common
    stage_0.py     parameters, gradients and optimizer state whole on every rank
    stage_1_2.py   optimizer state (1) and gradients (2) sharded, parameters whole
    stage_3.py     parameters sharded too
    optimizers.py  the optimizer of a config (lamb.py, muon.py: our own)
    parameter_groups.py  which parameters decay, which ones Muon orthogonalises
    averaging.py   the average of the weights over steps
    settings.py    DeepSpeed's configuration, from ours
    initialise.py  `deepspeed.initialize` and its side effects

Why checkpoints do not use DeepSpeed's own format, and which private attributes are used instead:
docs/decisions/0003-deepspeed-by-its-fragments.md.
"""

from txl_dist.config.run_config import RunConfig
from txl_dist.model.transformer_xl import TransformerXL
from txl_dist.runtime.world import World
from txl_dist.training.engine.interface import Decision, Engine
from txl_dist.training.engine.stage_0 import Stage0Engine
from txl_dist.training.engine.stage_1_2 import Stage12Engine
from txl_dist.training.engine.stage_3 import Stage3Engine

__all__ = ["Decision", "Engine", "create_engine"]

_ENGINES: dict[int, type[Engine]] = {
    0: Stage0Engine,
    1: Stage12Engine,
    2: Stage12Engine,
    3: Stage3Engine,
}


def create_engine(model: TransformerXL, config: RunConfig, world: World, **shape: int) -> Engine:
    """The engine of `config.deepspeed.zero_stage`, which takes over `model`. Collective.

    `shape`: num_micro_batches and micro_batch_rows. Raises ConfigError if DeepSpeed refuses a key
    of `deepspeed.extra`.
    """
    return _ENGINES[config.deepspeed.zero_stage](model, config, world, **shape)
