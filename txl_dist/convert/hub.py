"""`txl export --format hf`: a model for people who have never heard of this program.

    model.safetensors, config.json    as in every export: txl reads this directory, too
    txl_tokenizer.json                the tokenizer of this program
    tokenizer.json                    the same for the `tokenizers` library, if it is of that kind
    transformer_xl.py                 the model in one file, which needs torch alone (standalone/)
    README.md                         the model card (analysis/model_card.py)

Nothing in it is a pickle.
"""

import json
from importlib.metadata import version
from pathlib import Path

from data_pipeline.tokenizers import Tokenizer
from txl_dist.checkpoint.manifest import TOKENIZER_NAME
from txl_dist.convert.standalone import FILE_NAME, source_for
from txl_dist.convert.stored_model import (
    DEFAULT_READING,
    HUB_TOKENIZER_NAME,
    Reading,
    write_exported,
)
from txl_dist.model.transformer_xl import TransformerXL

CARD_NAME = "README.md"


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
