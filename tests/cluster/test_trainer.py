"""RankTrainer starts nothing of Ray Train that the ranks do not use."""

import os
import subprocess
import sys

from ray.train import ScalingConfig
from ray.train.v2._internal.callbacks.backend_setup import BackendSetupCallback

from cluster.trainer import UNUSED_CALLBACKS, RankBackendConfig, RankTrainer, train_loop


def test_a_start_has_no_actors_but_the_controller_and_those_of_the_ranks() -> None:
    trainer = RankTrainer(
        train_loop,
        backend_config=RankBackendConfig(use_gpu=False),
        scaling_config=ScalingConfig(num_workers=2),
    )
    kinds = {type(callback) for callback in trainer._create_default_callbacks()}
    assert BackendSetupCallback in kinds
    assert not kinds.intersection(UNUSED_CALLBACKS)


def test_the_controller_does_not_import_torch() -> None:
    program = "import sys, cluster.failure_callback, cluster.trainer; print('torch' in sys.modules)"
    environment = {**os.environ, "RAY_TRAIN_V2_ENABLED": "1"}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
    )
    assert result.stdout == "False\n"
