"""The page of the public API: every name of `txl_dist.__all__`, from its docstring."""

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
