"""A file of prompts. A file named *.jsonl has one JSON object per line, others one prompt."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.system.strict_json import JSON_DECODER
from txl_dist.errors import DataError

KEYS = ("prompt", "text", "ids")
"""Keys of a JSON line; the first that is there has the prompt. That of "ids" is token ids."""


@dataclass(frozen=True, slots=True)
class PromptLine:
    """A prompt and the number of its line, from 1."""

    line: int
    prompt: str | list[int]
    """Text or token ids."""


def read_prompts(path: Path) -> list[PromptLine]:
    """The prompts of a file. Raises DataError with file and line for the first unusable one."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{path}: the prompts cannot be read ({error.strerror})") from None
    if lines[-1] == b"":
        lines.pop()
    if not lines:
        raise DataError(f"{path} is empty; expected one prompt per line")
    prompts = []
    for number, raw in enumerate(lines, start=1):
        try:
            prompts.append(PromptLine(number, _prompt(raw, is_json=path.suffix == ".jsonl")))
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {error}") from None
    return prompts


def _prompt(raw: bytes, *, is_json: bool) -> str | list[int]:
    """Raises ValueError with the reason."""
    try:
        line = raw.removesuffix(b"\r").decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    if not line.strip():
        raise ValueError(
            "the line is blank. Remove it, or start a new document with a line of JSON in a file "
            'named *.jsonl: {"prompt": ""}'
        )
    return _prompt_of_json(line) if is_json else line


def _prompt_of_json(line: str) -> str | list[int]:
    try:
        content = JSON_DECODER.decode(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"broken JSON ({error.msg} at character {error.pos})") from None
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    keys = content if isinstance(content, dict) else ()
    key = next((key for key in KEYS if key in keys), None)
    if key is None:
        raise ValueError('expected a JSON object with a key "prompt", "text" or "ids"')
    prompt: Any = content[key]
    if key == "ids" and isinstance(prompt, list):
        return prompt  # `prompt_tokens` checks the ids, when the vocabulary is known
    if key == "ids" or not isinstance(prompt, str):
        expected = "list" if key == "ids" else "string"
        raise ValueError(f'"{key}" is not a {expected} but {type(prompt).__name__}')
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f'"{key}" has a lone surrogate at character {error.start}') from None
    return prompt
