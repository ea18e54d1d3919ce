"""LogFollower: every line once and in order, also those that `flush` passes on early."""

from pathlib import Path

from txl_dist.training.follow import LogFollower


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
