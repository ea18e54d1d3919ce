"""The page of the public API: every name of `txl_dist.__all__`, from its docstring."""

import inspect
import re
from importlib import import_module
from typing import Any, get_args

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
    """The Markdown with signatures and docstrings in place of mkdocstrings' blocks."""

    def describe(block: re.Match[str]) -> str:
        module, _, name = block[1].rpartition(".")
        described = getattr(import_module(module), name)
        parts = [f"### {name}", _code(name, described), inspect.getdoc(described)]
        for method, owner in vars(described).items() if inspect.isclass(described) else ():
            if not method.startswith("_") and (inspect.isroutine(getattr(described, method))):
                parts += [_code(f"{name}.{method}", getattr(described, method)), owner.__doc__]
        return "\n\n".join(inspect.cleandoc(part) for part in parts if part)

    return re.sub(r"^::: ([\w.]+)$", describe, markdown, flags=re.MULTILINE)


def _code(name: str, described: Any) -> str:
    """The signature as a block; one parameter per line, if it does not fit into one line."""
    signature = inspect.signature(described)
    parameters = [_readable(each) for each in signature.parameters.values()]
    text = f"{name}{signature.replace(parameters=parameters)}"
    if len(text) > 100:
        words = [str(each) for each in parameters]
        keyword_only = [each.kind is each.KEYWORD_ONLY for each in parameters]
        if True in keyword_only:
            words.insert(keyword_only.index(True), "*")
        end = str(signature.replace(parameters=[])).removeprefix("()")
        text = "\n".join((f"{name}(", *(f"    {word}," for word in words), f"){end}"))
    # Names without their modules: torch.Tensor is Tensor.
    return f"```python\n{re.sub(r'(?:[a-z_]+[.])+(?=[A-Z])', '', text)}\n```"


def _readable(parameter: inspect.Parameter) -> inspect.Parameter:
    """Without the constraints of a type, and without the contents of a default section."""
    annotation, default = parameter.annotation, parameter.default
    if hasattr(annotation, "__metadata__"):  # Annotated
        annotation = get_args(annotation)[0]
    if type(default).__module__.startswith(("txl_dist.", "data_pipeline.")):
        default = _Call(type(default).__name__)
    return parameter.replace(annotation=annotation, default=default)


class _Call(str):
    def __repr__(self) -> str:
        return f"{self}()"
