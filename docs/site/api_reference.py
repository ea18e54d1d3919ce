"""The page of the public API: every name of `txl_dist.__all__`, from its docstring."""

import inspect
import re
from importlib import import_module

import txl_dist

_GROUPS = {
    "Settings and data": ("config", "data_pipeline"),
    "Models and memory": ("model", "convert"),
    "Training": ("training", "launch"),
    "Evaluation and generation": ("evaluation", "analysis", "generation"),
}


def api_reference() -> str:
    """Markdown with mkdocstrings' blocks. Every public name is in one group."""
    lines: list[str] = []
    left = {name: getattr(txl_dist, name).__module__ for name in txl_dist.__all__}
    for title, packages in _GROUPS.items():
        lines += [f"## {title}", ""]
        for name, module in sorted(left.items()):
            if set(packages) & set(module.split(".")[:2]):
                lines += [f"::: {module}.{name}", ""]
                del left[name]
    assert not left, f"{left} are in no group of {__file__}"
    return "\n".join(lines)


def as_text(markdown: str) -> str:
    """The Markdown with signature and docstring in place of mkdocstrings' blocks."""

    def describe(block: re.Match[str]) -> str:
        module, _, name = block[1].rpartition(".")
        described = getattr(import_module(module), name)
        signature = f"{name}{inspect.signature(described)}"
        return f"### {name}\n\n```python\n{signature}\n```\n\n{inspect.getdoc(described)}"

    return re.sub(r"^::: ([\w.]+)$", describe, markdown, flags=re.MULTILINE)
