"""Redaction: secrets are hidden in text and mappings; counts and corpora stay readable."""

from collections.abc import Callable
from pathlib import Path

import pytest

from txl_dist.config.config_file import dump_run_config, flatten_config, load_run_config
from txl_dist.config.redaction import redact, redact_values
from txl_dist.config.run_config import RunConfig
from txl_dist.errors import ConfigError


@pytest.mark.fault_row(44)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see postgresql://u:p/w@db/x now", "see postgresql://***@db/x now"),
        ("http://u:pw@h/a", "http://***@h/a"),
        ("http://h/a?api_key=abc&x=1", "http://h/a?api_key=***&x=1"),
        ("password = 'my word' x", "password = *** x"),
        ("Authorization: Bearer abcdefgh12", "Authorization: Bearer ***"),
        ("AWS_SECRET_ACCESS_KEY=abc", "AWS_SECRET_ACCESS_KEY=***"),
        ("password:\n  CANARY", "password:\n  ***"),
        ("top-secret:\n  path: data/x", "top-secret:\n  path: data/x"),
        ("max_tokens=512 tokens: 12 key: 3", "max_tokens=512 tokens: 12 key: 3"),
        ("runs/keys and tokens", "runs/keys and tokens"),
    ],
)
def test_secrets_in_text_are_hidden(text: str, expected: str) -> None:
    assert redact(text) == expected
    assert redact(expected) == expected


def test_counts_are_not_secrets() -> None:
    counts = {"max_tokens": 5, "num_keys": 2, "tokens": "a", "token": 3, "tokenizer": "byte"}
    assert redact_values(counts) == counts
    secrets = {"apiToken": "x", "token": {"Password": "y", "secrets": ["z"]}, "key": None}
    hidden = {"apiToken": "***", "token": {"Password": "***", "secrets": "***"}, "key": None}
    assert redact_values(secrets) == hidden


# --- corpora --------------------------------------------------------------------------------------

CORPORA = ("secret-garden", "token-mix", "top-secret", "apikey")


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., RunConfig]:
    """Load a config whose corpora have names with the words of secrets."""
    lines = ["directory: runs/x", "training: {num_steps: 4}", "data:", "  mixture:"]
    lines += [f"    {name}: {{path: data/{name}, weight: 2}}" for name in CORPORA]
    (tmp_path / "run.yaml").write_text("\n".join(lines))
    return lambda *overrides: load_run_config(tmp_path / "run.yaml", overrides)


def test_corpora_may_be_named_like_secrets(load: Callable[..., RunConfig], tmp_path: Path) -> None:
    config = load("data.mixture.secret-garden.weight=3")
    dump = dump_run_config(config)
    (tmp_path / "dump.yaml").write_text(dump)
    assert load_run_config(tmp_path / "dump.yaml") == config
    assert redact(dump) == dump, "MLflow stores the dump as an artifact, redacted once more"
    params = flatten_config(config)
    assert params["data.mixture.secret-garden.weight"] == 3.0
    for name in CORPORA:
        assert params[f"data.mixture.{name}.path"] == f"data/{name}"
        assert f"data/{name}" in repr(config)


@pytest.mark.parametrize(
    "override",
    [
        "data.mixture.secret-garden.path=s3://me:CANARY@host/x?token=CANARY",
        "data.mixture.token-mix.path=http://host/x?api_key=CANARY",
    ],
)
def test_credentials_in_the_path_of_a_corpus_stay_hidden(
    load: Callable[..., RunConfig], override: str
) -> None:
    config = load(override)
    for text in (dump_run_config(config), repr(config), str(flatten_config(config))):
        assert "CANARY" not in text
        assert "***" in text


@pytest.mark.parametrize(
    "override",
    ["data.mixture.api_key=CANARY", "data.mixture.a.api_key=CANARY", "data.mixture.token=[CANARY]"],
)
def test_a_secret_that_is_not_a_corpus_stays_hidden_in_errors(
    load: Callable[..., RunConfig], override: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(override)
    assert "CANARY" not in str(caught.value)
