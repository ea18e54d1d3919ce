"""The page of all commands, from the command line itself."""

import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer.main

from txl_dist.cli.app import app

_EXAMPLES = re.compile(r"^Examples?: (.*(?:\n(?!\s*Example).+)*)", re.MULTILINE)
_NAMES = {str: "TEXT", int: "N", float: "X", Path: "PATH"}


def command_reference() -> str:
    """Markdown: for each command its meaning, an example, its arguments and its options."""
    return "\n".join(_group(typer.main.get_command(app), "txl"))


def _group(group: Any, words: str) -> Iterator[str]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from (f'## <a id="{name}"></a>{words} {name}', "", command.help or "", "")
            yield from _group(command, f"{words} {name}")
        elif not command.hidden:
            yield from _command(command, f"{words} {name}")


def _command(command: Any, words: str) -> Iterator[str]:
    level = "#" * len(words.split())
    anchor = "-".join(words.split()[1:])
    yield from (f'{level} <a id="{anchor}"></a>{words}', "")
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option"]
    usage = " ".join([words, *map(_argument, arguments), "[OPTIONS]"])
    help_text = command.help or ""
    yield from ("```text", usage, "```", "", _EXAMPLES.sub("", help_text).strip(), "")
    if examples := _EXAMPLES.findall(help_text):
        yield from ("```bash", *(" ".join(each.split()) for each in examples), "```", "")
    for each in (*arguments, *options):
        if not getattr(each, "hidden", False):
            facts = ", ".join(filter(None, (_default(each), _range(each))))
            yield f"- {_form(each)}{f' ({facts})' if facts else ''}: {_text(each.help or '')}"
    yield ""


def _argument(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    name += "..." if parameter.nargs == -1 and not name.endswith("...") else ""
    return name if parameter.required else f"[{name}]"


def _form(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{_argument(parameter)}`"
    names = "`, `".join([*parameter.opts, *parameter.secondary_opts])
    return f"`{names}`" if parameter.is_flag else f"`{names} {_value(parameter)}`"


def _value(parameter: Any) -> str:
    annotation = parameter.type_descriptor.annotation
    while get_origin(annotation) in (list, types.UnionType):
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is Literal:
        return "|".join(map(str, get_args(annotation)))
    return str(parameter.metavar or _NAMES.get(annotation, parameter.name.upper()))


def _default(parameter: Any) -> str:
    default = parameter.default
    if parameter.required:
        return "required" if parameter.param_type_name == "option" else ""
    if isinstance(parameter.show_default, str):  # words, which `--help` shows
        return f"default: {parameter.show_default}"
    if default in (None, False, "", [], ()) or not parameter.show_default:
        return ""
    return f"default `{default}`"


def _range(parameter: Any) -> str:
    lowest, highest = parameter.min, parameter.max
    if lowest is not None and highest is not None:
        return f"{lowest:g} to {highest:g}"
    return f"at least {lowest:g}" if lowest is not None else ""


def _text(help_text: str) -> str:
    return " ".join(help_text.split()).replace("<", "&lt;")
