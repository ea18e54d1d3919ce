"""A config loaded from text."""

from pathlib import Path
from typing import Any

import pytest

from txl_dist.config.config_file import load_run_config
from txl_dist.config.run_config import RunConfig


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def load(text: str, *overrides: str) -> RunConfig:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return load_run_config(path, overrides)

    return load
