"""What a run's config says about its steps."""

import pytest

from txl_dist.config.run_config import RunConfig


def config(*, data: dict[str, int], **training: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "directory": "run",
            "data": {"path": "data", "num_lanes": 3, "tgt_len": 11, **data},
            "model": {"n_layer": 1, "d_model": 4, "n_head": 1, "d_head": 4, "d_inner": 4},
            "training": {"num_steps": 12, **training},
        }
    )


def test_a_step_is_divided_into_segments_of_equal_length() -> None:
    with pytest.raises(ValueError, match=r"tgt_len=10 .*backprop_segments=4 segments"):
        config(data={"tgt_len": 10}, backprop_segments=4)
    assert config(data={"tgt_len": 12}, backprop_segments=3).segment_len == 4


def test_every_step_reads_as_many_lanes() -> None:
    data = config(data={"num_lanes": 12, "lanes_per_step": 4}).data
    assert (data.rows, data.num_turns, data.tokens_per_step) == (4, 3, 44)
    with pytest.raises(ValueError, match=r"lanes_per_step=4 does not divide data.num_lanes=10"):
        config(data={"num_lanes": 10, "lanes_per_step": 4})
    with pytest.raises(ValueError, match=r"micro_batch_lanes=5 is above data.lanes_per_step=4"):
        config(data={"num_lanes": 12, "lanes_per_step": 4}, micro_batch_lanes=5)
