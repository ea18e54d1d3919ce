"""What a run's config says about its steps."""

import pytest

from txl_dist.config.run_config import RunConfig


def test_the_tokens_of_the_remaining_steps_follow_the_changes() -> None:
    changes = ({"step": 4, "num_lanes": 5}, {"step": 6, "num_lanes": 7, "tgt_len": 2})
    config = RunConfig.model_validate(
        {
            "directory": "run",
            "data": {"path": "data", "num_lanes": 3, "tgt_len": 11},
            "model": {"n_layer": 1, "d_model": 4, "n_head": 1, "d_head": 4, "d_inner": 4},
            "training": {"num_steps": 10, "changes": changes},
        }
    )
    tokens = [3 * 11] * 4 + [5 * 11] * 2 + [7 * 2] * 4
    assert [config.tokens_after(step) for step in range(11)] == [
        sum(tokens[step:]) for step in range(11)
    ]
    assert config.after_step(5).tokens_after(5) == config.tokens_after(5)


@pytest.mark.parametrize("changes", [(), ({"step": 4, "tgt_len": 9},)], ids=["", "a change"])
def test_a_step_is_divided_into_segments_of_equal_length(changes: tuple) -> None:
    settings = {
        "directory": "run",
        "data": {"path": "data", "num_lanes": 3, "tgt_len": 12 if changes else 10},
        "model": {"n_layer": 1, "d_model": 4, "n_head": 1, "d_head": 4, "d_inner": 4},
        "training": {"num_steps": 10, "changes": changes, "backprop_segments": 4},
    }
    with pytest.raises(ValueError, match=r"tgt_len=(9|10) .*backprop_segments=4 segments"):
        RunConfig.model_validate(settings)
    settings["training"] |= {"backprop_segments": 3}
    settings["data"] |= {"tgt_len": 12}
    assert RunConfig.model_validate(settings).segment_len == 4


def test_every_step_reads_as_many_lanes_and_a_change_ends_a_round() -> None:
    def config(num_lanes: int, *changes: dict[str, int], **training: int) -> RunConfig:
        return RunConfig.model_validate(
            {
                "directory": "run",
                "data": {
                    "path": "data", "num_lanes": num_lanes, "lanes_per_step": 4, "tgt_len": 11
                },
                "model": {"n_layer": 1, "d_model": 4, "n_head": 1, "d_head": 4, "d_inner": 4},
                "training": {"num_steps": 12, "changes": changes, **training},
            }
        )  # fmt: skip

    data = config(12).data
    assert (data.rows, data.num_turns, data.tokens_per_step) == (4, 3, 44)
    changes = ({"step": 3, "num_lanes": 8}, {"step": 7, "tgt_len": 2})
    tokens = [44] * 7 + [8] * 5
    assert config(12, *changes).tokens_after(0) == sum(tokens)
    with pytest.raises(ValueError, match=r"lanes_per_step=4 does not divide data.num_lanes=10"):
        config(10)
    with pytest.raises(ValueError, match=r"lanes_per_step=4 does not divide data.num_lanes=6"):
        config(12, {"step": 3, "num_lanes": 6})
    with pytest.raises(ValueError, match=r"step 4: the lanes are read in 3 turns"):
        config(12, {"step": 4, "num_lanes": 8})
    with pytest.raises(ValueError, match=r"step 6: the lanes are read in 2 turns.*after step 3"):
        config(12, changes[0], {"step": 6, "tgt_len": 2})
    with pytest.raises(ValueError, match=r"micro_batch_lanes=5 is above data.lanes_per_step=4"):
        config(12, micro_batch_lanes=5)
