"""Llama, Mistral, Qwen2 and Qwen3 as transformers stores them: config and tensors, both ways.

Recurrence with rotary distances is sliding-window attention: in evaluation, a memory of layer
inputs, of which keys are computed by today's weights, is the same function as a cache of keys. With
`same_length` a query sees `mem_len` keys, its own included, as `sliding_window` counts them. A
model without a window is the same function while memory and segment cover its document.

    config.json      -> `family_config`    -> ModelConfig -> `family_options` -> config.json
    q_proj, k_proj.. -> `read_family`      -> TransformerXL -> `family_tensors` -> q_proj, k_proj..

Keys above values are one matrix here, and the gate above the other half of SwiGLU. Sources: the
configs and model code of transformers 5.24; Jiang et al. 2023, arXiv:2310.06825 (sliding windows).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from txl_dist.convert import MAX_POSITIONS
from txl_dist.convert.checks import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    assign_weights,
    check_names,
    checked_config,
    checked_tensor,
    empty_model,
    read_json,
)
from txl_dist.errors import CheckpointError, ConfigError
from txl_dist.model.config import ModelConfig
from txl_dist.model.transformer_xl import TransformerXL

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""By `model_type`."""
INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
_SLIDING, _FULL = "sliding_attention", "full_attention"
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
    "num_experts": (0, None),
    "num_local_experts": (0, None),
}
"""Options that would be another function, and the values with which they are not."""
_SCALINGS = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_turns",
        "high_freq_factor": "high_turns",
        "original_max_position_embeddings": "original_len",
    },
}
"""By `rope_type`: its options, and their names in `RotaryScaling`."""


