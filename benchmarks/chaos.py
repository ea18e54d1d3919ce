"""Kills processes of training runs at random moments; the results must be those of a quiet run.

    make chaos N=1000            or: python benchmarks/chaos.py --kills 1000 --out runs/chaos

One run of `configs/tiny.yaml` on two ranks is never killed. Then the same run is started in new
directories. While it trains, a random process (launcher, rank, MLflow sender) gets SIGKILL or
SIGTERM, and `txl train` is called again, until the run has had its kills and ends by itself. After
some kills the run directory is removed too, and the run resumes from the copies of its checkpoints
in an object store (moto's S3 in this process; --no-upload leaves both out). After every 130 steps a
command with another number of lanes continues the run, and a replay follows. Every run must have
the reference's metrics, checkpoint and copy bit for bit, and every point once in MLflow. A call
with the same --out continues where the last one ended.

Random times alone would rarely hit a save, which takes milliseconds. So most kills wait for the
next beginning of a random phase, which the ranks write to a trace (fault_injection.py), and follow
it after a random delay.

What the phase of a kill means: the victim has begun it last; for a launcher or sender, rank 0.
Saves and uploads run in threads during the steps, and no point marks their end. So each counts
for LONGEST_DELAY_SECONDS after its beginning, and after that the phase is that of the training
loop. Of phases that go on together, a kill counts for the one that it waited for, else for the
save or upload. `start` includes the time before a rank exists.

--out gets kills.jsonl (one line per kill), result.json and chaos.png.
"""

import argparse
import itertools
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from chaos_comparison import compare, draw
from chaos_training import (
    NUM_RANKS,
    STEPS_PER_LEG,
    TIMEOUT_SECONDS,
    Training,
    lines_of,
    object_store,
    prepare_text,
    process_list,
    require,
    wait_until,
)
from fault_traces import Reached

STEPS_PER_KILL = 40
KILLS_PER_RUN = 10
AIMS = {
    "start": 10,
    "engine": 7,
    "resume": 7,
    "step": 18,
    "evaluation": 16,
    "save/files": 14,
    "save/manifest": 6,
    "save/latest": 6,
    "upload": 16,
}
"""Weights of the phases that kills wait for."""
REPLAY_SHARE = 0.4
"""Of the kills near a change of lanes, those that wait for the replay after it."""
PHASES = (*AIMS, "replay")
RANK_ZERO_ONLY = ("save/manifest", "save/latest")
IN_BACKGROUND = ("save/files", "save/manifest", "save/latest", "upload")
LONGEST_DELAY_SECONDS = {"start": 6.0, "engine": 1.0, "resume": 0.2, "upload": 0.3}
"""From the beginning of a phase to the kill; for other phases 0.04."""
OTHER_DELAY_SECONDS = 0.04
VICTIMS = {"launcher": 30, "rank 0": 30, "rank 1": 30, "sender": 10}
SIGTERM_SHARE = 0.15
LOST_DISK_SHARE = 0.15
"""Of the kills that ended a call of `txl train`, those after which the run directory is removed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """One line of kills.jsonl."""

    number: int
    run: int
    step: int
    """Last step in metrics.jsonl."""
    phase: str
    aim: str
    victim: str
    signal: str
    exit_code: int | None
    """Of `txl train`; None if it went on, because only the sender was killed."""
    start_seconds: float | None
    """From the call of `txl train` to its first step; None if it was killed before that."""
    call_seconds: float
    """From the call of `txl train`, or the kill before in the same call, to the end of this one."""
    lost_disk: bool
    """Whether the run directory was removed after the kill."""


def main() -> None:
    """Run the kills, compare the runs, write the results. Exits with 1 if a run differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--upload", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the run in progress too
    with object_store() if options.upload else nullcontext():
        summary = run_kills(
            options.out, num_kills=options.kills, seed=options.seed, uploads=options.upload
        )
    print_summary(summary)
    sys.exit(0 if summary["equal"] else 1)


