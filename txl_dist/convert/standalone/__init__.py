"""The standalone file of `txl export --format hf`: a model that runs with torch alone.

    model.py        layers, distances, vocabulary, the paper's memory
    compressive.py, tokens.py    the other kinds of memory
    text.py         loading, tokenizer, generation, command line

`source_for` joins the modules that a model needs to one file. So each of them is a module that is
linted, typed and tested like any other, and the file has only the kind of memory of its model. The
modules import torch, the standard library and each other: nothing is shared with the model that is
trained, so tests compare the two (docs/decisions/0093-leave-with-your-model.md).
"""

import ast
from importlib import import_module

from txl_dist.errors import ConfigError
from txl_dist.model.config import ModelConfig

FILE_NAME = "transformer_xl.py"

MODULES_OF_KIND = {
    "recurrent": (),
    "compressive": ("compressive",),
    "tokens": ("tokens",),
    "recurrent+tokens": ("tokens",),
}
_IMPORTS = (ast.Import, ast.ImportFrom)
_ENCODINGS = ("sinusoidal", "shaw", "rotary", "alibi", "absolute")


def source_for(config: ModelConfig, *, written_by: str) -> str:
    """The text of the file. `written_by`: name and version of this program.

    Raises ConfigError, naming the setting, for a model that the file cannot compute.
    """
    require_supported(config)
    statements: list[ast.stmt] = []
    bodies = []
    for name in ("model", *MODULES_OF_KIND[config.memory], "text"):
        text = _text_of(name)
        imports = [each for each in ast.parse(text).body if isinstance(each, _IMPORTS)]
        statements += imports
        bodies.append("\n".join(text.splitlines()[imports[-1].end_lineno :]).strip("\n"))
    header = f'"""{_HEADER.format(written_by=written_by)}"""\n'
    # A module that begins with a comment follows the imports after one line, code after two.
    return "\n\n\n".join([f"{header}\n{_joined(statements)}\n\n{bodies[0]}", *bodies[1:]]) + "\n"


def require_supported(config: ModelConfig) -> None:
    """Raises ConfigError for a model that the standalone file cannot compute."""
    if config.vocab_size is None:
        raise ConfigError(
            "model.vocab_size=null: a model of vectors has an encoder and an output of its "
            "caller's, which the run does not have. Export it without --format hf"
        )
    for setting, value, known in (
        ("memory", config.memory, MODULES_OF_KIND),
        ("distance_encoding", config.distance_encoding, _ENCODINGS),
    ):
        if value not in known:
            raise ConfigError(
                f"model.{setting}={value} is not in the standalone file, which has "
                f"{', '.join(known)}. Export it without --format hf"
            )


def _text_of(name: str) -> str:
    module = import_module(f"{__name__}.{name}")
    assert module.__loader__ is not None
    text: str | None = module.__loader__.get_source(module.__name__)  # type: ignore[attr-defined]
    assert text is not None
    return text


def _joined(statements: list[ast.stmt]) -> str:
    """The import statements in the order and form of ruff, without those of this package."""
    names: dict[str, set[str]] = {}
    for statement in statements:
        if isinstance(statement, ast.Import):
            names |= {alias.name: set() for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            of_module = names.setdefault(f"from {statement.module}", set())
            of_module.update(alias.name for alias in statement.names)
    lines: dict[bool, list[str]] = {False: [], True: []}
    for module in sorted(names, key=lambda name: (name.startswith("from"), name)):
        if __name__ not in module:
            imported = f" import {', '.join(sorted(names[module]))}"
            line = module + imported if names[module] else f"import {module}"
            lines["torch" in module].append(line)
    return "\n".join([*lines[False], "", *lines[True]])


_HEADER = """A Transformer-XL in one file: model, memory, tokenizer and generation. Needs torch.

    model, tokenizer = load("DIRECTORY")
    print(generate(model, tokenizer, "Once upon a time", max_tokens=100))

    memory = model.empty_memory(num_rows=1)
    for ids_BT in segments:                            # int64 [rows, tokens]
        logits_BTV, memory = model(ids_BT, memory)     # of the next tokens, [rows, tokens, ids]

From a shell: python transformer_xl.py --prompt "Once upon a time"

The memory is a dict of tensors, rows first: what the model keeps of earlier tokens, and the age of
each row. It is an argument and a result, and never changed in place. Documents may begin anywhere:
`starts_BT` is true at their first tokens, and no token sees one of another document. The model
computes as in its training if its segments have `model.segment_len` tokens.

The model is written as its equations are, without dropout, cache or kernels. To train it, set
`requires_grad_()` on `model.w.values()`; gradients stop at the memory. Source: Dai et al.
2019, arXiv:1901.02860, and those of each part. Written by {written_by}; this file is Apache-2.0.
"""
