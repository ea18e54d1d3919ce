"""Redaction: no password, token or key is written to a log, a dump, MLflow or a `repr`.

Two things count as secret: a text or list in a field with a secret *name* (`api_key`, `authToken`),
and credentials inside text (the user part of a URL, `?token=...`, `password=...`, a bearer token).
Numbers and booleans are never hidden, so `max_tokens: 5` stays readable. Sections are hidden field
by field: those of `data.mixture` have names that the user chose, such as `secret-garden`.

Not covered: a secret in a field with another name, or in free text without a keyword before it.
"""

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"

_SECRET_WORDS = frozenset(
    {"key", "token", "secret", "secrets", "password", "passwords", "passwd", "passphrase", "pwd"}
    | {"apikey", "apikeys", "credential", "credentials", "authorization"}
)
# The words of `api_key`, `apiKey` and `APIKey`; so `monkey` and `tokens` are not secret names.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
# A password should not contain '/' or '@' unescaped, but some do.
_URL_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)(?:[^/\s?#@]*:[^\s?#]*|[^/\s?#@]*)@")
# Text has no types, so here the name must end in the word: `token=` but not `tokens=`.
_SECRET_NAME = r"[\w.-]*(?:key|token|secret|passw(?:or)?d|pwd|passphrase|credentials?|signature)"
_URL_QUERY = re.compile(rf"(?i)([?&;]{_SECRET_NAME}=)[^&;\s#]+")
# The value may be on the next line, unless that line is `key: ...`: then the name is that of a
# YAML section, such as a corpus `top-secret`.
_SPACE = r"(?:[ \t]*|\s*\n\s*(?![\w.-]+:(?:\s|$)))"
_ASSIGNMENT = re.compile(
    rf"(?i)\b({_SECRET_NAME}[\"']?\s*[=:]{_SPACE})(?![0-9.]+\b)"
    r"(\"[^\"\n]*\"|'[^'\n]*'|[^\s,;&}]+)"
)
# 8 characters or more, so that prose about "bearer tokens" is not hidden.
_BEARER = re.compile(r"(?i)\b(bearer\s+)[\w.~+/=-]{8,}")


def redact(text: str) -> str:
    """The same text, with `***` instead of every secret."""
    text = _BEARER.sub(rf"\1{HIDDEN}", _redact_urls(text))
    return _ASSIGNMENT.sub(rf"\1{HIDDEN}", text)


def redact_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values by name, with `***` instead of every secret."""
    return {name: redact_field(str(name), value) for name, value in values.items()}


def redact_field(name: str, value: Any) -> Any:
    """One named value: hidden if the name is secret, otherwise with credentials inside hidden."""
    is_secret = any(word.lower() in _SECRET_WORDS for word in _WORD.findall(name))
    if is_secret and value and isinstance(value, (str, bytes, list, tuple)):
        return HIDDEN
    if isinstance(value, str):
        return _redact_urls(value)
    if isinstance(value, Mapping):
        return redact_values(value)
    if isinstance(value, (list, tuple)):
        return [redact_field("", item) for item in value]
    return value


def _redact_urls(text: str) -> str:
    return _URL_QUERY.sub(rf"\1{HIDDEN}", _URL_USER.sub(rf"\1{HIDDEN}@", text))