def run_kills(out: Path, *, num_kills: int, seed: int, uploads: bool) -> dict[str, Any]:
    """Train the reference and the killed runs, as far as `out` does not have them; the summary."""
    kills_per_run = min(KILLS_PER_RUN, num_kills)
    data = prepare_text(out)

    def training(name: str) -> Training:
        num_steps = STEPS_PER_KILL * kills_per_run
        return Training(out / name, data, num_steps=num_steps, uploads=uploads)

    reference = training("reference")
    while not reference.is_finished:
        with reference.started() as process:
            require(process.wait(TIMEOUT_SECONDS) == 0, f"see {reference.log}")
        reference.end_leg()
    journal = out / "kills.jsonl"
    kills = [Kill(**json.loads(line)) for line in lines_of(journal)]
    comparisons = []
    for number in itertools.count(1):
        run = training(f"run-{number:04d}")
        result = run.path.with_suffix(".json")
        if not result.exists():
            left = min(kills_per_run - sum(k.run == number for k in kills), num_kills - len(kills))
            with journal.open("a") as file:
                for kill in disturb(run, kills, number=number, num_kills=left, seed=seed):
                    kills.append(kill)
                    file.write(json.dumps(asdict(kill)) + "\n")
                    file.flush()
                    print(described(kill), flush=True)
            result.write_text(json.dumps(compare(run.path, reference.path, url=run.url)))
        comparisons.append(json.loads(result.read_text()))
        print(f"run {number}: {comparisons[-1]}", flush=True)
        if sum(kill.run <= number for kill in kills) >= num_kills:
            break
    kills = [kill for kill in kills if kill.run <= number]
    summary = summarise(kills, comparisons)
    (out / "result.json").write_text(json.dumps(summary, indent=1) + "\n")
    draw(reference.path, [out / f"run-{n:04d}" for n in range(1, number + 1)],
         [asdict(kill) for kill in kills], PHASES, out / "chaos.png")  # fmt: skip
    return summary


def described(kill: Kill) -> str:
    lost = ", run directory removed" if kill.lost_disk else ""
    return (
        f"kill {kill.number}: {kill.signal} to {kill.victim} in {kill.phase}, "
        f"run {kill.run}, step {kill.step}, {kill.call_seconds:.1f} s{lost}"
    )


def disturb(
    run: Training, earlier: list[Kill], *, number: int, num_kills: int, seed: int
) -> Iterator[Kill]:
    """Train to the end, with `num_kills` kills on the way. Yields each kill after it."""
    done = 0
    while not run.is_finished:
        lost_disk = False
        with run.started() as process:
            began = time.monotonic()
            ranks: list[psutil.Process] = []
            while done < num_kills:
                count = sum(kill.run == number for kill in earlier)
                kill = kill_once(
                    run, process, ranks, random.Random(f"{seed} {number} {count}"),
                    number=number, index=count, began=began, first=len(earlier) + 1,
                )  # fmt: skip
                if kill is None:
                    break
                done, lost_disk = done + 1, kill.lost_disk
                yield kill
                if process.poll() is not None:
                    break
            else:
                require(process.wait(TIMEOUT_SECONDS) == 0, f"see {run.log}")
            _, alive = psutil.wait_procs(ranks, timeout=TIMEOUT_SECONDS)
            require(not alive, f"ranks outlived their launcher: {alive}")
        if lost_disk:
            run.lose_disk()
        if process.returncode == 0:
            run.end_leg()


def kill_once(
    run: Training, process: psutil.Popen, ranks: list[psutil.Process], choice: random.Random, *,
    number: int, index: int, began: float, first: int,
) -> Kill | None:  # fmt: skip
    """Send one signal; None if training ended before. Adds the processes of ranks to `ranks`."""
    called_at = time.monotonic()
    (victim_name,) = choice.choices(list(VICTIMS), list(VICTIMS.values()))
    is_gentle = victim_name != "sender" and choice.random() < SIGTERM_SHARE
    number_of_signal = signal.SIGTERM if is_gentle else signal.SIGKILL
    loses_disk = run.url is not None and choice.random() < LOST_DISK_SHARE
    aim = choose_aim(choice, index=index, uploads=run.url is not None)
    wait_for_aim(run, process, choice, aim, index=index, rank=int(
        victim_name == "rank 1" and aim not in RANK_ZERO_ONLY
    ))  # fmt: skip
    ranks[:] = process_list(process, "txl_dist.launch.rank_process")
    victim = find_victim(victim_name, process, ranks)
    killed_at = time.monotonic()
    if process.poll() is not None or not victim.is_running():
        process.wait()
        return None
    victim.send_signal(number_of_signal)
    if victim_name != "sender" or victim is process:
        process.wait(TIMEOUT_SECONDS)
    reached = run.reached()
    of_rank = [line for line in reached if line.rank == int(victim in ranks[1:])]
    steps = [line.time for line in reached if line.point == "step"]
    return Kill(
        number=first, run=number, step=run.last_step, aim=aim, signal=number_of_signal.name,
        phase=phase_at(killed_at, of_rank, aim=aim),
        victim="launcher" if victim is process else victim_name,
        exit_code=process.poll(), start_seconds=round(steps[0] - began, 2) if steps else None,
        call_seconds=round(time.monotonic() - called_at, 2),
        lost_disk=loses_disk and process.poll() is not None,
    )  # fmt: skip


