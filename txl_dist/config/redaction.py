"""Redaction: no password, token or key reaches a log, a dump, an MLflow parameter or a `repr`.

Two things are secret: the value of a field whose *name* says so (`api_key`, `authToken`), and
credentials written into text (a URL's user part, `?token=...`, `password=...`, a bearer token).
Counts are not secrets: `max_tokens`, `num_keys` and every number or boolean stay as they are.
"""

import re
from collections.abc import Mapping
from typing import Any, overload

HIDDEN = "***"

_SECRET_WORDS = frozenset(
    {"key", "token", "secret", "secrets", "password", "passwords", "passwd", "passphrase", "pwd"}
    | {"apikey", "apikeys", "credential", "credentials", "authorization"}
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
# A password may hold '/' and '@', though it should not.
_URL_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)(?:[^/\s?#@]*:[^\s?#]*|[^/\s?#@]*)@")
_SECRET_NAME = r"[\w.-]*(?:key|token|secret|passw(?:or)?d|pwd|passphrase|credentials?|signature)"
_URL_QUERY = re.compile(rf"(?i)([?&;]{_SECRET_NAME}=)[^&;\s#]+")
_ASSIGNMENT = re.compile(
    rf"(?i)\b({_SECRET_NAME}[\"']?\s*[=:]\s*)(?![0-9.]+\b)(\"[^\"\n]*\"|'[^'\n]*'|[^\s,;&}}]+)"
)
_BEARER = re.compile(r"(?i)\b(bearer\s+)[\w.~+/=-]{8,}")


def is_secret_name(name: str) -> bool:
    """Whether a field of this name holds a secret: one of its words is `key`, `token`, ..."""
    return any(word.lower() in _SECRET_WORDS for word in _WORD.findall(name))


@overload
def redact(value: str) -> str: ...
@overload
def redact(value: Mapping[str, Any]) -> dict[str, Any]: ...
def redact(value: str | Mapping[str, Any]) -> str | dict[str, Any]:
    """The same text or mapping with every secret replaced by `***`."""
    if isinstance(value, str):
        text = _BEARER.sub(rf"\1{HIDDEN}", _redact_urls(value))
        return _ASSIGNMENT.sub(rf"\1{HIDDEN}", text)
    return {name: redact_field(str(name), item) for name, item in value.items()}


def redact_field(name: str, value: Any) -> Any:
    """One named value: hidden if the name says so, else with credentials inside it hidden."""
    if is_secret_name(name) and isinstance(value, (str, bytes, list, tuple, Mapping)) and value:
        return HIDDEN
    return _redact_inside(value)


def _redact_inside(value: Any) -> Any:
    if isinstance(value, str):
        return _redact_urls(value)
    if isinstance(value, Mapping):
        return redact(value)
    if isinstance(value, (list, tuple)):
        return [_redact_inside(item) for item in value]
    return value


def _redact_urls(text: str) -> str:
    return _URL_QUERY.sub(rf"\1{HIDDEN}", _URL_USER.sub(rf"\1{HIDDEN}@", text))