def is_family(options: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a model of transformers that this module may know."""
    return "model_type" in options and options["model_type"] != "transfo-xl"


def family_config(options: Mapping[str, Any], *, origin: str) -> ModelConfig:
    """The architecture of a parsed config.json. Raises ConfigError naming the option."""
    kind = options.get("model_type")
    if not isinstance(kind, str) or kind not in CLASSES:
        raise ConfigError(
            f"{origin}: model_type is {kind!r}; of transformers, {', '.join(CLASSES)} and "
            "transfo-xl can be imported"
        )
    for name, neutral in _NEUTRAL.items():
        if name in options and options[name] not in neutral:
            raise ConfigError(
                f"{origin}: {name}={options[name]!r:.60} is not supported; such a model runs in "
                "transformers only"
            )

    def count(name: str, default: int | None = None, *, limit: int = 2**31) -> int:
        value = default if options.get(name) is None else options[name]
        if type(value) is not int or not 0 < value < limit:
            raise ConfigError(
                f"{origin}: {name}={value!r:.40}; expected a number from 1 to {limit - 1:,}"
            )
        return value

    n_head, d_model = count("num_attention_heads"), count("hidden_size")
    n_layer = count("num_hidden_layers", limit=2**16)
    values: dict[str, Any] = {
        "recipe": "modern",
        "vocab_size": count("vocab_size"),
        "n_layer": n_layer,
        "d_model": d_model,
        "n_head": n_head,
        "n_kv_head": count("num_key_value_heads", n_head),
        "d_head": count("head_dim", d_model // n_head),
        "d_inner": count("intermediate_size"),
        "norm": "rmsnorm",
        "norm_epsilon": _positive(options, "rms_norm_eps", origin=origin),
        "pre_lnorm": True,
        "final_norm": True,
        "qk_norm": kind == "qwen3",
        "qkv_biases": kind == "qwen2",
        "feed_forward": "swiglu",
        "biases": False,
        "scale_embedding": False,
        "tie_weight": bool(options.get("tie_word_embeddings", False)),
        "distance_encoding": "rotary",
        **_rotation(options, origin=origin),
        **_window(options, n_layer, count("max_position_embeddings"), origin=origin),
    }
    return checked_config(values, origin=origin)


def _positive(options: Mapping[str, Any], name: str, *, origin: str) -> float:
    value: Any = options.get(name)
    if type(value) not in (int, float) or not 0 < value < 2**53:
        raise ConfigError(f"{origin}: {name}={value!r:.40}; expected a number above 0")
    return float(value)


def _rotation(options: Mapping[str, Any], *, origin: str) -> dict[str, Any]:
    """`rope_parameters` of new files, `rope_theta` and `rope_scaling` of older ones."""
    given = [options[name] for name in ("rope_parameters", "rope_scaling") if options.get(name)]
    first, *others = (_rotation_of(rope, options, origin=origin) for rope in given or [{}])
    if others and others != [first]:
        raise ConfigError(
            f"{origin}: rope_parameters={given[0]!r:.80} and rope_scaling={given[1]!r:.80}; "
            "transformers ignores the first. Remove one of them, or make them equal"
        )
    return first


def _rotation_of(rope: Any, options: Mapping[str, Any], *, origin: str) -> dict[str, Any]:
    if not isinstance(rope, Mapping):
        raise ConfigError(f"{origin}: the rotation {rope!r:.80} is not supported; expected options")
    rope = {name: value for name, value in rope.items() if value is not None}
    theta = {"rope_theta": rope.pop("rope_theta", options.get("rope_theta")) or 10000.0}
    base = _positive(theta, "rope_theta", origin=origin)
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    if rope.pop("partial_rotary_factor", 1) not in (1, None):
        raise ConfigError(f"{origin}: a rotation of a part of the channels is not supported")
    if kind == "default":
        return {"rotary_base": base}
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise ConfigError(
            f"{origin}: rope_type={kind!r} is not supported; default, linear and llama3 are"
        )
    scaling: dict[str, Any] = {
        own: _positive(rope, name, origin=origin) for name, own in _SCALINGS[kind].items()
    }
    if "original_len" in scaling:
        scaling["original_len"] = int(scaling["original_len"])
    return {"rotary_base": base, "rotary_scaling": {**scaling, "kind": kind}}


def _window(
    options: Mapping[str, Any], n_layer: int, max_len: int, *, origin: str
) -> dict[str, Any]:
    """The memory that is the window of each layer.

    The rules of the three configs: Mistral has one window for all layers. Those of Qwen count only
    with `use_sliding_window`, and `layer_types` or `max_window_layers` say in which layers.
    """
    kind, window = options["model_type"], options.get("sliding_window", 4096)
    if kind == "llama" or (kind != "mistral" and not options.get("use_sliding_window", False)):
        window = None
    types = options.get("layer_types")
    if types is None:
        first = 0 if kind == "mistral" else options.get("max_window_layers", 28)
        if type(first) is not int:
            raise ConfigError(f"{origin}: max_window_layers={first!r:.40}; expected a number")
        types = [_SLIDING if window and layer >= first else _FULL for layer in range(n_layer)]
    unknown = not isinstance(types, list) or [x for x in types if x not in (_SLIDING, _FULL)]
    if unknown or len(types) != n_layer or (_SLIDING in types and type(window) is not int):
        raise ConfigError(
            f"{origin}: layer_types={types!r:.80} with a window of {window} for {n_layer} layers "
            f"is not supported; each layer is {_SLIDING} or {_FULL}"
        )
    if _SLIDING not in types:
        return {"mem_len": max_len}
    if _FULL not in types:
        return {"mem_len": window, "same_length": True}
    if window > max_len:
        raise ConfigError(f"{origin}: sliding_window={window} is above {max_len} positions")
    shares = [window / max_len if each == _SLIDING else 1.0 for each in types]
    return {"mem_len": max_len, "same_length": True, "mem_shares": shares}


# --- tensors --------------------------------------------------------------------------------------


def _parts(config: ModelConfig) -> Iterator[tuple[str, list[str]]]:
    """(name here, names in transformers, of which it has the rows in this order)."""
    yield "table.weights.0", ["model.embed_tokens.weight"]
    per_layer = {
        "attention_norm.weight": ["input_layernorm.weight"],
        "feed_forward_norm.weight": ["post_attention_layernorm.weight"],
        "attention.query.weight": ["self_attn.q_proj.weight"],
        "attention.key_value.weight": ["self_attn.k_proj.weight", "self_attn.v_proj.weight"],
        "attention.out.weight": ["self_attn.o_proj.weight"],
        "feed_forward.up.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        "feed_forward.down.weight": ["mlp.down_proj.weight"],
    }
    if config.qk_norm:
        per_layer["attention.query_gain_K"] = ["self_attn.q_norm.weight"]
        per_layer["attention.key_gain_K"] = ["self_attn.k_norm.weight"]
    if config.qkv_biases:
        per_layer["attention.query.bias"] = ["self_attn.q_proj.bias"]
        per_layer["attention.key_value.bias"] = ["self_attn.k_proj.bias", "self_attn.v_proj.bias"]
    for layer in range(config.n_layer):
        for name, theirs in per_layer.items():
            yield f"layers.{layer}.{name}", [f"model.layers.{layer}.{each}" for each in theirs]
    yield "final_norm.weight", ["model.norm.weight"]
    if not config.tie_weight:
        yield "softmax.weights.0", ["lm_head.weight"]


def read_family(directory: Path, config: ModelConfig | None = None) -> TransformerXL:
    """The model, on the CPU in fp32: one tensor at a time, so it needs the memory of one copy.

    `config` may differ from the stored one in fields without weights. Raises CheckpointError naming
    the invalid file or tensor, ConfigError for an invalid config.
    """
    origin = directory / CONFIG_NAME
    config = config or family_config(read_json(origin), origin=str(origin))
    path_of = _files(directory)
    model = empty_model(config, origin=str(origin), num_tensors=len(path_of))
    parts = dict(_parts(config))
    known = {name for names in parts.values() for name in names}
    ignored = {name for name in path_of if name.endswith("rotary_emb.inv_freq")}
    if config.tie_weight:
        ignored.add("lm_head.weight")  # the table once more
    check_names(path_of.keys() - ignored, known, origin=str(directory))
    state: dict[str, Tensor] = {}
    for name, empty in model.state_dict().items():
        state[name] = torch.empty(empty.shape)
        rows = state[name].chunk(len(parts[name]))
        for source, target in zip(parts[name], rows, strict=True):
            target.copy_(_read(path_of[source], source, target))
    if config.tie_weight and "lm_head.weight" in path_of:
        table, path = state["table.weights.0"], path_of["lm_head.weight"]
        if not torch.equal(_read(path, "lm_head.weight", table), table):
            raise CheckpointError(
                f"{path}: lm_head.weight differs from model.embed_tokens.weight, but config.json "
                "says tie_word_embeddings=true"
            )
    return assign_weights(model, state)


def _files(directory: Path) -> dict[str, Path]:
    """The file of each tensor. No name in the index leaves the directory."""
    names = [WEIGHTS_NAME]
    if (index := directory / INDEX_NAME).is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map; download the file again")
        names = sorted({str(name) for name in weight_map.values()})
    path_of: dict[str, Path] = {}
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} names {name[:80]!r}: expected a .safetensors file of this directory"
            )
        with _opened(directory / name) as file:
            path_of |= dict.fromkeys(file.keys(), directory / name)
    return path_of


def _read(path: Path, name: str, expected: Tensor) -> Tensor:
    # Opened for every tensor: an open file keeps what was read of it in memory.
    with _opened(path) as file:
        return checked_tensor(file.get_tensor(name), expected, origin=f"{path}: {name}")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}). Weights are read from safetensors only; save the "
            "model again with save_pretrained, or download it again"
        ) from None


# --- export ---------------------------------------------------------------------------------------


def family_options(config: ModelConfig, *, window: int | None, tgt_len: int) -> dict[str, Any]:
    """config.json of the model, without what belongs to its tokenizer.

    `window`: keys that a query sees, its own included; None: all, of a segment of `tgt_len` without
    a memory. Raises ConfigError for a model that no class of transformers computes.
    """
    require_family(config)
    lens = sorted({*config.mem_lens})
    # The class of Llama refuses other widths, that of Mistral does not.
    kind = "llama" if window is None and config.d_model % config.n_head == 0 else "mistral"
    if config.qk_norm or config.qkv_biases:
        kind = "qwen3" if config.qk_norm else "qwen2"
    has_one_window = window is not None and len(lens) == 1
    options: dict[str, Any] = {
        "architectures": [CLASSES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.n_layer,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_inner,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.d_head,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": is_tied(config),
        "attention_dropout": 0.0,
        "max_position_embeddings": MAX_POSITIONS if has_one_window else lens[-1] or tgt_len,
        **_rope(config),
    }
    if kind in ("llama", "qwen3"):
        options["attention_bias"] = False
    if kind != "llama":
        options["sliding_window"] = window
    if window is not None and kind != "mistral":
        # Without these two the window is dropped, or counts from layer 28 on only.
        options |= {"use_sliding_window": True, "max_window_layers": 0}
        options["layer_types"] = [
            _SLIDING if mem_len == lens[0] else _FULL for mem_len in config.mem_lens
        ]
    return options


def is_tied(config: ModelConfig) -> bool:
    """Whether the exported softmax is the table: not if our embedding is scaled."""
    return config.tie_weight and not config.scale_embedding


def require_family(config: ModelConfig) -> None:
    """Raises ConfigError, naming each setting, if no class of transformers computes this model."""
    needed = {
        "memory": "recurrent", "distance_encoding": "rotary", "norm": "rmsnorm", "pre_lnorm": True,
        "final_norm": True, "feed_forward": "swiglu", "biases": False, "cutoffs": (), "div_val": 1,
    }  # fmt: skip
    wrong = [
        f"model.{name}={getattr(config, name)} (not {value})"
        for name, value in needed.items()
        if getattr(config, name) != value
    ]
    if config.has_projection:
        wrong.append(f"model.d_embed={config.d_embed} (not that of d_model)")
    if config.vocab_size is None:
        wrong.append("model.vocab_size=null")
    if config.qk_norm and config.qkv_biases:
        wrong.append("model.qk_norm together with model.qkv_biases")
    has_types = config.same_length and (config.qk_norm or config.qkv_biases)
    if len({*config.mem_lens}) > (2 if has_types else 1):
        wrong.append(f"model.mem_shares={list(config.mem_shares)} (too many different windows)")
    if wrong:
        raise ConfigError(
            "no class of transformers computes this model, because of " + "; ".join(wrong) + ". "
            "Export it with --format hf, which brings its own code"
        )


def _rope(config: ModelConfig) -> dict[str, Any]:
    """New and old spelling: released versions read one or the other."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if (scaling := config.rotary_scaling) is not None:
        names = _SCALINGS[scaling.kind]
        rope = {"rope_type": scaling.kind, **{n: getattr(scaling, own) for n, own in names.items()}}
    return {
        "rope_theta": config.rotary_base,
        "rope_scaling": rope if config.rotary_scaling else None,
        "rope_parameters": rope | {"rope_theta": config.rotary_base},
    }


def family_tensors(model: TransformerXL) -> Iterator[tuple[str, Tensor]]:
    """The tensors with the names of transformers, views of those of the model where possible.

    The table of the embedding is multiplied by its scale. A softmax that shares the table is then
    exported as a second one, without the scale.
    """
    config, state = model.config, model.state_dict()
    scale = config.d_model**0.5 if config.scale_embedding else 1.0
    for name, theirs in _parts(config):
        is_scaled = scale != 1 and name == "table.weights.0"
        tensor = state[name] * scale if is_scaled else state[name]
        for part, other in zip(tensor.chunk(len(theirs)), theirs, strict=True):
            yield other, part
    if config.tie_weight and not is_tied(config):
        yield "lm_head.weight", state["table.weights.0"]