def choose_aim(choice: random.Random, *, index: int, uploads: bool) -> str:
    """The phase that the kill of this index waits for."""
    first_step, stop_step = STEPS_PER_KILL * index, STEPS_PER_KILL * (index + 1)
    has_change = first_step // STEPS_PER_LEG < stop_step // STEPS_PER_LEG
    if has_change and choice.random() < REPLAY_SHARE:
        return "replay"
    weights = {aim: weight for aim, weight in AIMS.items() if uploads or aim != "upload"}
    return choice.choices(list(weights), list(weights.values()))[0]


def wait_for_aim(
    run: Training, process: psutil.Popen, choice: random.Random, aim: str, *, index: int, rank: int
) -> None:
    """Return after the next beginning of the phase on that rank and a random delay."""
    target_step = STEPS_PER_KILL * (index + choice.random())
    delay = choice.uniform(0, LONGEST_DELAY_SECONDS.get(aim, OTHER_DELAY_SECONDS))
    if aim == "start":
        deadline = time.monotonic() + delay
        wait_until(process, lambda: time.monotonic() > deadline)
        return
    if aim in ("engine", "resume"):  # a run without a checkpoint does not reach `resume`
        wait_until(process, lambda: run.count(aim) > 0 or run.count("step") > 0)
    elif aim == "replay":  # a run that is already past the change does not reach it
        last_step = STEPS_PER_KILL * (index + 1)
        wait_until(process, lambda: run.count("replay", rank=rank) > 0
                   or (run.count("step") > 0 and run.last_step >= last_step))  # fmt: skip
    else:
        wait_until(process, lambda: run.count("step") > 0 and run.last_step >= target_step, 0.02)
        seen = run.count(aim, rank=rank)
        wait_until(process, lambda: run.count(aim, rank=rank) > seen)
    time.sleep(delay)


def phase_at(time_seconds: float, reached: list[Reached], *, aim: str) -> str:
    """The phase of a rank that has reached these points, as the docstring of the module says."""
    before = [line for line in reached if line.time <= time_seconds]
    in_loop = [line.point for line in before if line.point not in IN_BACKGROUND]
    in_background = [
        line.point
        for line in before
        if line.point in IN_BACKGROUND
        and time_seconds - line.time <= LONGEST_DELAY_SECONDS.get(line.point, OTHER_DELAY_SECONDS)
    ]
    phase_of_loop = in_loop[-1] if in_loop else "start"
    if aim in (phase_of_loop, *in_background):
        return aim
    return in_background[-1] if in_background else phase_of_loop


def find_victim(
    name: str, process: psutil.Popen, ranks: list[psutil.Process]
) -> psutil.Process | psutil.Popen:
    """The process of that name, or the launcher if it does not exist yet."""
    if name == "sender" and ranks:
        senders = process_list(ranks[0], "txl_dist.tracking.sender")
        return senders[0] if senders else process
    if name.startswith("rank") and len(ranks) == NUM_RANKS:
        return ranks[int(name.removeprefix("rank "))]
    return process


def summarise(kills: list[Kill], comparisons: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of result.json."""
    starts = [kill.start_seconds for kill in kills if kill.start_seconds is not None]
    seconds = [kill.call_seconds for kill in kills]
    return {
        "kills": len(kills),
        "runs": len(comparisons),
        "equal": all(comparison["equal"] for comparison in comparisons),
        "largest_loss_difference": max(c["largest_loss_difference"] for c in comparisons),
        "weights_sha256": comparisons[0]["weights_sha256"],
        "comparisons": comparisons,
        "by_phase": {phase: sum(kill.phase == phase for kill in kills) for phase in PHASES},
        "by_victim": Counter(kill.victim for kill in kills),
        "by_signal": Counter(kill.signal for kill in kills),
        "lost_disks": sum(kill.lost_disk for kill in kills),
        "median_start_seconds": median(starts) if starts else None,
        "mean_seconds_per_kill": round(sum(seconds) / len(seconds), 2),
    }


def print_summary(summary: dict[str, Any]) -> None:
    """The histogram and the verdict."""
    most = max(summary["by_phase"].values())
    for phase, count in summary["by_phase"].items():
        print(f"{phase:<14} {count:>5} {'#' * round(40 * count / most)}")
    for key in ("by_victim", "by_signal", "lost_disks", "median_start_seconds",
                "mean_seconds_per_kill", "weights_sha256"):  # fmt: skip
        print(f"{key.replace('_', ' ')}: {summary[key]}")
    verdict = "equal to the undisturbed run, bit for bit" if summary["equal"] else "DIFFERENT"
    print(f"{summary['kills']} kills in {summary['runs']} runs: {verdict}")


if __name__ == "__main__":
    main()
