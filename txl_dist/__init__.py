"""Distributed training of Transformer-XL. `__all__` is the public API; everything else may change.

Train a model, load its newest checkpoint and continue a text:

    spec = TrainSpec(config=load_run_config("quickstart", ["training.num_steps=100"]))
    find_launcher("processes").train(spec, num_ranks=2, on_line=print)
    model, tokenizer = find_model(spec.run_path).load_with_tokenizer()
    prompt = prompt_tokens(tokenizer, "import ")
    tokens = generate_tokens(model, prompt, tgt_len=128, sampling=Sampling(), seed=0)

`prompt_tokens` begins the prompt as documents begin in training. `tokens` is an endless iterator of
token ids. `generate_texts` continues many texts in batches, each up to its `TextLimits`. Defaults
are those of `txl generate`. Score a split with the settings of training:

    result = evaluate(evaluation_spec(spec.run_path, "data/stdlib", max_tokens=10_000))

examples/minimal_train.py trains in one process on the parts: dataset, lanes, model and memory.
`Memory` carries a model's memory in a loop of your own, also of vectors instead of token ids
(examples/recall_agent.py, docs/how_to/use_memory_in_your_own_loop.md).
Paths can be given as text or as `pathlib.Path`.
"""

import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from txl_dist.runtime.process import limit_spinning

if TYPE_CHECKING:
    from data_pipeline.shards.manifest import load_manifest as load_manifest
    from data_pipeline.shards.manifest import open_tokenizer as open_tokenizer
    from data_pipeline.shards.shard_reader import open_split as open_split
    from data_pipeline.streams.lanes import LanePlan as LanePlan
    from data_pipeline.streams.segment_stream import SegmentStream as SegmentStream
    from txl_dist.analysis.recl import (
        relative_effective_context_length as relative_effective_context_length,
    )
    from txl_dist.config.run_config import RunConfig as RunConfig
    from txl_dist.convert.stored_model import Reading as Reading
    from txl_dist.convert.stored_model import find_model as find_model
    from txl_dist.convert.stored_model import write_exported as write_exported
    from txl_dist.evaluation.distributed import evaluate as evaluate
    from txl_dist.evaluation.spec import EvaluationSettings as EvaluationSettings
    from txl_dist.evaluation.spec import EvaluationSpec as EvaluationSpec
    from txl_dist.evaluation.spec import evaluation_spec as evaluation_spec
    from txl_dist.generation.generate import generate_texts as generate_texts
    from txl_dist.generation.generate import generate_tokens as generate_tokens
    from txl_dist.generation.generate import prompt_tokens as prompt_tokens
    from txl_dist.generation.text import Sampling as Sampling
    from txl_dist.generation.text import TextLimits as TextLimits
    from txl_dist.launch.launcher import find_launcher as find_launcher
    from txl_dist.model.carried_memory import Memory as Memory
    from txl_dist.model.config import ModelConfig as ModelConfig
    from txl_dist.model.transformer_xl import TransformerXL as TransformerXL
    from txl_dist.training.origin import load_run_config as load_run_config
    from txl_dist.training.spec import TrainSpec as TrainSpec

# Imported on first use: `txl --help` imports this package, and torch takes seconds.
_NAMES_IN = {
    "data_pipeline.shards.manifest": ("load_manifest", "open_tokenizer"),
    "data_pipeline.shards.shard_reader": ("open_split",),
    "data_pipeline.streams.lanes": ("LanePlan",),
    "data_pipeline.streams.segment_stream": ("SegmentStream",),
    "txl_dist.analysis.recl": ("relative_effective_context_length",),
    "txl_dist.config.run_config": ("RunConfig",),
    "txl_dist.convert.stored_model": ("Reading", "find_model", "write_exported"),
    "txl_dist.evaluation.distributed": ("evaluate",),
    "txl_dist.evaluation.spec": ("EvaluationSpec", "EvaluationSettings", "evaluation_spec"),
    "txl_dist.generation.generate": ("generate_texts", "generate_tokens", "prompt_tokens"),
    "txl_dist.generation.text": ("Sampling", "TextLimits"),
    "txl_dist.launch.launcher": ("find_launcher",),
    "txl_dist.model.carried_memory": ("Memory",),
    "txl_dist.model.config": ("ModelConfig",),
    "txl_dist.model.transformer_xl": ("TransformerXL",),
    "txl_dist.training.origin": ("load_run_config",),
    "txl_dist.training.spec": ("TrainSpec",),
}
_MODULE_OF = dict(sorted((name, module) for module in _NAMES_IN for name in _NAMES_IN[module]))
__all__ = list(_MODULE_OF)


def _import_own_packages() -> None:
    """Import the packages installed next to this one, also if others have their names.

    `python -m txl_dist` puts the current directory first in sys.path, and the user may have a
    folder `data_pipeline/` or `cluster/` there. Raises ImportError if such a folder is imported.
    """
    root = Path(__file__).resolve().parents[1]
    for name in ("data_pipeline", "cluster"):
        if not (root / name).is_dir():  # in a job, where Ray unpacks each into a folder of its own
            continue
        if name not in sys.modules:
            spec = PathFinder.find_spec(name, [str(root)])
            assert spec
            assert spec.loader
            module = sys.modules[name] = module_from_spec(spec)
            spec.loader.exec_module(module)
        elif Path(sys.modules[name].__file__ or "").resolve().parent != root / name:
            raise ImportError(
                f"the package {name} of {sys.modules[name].__file__} was imported before txl_dist, "
                "which has one of that name. Import txl_dist first, or rename the other package."
            )


_import_own_packages()
limit_spinning()


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)
