"""Directories for people who have never heard of this program; nothing in them is a pickle.

`txl export --format transformers`: what `AutoModelForCausalLM.from_pretrained` loads:

    model.safetensors, config.json    or several files with an index; llama_family.py
    tokenizer.json, tokenizer_config.json, generation_config.json
    txl_tokenizer.json                the tokenizer of this program, which reads this directory, too
    README.md                         the model card

`txl export --format hf`: a model that transformers has not, with its code:

    model.safetensors, config.json    as in every export: txl reads this directory, too
    txl_tokenizer.json                the tokenizer of this program
    tokenizer.json                    the same for the `tokenizers` library, if it is of that kind
    transformer_xl.py                 the model in one file, which needs torch alone (standalone.py)
    README.md                         the model card (analysis/model_card.py)
"""

import inspect
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from data_pipeline.system.files import write_synced
from data_pipeline.tokenizers import Tokenizer
from data_pipeline.tokenizers.loading import OWN_NAME
from data_pipeline.tokenizers.pretrained import library_json
from txl_dist.checkpoint.manifest import TOKENIZER_NAME
from txl_dist.convert import standalone
from txl_dist.convert.checks import CONFIG_NAME, WEIGHTS_NAME, check_tensors
from txl_dist.convert.llama_family import (
    INDEX_NAME,
    family_options,
    family_tensors,
)
from txl_dist.convert.stored_model import (
    DEFAULT_READING,
    Reading,
    new_directory,
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
    library = tokenizer and tokenizer.description.model_dump().get("tokenizer")
    if library is not None:
        files[TOKENIZER_NAME] = _pretty(library)
    write_exported(
        directory,
        model,
        tokenizer,
        reading,
        tokenizer_name=OWN_NAME,
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


# --- transformers ---------------------------------------------------------------------------------

MAX_SHARD_BYTES = 5 * 10**9


def write_for_transformers(
    directory: Path,
    model: TransformerXL,
    tokenizer: Tokenizer | None,
    tgt_len: int,
    *,
    window: int | None,
    dtype: torch.dtype = torch.float32,
    card: str | None,
) -> None:
    """Write the directory, completely or not at all.

    `tgt_len`: of its segments. `window`: the keys that a query sees; None: all. `card`: text of
    README.md. Raises ConfigError for a model that transformers cannot compute, or a directory that
    is not empty.
    """
    options = family_options(model.config, window=window, tgt_len=tgt_len)
    options |= {name: str(dtype).removeprefix("torch.") for name in ("dtype", "torch_dtype")}
    files: dict[str, Any] = {}
    if tokenizer is not None:
        begin, *ends = tokenizer.end_of_document, *tokenizer.ends_of_text
        end = ends if len(ends) > 1 else (ends or [begin])[0]
        options |= {"bos_token_id": begin, "eos_token_id": end}
        # A model that was trained here ends documents by the token that begins the next one.
        all_ends = [*ends, begin] if ends else end
        files["generation_config.json"] = {"bos_token_id": begin, "eos_token_id": all_ends}
        files |= _tokenizer_files(tokenizer)
    state = model.state_dict()
    check_tensors(state, state, origin="the model to write")
    with new_directory(directory) as staging:
        for name, content in files.items():
            write_synced(staging / name, _pretty(content).encode())
        if tokenizer is not None:
            write_synced(staging / OWN_NAME, tokenizer.to_json().encode())
        if card is not None:
            write_synced(staging / CARD_NAME, card.encode())
        _write_shards(staging, model, dtype)
        write_synced(staging / CONFIG_NAME, _pretty(options).encode())


def _pretty(content: object) -> str:
    return json.dumps(content, ensure_ascii=False, indent=1) + "\n"


def _tokenizer_files(tokenizer: Tokenizer) -> dict[str, Any]:
    """None for characters, words and ids, which the library cannot split in the same way."""
    if (library := library_json(tokenizer)) is None:
        return {}
    begin = tokenizer.end_of_document
    end = (*tokenizer.ends_of_text, begin)[0]
    name_of = {each["id"]: each["content"] for each in library["added_tokens"]}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": name_of[begin],
        "eos_token": name_of[end],
        "clean_up_tokenization_spaces": False,
        # Without it, older versions pass token_type_ids, which the models do not take.
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 10**9,
    }
    return {TOKENIZER_NAME: library, "tokenizer_config.json": settings}


def _write_shards(staging: Path, model: TransformerXL, dtype: torch.dtype) -> None:
    """One file, or several with an index. Each tensor is converted when its file is written."""
    shards: list[dict[str, Tensor]] = [{}]
    sizes = [0]
    for name, tensor in family_tensors(model):
        num_bytes = tensor.numel() * dtype.itemsize
        if sizes[-1] and sizes[-1] + num_bytes > MAX_SHARD_BYTES:
            shards.append({})
            sizes.append(0)
        shards[-1][name] = tensor
        sizes[-1] += num_bytes
    names = [WEIGHTS_NAME]
    if len(shards) > 1:
        names = [f"model-{n + 1:05}-of-{len(shards):05}.safetensors" for n in range(len(shards))]
        place_of = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": place_of}
        write_synced(staging / INDEX_NAME, _pretty(index).encode())
    for name, shard in zip(names, shards, strict=True):
        converted = {key: tensor.to(dtype).contiguous() for key, tensor in shard.items()}
        # Readers of other programs ask for the format in the metadata.
        write_synced(staging / name, save(converted, metadata={"format": "pt"}))
