"""Checks of the arguments in `--model_args`, which raise ConfigError with name and value."""

import os
from typing import Any, Literal, get_args

from txl_dist.errors import ConfigError

Mode = Literal["memory", "windowed"]


def require_one_process() -> None:
    """Refuse torchrun and accelerate, under which every process would do all the work."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}: model txl distributes the requests of one "
            "harness process itself. Start it without torchrun or accelerate, and give workers=N "
            "in --model_args, with on=ray or on=ADDRESS for several machines"
        )


def checked_mode(mode: str | None, mem_len: int) -> Mode:
    """The mode, by default the one that fits the model."""
    if mode is None:
        return "memory" if mem_len else "windowed"
    if mode == "memory" and not mem_len:
        raise ConfigError("mode=memory: the model has no memory (mem_len=0); use mode=windowed")
    return one_of(mode, Mode, "mode")


def one_of(value: Any, literal: Any, name: str) -> Any:
    """`value`, which must be one of those of a `Literal`."""
    if value not in get_args(literal):
        raise ConfigError(f"{name}={value!r}: expected one of {', '.join(get_args(literal))}")
    return value


def positive(value: int | str, name: str) -> int:
    """A number of at least 1. On the harness's command line it may be text."""
    return at_least(1, value, name)


def at_least(minimum: int, value: int | str, name: str) -> int:
    """A whole number of at least `minimum`. On the harness's command line it may be text."""
    if not str(value).isdecimal() or int(value) < minimum:
        raise ConfigError(f"{name}={value}: expected a whole number of at least {minimum}")
    return int(value)
