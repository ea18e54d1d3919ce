"""How many examples property tests draw: all of them in `make test-all`, a quarter in `make test`.

`make test-all` loads the profile `all`; tests/conftest.py loads `quick`.
"""

from hypothesis import settings

settings.register_profile("all", max_examples=100, deadline=None)
settings.register_profile("quick", max_examples=25, deadline=None)


def examples(count: int) -> settings:
    """`count` examples under the profile `all`, in proportion under others."""
    return settings(max_examples=count * settings().max_examples // 100, deadline=None)
