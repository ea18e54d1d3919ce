"""Ray reads its token once in a process, so that every test of this process uses the same."""

import os

from cluster.own_ray import TOKEN_VARIABLE, own_token

os.environ["RAY_AUTH_MODE"] = "token"
os.environ[TOKEN_VARIABLE] = str(own_token())
