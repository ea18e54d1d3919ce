"""Exported models with random weights, and requests as the harness makes them."""

from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance

from data_pipeline.tokenizers import Tokenizer
from tests.support.small_models import small_model
from txl_dist.convert.stored_model import Reading, write_exported

TGT_LEN = 6


def export(directory: Path, tokenizer: Tokenizer, **options: Any) -> Path:
    """Write a model of 2 layers with the vocabulary of `tokenizer`."""
    model = small_model(vocab_size=tokenizer.vocab_size, **({"mem_len": 8} | options)).float()
    write_exported(directory, model, tokenizer, Reading(tgt_len=TGT_LEN, reset="stream"))
    return directory


def requests(kind: str, *arguments: tuple) -> list[Instance]:
    """Requests of a task named `local`, one per tuple of arguments."""
    return [
        Instance(kind, {}, args, idx=0, metadata=("local", number, 1))
        for number, args in enumerate(arguments)
    ]
