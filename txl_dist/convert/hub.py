"""`txl export --format hf`: a model for people who have never heard of this program.

    model.safetensors, config.json    as in every export: txl reads this directory, too
    txl_tokenizer.json                the tokenizer of this program
    tokenizer.json                    the same for the `tokenizers` library, if it is of that kind
    transformer_xl.py                 the model in one file, which needs torch alone (standalone/)
    README.md                         the model card (model_card.py)

Nothing in it is a pickle.
"""

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from data_pipeline.tokenizers import Tokenizer
from txl_dist.checkpoint.manifest import TOKENIZER_NAME, load_checkpoint_manifest
from txl_dist.convert.model_card import card, kept_results, read_facts, read_result
from txl_dist.convert.standalone import FILE_NAME, require_supported, source_for
from txl_dist.convert.stored_model import (
    DEFAULT_READING,
    HUB_TOKENIZER_NAME,
    Reading,
    find_model,
    write_exported,
)
from txl_dist.model.transformer_xl import TransformerXL

CARD_NAME = "README.md"


def export_for_hub(
    directory: Path,
    checkpoint: Path,
    model: TransformerXL,
    tokenizer: Tokenizer,
    reading: Reading,
    *,
    scores: Sequence[Path] = (),
) -> None:
    """Write the directory for a checkpoint of a run.

    `scores`: files of `txl eval --json` for the card. If there are none, it has all results of
    these weights that `txl eval` has kept in the run.

    Raises ConfigError for a model that the standalone file cannot compute, CheckpointError for
    scores of another model.
    """
    require_supported(model.config)
    stored, manifest = find_model(checkpoint), load_checkpoint_manifest(checkpoint)
    is_in_run = checkpoint.parent.name == "checkpoints"
    results = [read_result(path, stored.digest) for path in scores]
    facts = read_facts(
        checkpoint,
        manifest,
        name=(checkpoint.parent.parent if is_in_run else checkpoint).resolve().name,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        tokenizer=tokenizer,
        weights=stored.weights,
        results=results or (kept_results(checkpoint, stored.digest) if is_in_run else []),
    )
    write_for_hub(directory, model, tokenizer, reading, card=card(facts))


def write_for_hub(
    directory: Path,
    model: TransformerXL,
    tokenizer: Tokenizer | None,
    reading: Reading = DEFAULT_READING,
    *,
    card: str,
) -> None:
    """Write the directory, completely or not at all.

    `card`: text of README.md. Raises ConfigError for a model that the standalone file cannot
    compute, and as `write_exported`.
    """
    written_by = f"txl-dist {version('txl-dist')}"
    files = {FILE_NAME: source_for(model.config, written_by=written_by), CARD_NAME: card}
    if tokenizer is not None and (library := library_json(tokenizer)) is not None:
        files[TOKENIZER_NAME] = library
    write_exported(
        directory,
        model,
        tokenizer,
        reading,
        tokenizer_name=HUB_TOKENIZER_NAME,
        more_files=files,
    )


def library_json(tokenizer: Tokenizer) -> str | None:
    """The file of the `tokenizers` library, if it is one of its kind."""
    content = tokenizer.description.model_dump().get("tokenizer")
    return None if content is None else json.dumps(content, ensure_ascii=False, indent=1) + "\n"
