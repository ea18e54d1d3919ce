"""`txl export --format hf`: a model for people who have never heard of this program.

    model.safetensors, config.json    as in every export: txl reads this directory, too
    txl_tokenizer.json                the tokenizer of this program
    tokenizer.json                    the same for the `tokenizers` library, if it is of that kind
    transformer_xl.py                 the model in one file, which needs torch alone (standalone.py)
    README.md                         the model card (analysis/model_card.py)

Nothing in it is a pickle.
"""

import inspect
import json
from importlib.metadata import version
from pathlib import Path

from data_pipeline.tokenizers import Tokenizer
from txl_dist.checkpoint.manifest import TOKENIZER_NAME
from txl_dist.convert import standalone
from txl_dist.convert.stored_model import (
    DEFAULT_READING,
    HUB_TOKENIZER_NAME,
    Reading,
    write_exported,
)
from txl_dist.errors import ConfigError
from txl_dist.model.config import ModelConfig
from txl_dist.model.transformer_xl import TransformerXL

CARD_NAME = "README.md"
FILE_NAME = "transformer_xl.py"

MEMORIES = ("recurrent", "tokens", "recurrent+tokens")
ENCODINGS = ("sinusoidal", "shaw", "rotary", "alibi", "absolute")


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
    require_supported(model.config)
    source = inspect.getsource(standalone)
    written_by = f"Written by txl-dist {version('txl-dist')};"
    files = {FILE_NAME: source.replace("Written by txl-dist;", written_by, 1), CARD_NAME: card}
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


def require_supported(config: ModelConfig) -> None:
    """Raises ConfigError for a model that the standalone file cannot compute."""
    if config.vocab_size is None:
        raise ConfigError(
            "model.vocab_size=null: a model of vectors has an encoder and an output of its "
            "caller's, which the run does not have. Export it without --format hf"
        )
    for setting, value, known in (
        ("memory", config.memory, MEMORIES),
        ("distance_encoding", config.distance_encoding, ENCODINGS),
    ):
        if value not in known:
            raise ConfigError(
                f"model.{setting}={value} is not in the standalone file, which has "
                f"{', '.join(known)}. Export it without --format hf"
            )


def library_json(tokenizer: Tokenizer) -> str | None:
    """The file of the `tokenizers` library, if it is one of its kind."""
    content = tokenizer.description.model_dump().get("tokenizer")
    return None if content is None else json.dumps(content, ensure_ascii=False, indent=1) + "\n"
