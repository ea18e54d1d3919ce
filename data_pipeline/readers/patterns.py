"""Patterns in addresses: braces, as a shell expands them, and wildcards, as in `glob`."""

import fnmatch
import glob
import math
import re
from itertools import islice
from pathlib import Path

from braceexpand import braceexpand

from data_pipeline.errors import ConfigError
from data_pipeline.system.sources import local_path, shown

_MAX_EXPANDED = 100_000
"""Maximum number of addresses of one brace pattern."""


def expand_braces(address: str) -> list[str]:
    """The addresses of shard-{000..127}.tar or {a,b}/*.txt, in the order in which a shell expands.

    A file of this name, and braces that a shell would not expand, stay as they are.
    """
    if not address:
        raise ConfigError(
            "an input is empty, perhaps a variable of the shell that is not set. Give a file, "
            "folder, pattern or URL; . is the current folder."
        )
    local = local_path(address)
    if "{" not in address or (local and Path(local).exists()):
        return [address]
    ranges = re.findall(r"\{(-?\d+)\.\.(-?\d+)", address)
    expanded = []
    try:
        size = math.prod(abs(int(stop) - int(start)) + 1 for start, stop in ranges)
        if size <= _MAX_EXPANDED:  # braceexpand holds every range in memory
            expanded = list(islice(braceexpand(address, escape=False), _MAX_EXPANDED + 1))
    except ValueError:  # the braces are not balanced
        return [address]
    if not 0 < len(expanded) <= _MAX_EXPANDED:
        raise ConfigError(
            f"{shown(address)}: the braces expand to more than {_MAX_EXPANDED:,} inputs. Give the "
            "folder, or a pattern with * that matches the files that exist."
        )
    return expanded


def is_pattern(address: str) -> bool:
    return glob.has_magic(address.partition("://")[2] or address)


def split_pattern(address: str) -> tuple[str, re.Pattern[str]]:
    """The folder before the first wildcard, and a regular expression for names relative to it."""
    parts = address.split("/")
    num_fixed = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    regexes = []
    for part in parts[num_fixed:]:
        # `**` matches any number of folders, `*` no slash. Names have no empty parts.
        translated = fnmatch.translate(part).removeprefix("(?s:").removesuffix(r")\Z")
        regexes.append("(?:[^/]+/)*" if part == "**" else translated.replace(".*", "[^/]*") + "/")
    if parts[-1] == "**":
        regexes.append("[^/]+/")
    root = "/".join(parts[:num_fixed]) or ("/" if address.startswith("/") else ".")
    return root, re.compile("".join(regexes).removesuffix("/"), re.DOTALL)
