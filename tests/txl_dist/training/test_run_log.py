"""The log of rank 0: every line is followed once, and tells the course of the run."""

from pathlib import Path

from txl_dist.training.run_log import LogFollower, last_error, parse_log, read_log

STEP = "12:00:05 step 10 | loss 3.0 | ppl 20 | tok/s 1,000 | eta 1:02:03 | lr 1e-3"
LOG = f"""12:00:00 rank 0 is up
12:00:01 machine | a CPU (2 cores)
12:00:01 a new run | 1,234 parameters | 2 ranks on cpu | fp32 | 4 lanes of 5 tokens per epoch | x
{STEP}
12:00:09 DataError: a shard is damaged
12:01:00 rank 0 is up
12:01:01 resuming at step 8 from runs/x/checkpoints/step-00000008 | 1,234 parameters | 1 ranks
12:01:02 divergence.policy=skip, event 1 of at most 9: the loss of step 9 is nan (segment position 3
12:01:03 returned from step 9 to the checkpoint of step 8; the run continues without step 9
"""


def test_starts_have_their_step_and_the_last_word_of_the_start_before() -> None:
    log = parse_log(LOG + "12:02:00 rank 0 is up\n")
    assert [(start.step, start.after) for start in log.starts] == [
        (0, ""),
        (8, "DataError: a shard is damaged"),
        (0, "no last word: killed, or lost with its machine"),
    ]
    assert (log.parameters, log.machine) == (1234, "a CPU (2 cores)")
    assert parse_log(LOG.partition("12:01")[0]).ranks == "2 ranks on cpu | fp32"


def test_diverged_steps_are_in_the_log_or_in_names_of_files() -> None:
    files = ("divergence-step-00000021-rank-0.json", "divergence-step-00000021-rank-1.json", "x")
    log = parse_log(LOG, event_files=files)
    assert log.divergences == (9, 21)
    assert log.rollbacks == ((9, 8),)


def test_the_time_left_is_that_of_the_newest_step_line() -> None:
    log = parse_log(LOG)
    assert (log.seconds_left, log.has_stepped) == (3723, False)
    assert parse_log(LOG + STEP).has_stepped
    assert not any(" step 10 |" in line for line in log.events)


def test_a_cause_is_preferred_to_the_loss_of_other_ranks(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for rank, error in enumerate(("LostRankError: rank 1 is gone", "DataError: of now")):
        text = f"1 rank {rank} is up\n2 DataError: of the start before\n3 rank {rank} is up\n"
        (tmp_path / "logs" / f"rank-{rank}.log").write_text(f"{text}4 {error}\n")
    assert last_error(tmp_path) == ("DataError: of now", tmp_path / "logs" / "rank-1.log")
    assert read_log(tmp_path).last_word == "LostRankError: rank 1 is gone"


def test_flush_passes_on_what_was_written_since_the_last_poll(tmp_path: Path) -> None:
    path, lines = tmp_path / "rank-0.log", list[str]()
    path.write_text("of an earlier launch\n")
    with LogFollower(path, lines.append) as follower, path.open("a") as log:
        print("one", file=log, flush=True)
        follower.flush()
        assert lines == ["one"]
        log.write("two")
        log.flush()
        follower.flush()
        assert lines == ["one"], "an incomplete line waits for its end"
        log.write(" and its end\nthree\n")
    assert lines == ["one", "two and its end", "three"]
