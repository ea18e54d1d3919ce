"""No test leaves a job behind."""

from collections.abc import Iterator

import pytest

from tests.cluster.deploy.jobs import end_jobs


@pytest.fixture(autouse=True)
def _end_jobs() -> Iterator[None]:
    yield
    end_jobs()
