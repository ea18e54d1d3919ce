"""Tell Ray in time that this host will be preempted, so that its ranks can save.

    python -P -m cluster.drain_node --deadline-seconds 110                     preStop hook of a pod
    python -P -m cluster.drain_node --deadline-seconds 100 --when-preempted aws  on a spot instance

Kubernetes and clouds end a host by signals to its processes, at which a Ray node ends immediately,
and its ranks with it. Ray's notice of a preemption comes before that: the node gets no new work,
and the launcher of a run asks the ranks to save. If `txl train` itself runs on this host, it gets
SIGTERM, as it would from a person: the ranks save, and it ends with code 75.

The command returns when no rank and no `txl train` is left on this host, at the latest at the
deadline. Kubernetes signals the container after that.

Source of the metadata services: docs.aws.amazon.com, "Spot Instance interruption notices";
cloud.google.com, "Preemptible VM instances".
"""

import argparse
import http.client
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise

import psutil

MESSAGE = "the host will be preempted"
POLL_SECONDS = 1.0


def drain_this_host(*, deadline_seconds: float, address: str | None = None) -> None:
    """Announce the preemption of this host's Ray node, stop `txl train`, and wait for the ranks.

    `address` of the cluster; None: RAY_ADDRESS, or the cluster of the Ray node on this host.
    """
    deadline = time.monotonic() + deadline_seconds
    for process in train_commands():
        with suppress(psutil.Error):
            process.terminate()
    _announce_preemption(deadline_seconds, address)
    while time.monotonic() < deadline and (train_commands() or ranks()):
        time.sleep(POLL_SECONDS)


def train_commands() -> list[psutil.Process]:
    """The `txl train` processes of this host; under Ray they are launchers, not ranks."""
    return _processes(_is_train_command)


def ranks() -> list[psutil.Process]:
    return _processes(lambda words: words[0].startswith("ray::RankActor"))


def is_preempted_by_aws(endpoint: str = "http://169.254.169.254") -> bool:
    """Whether AWS has announced that it will take back this spot instance, two minutes before."""
    ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    if (token := _request(f"{endpoint}/latest/api/token", method="PUT", headers=ttl)) is None:
        return False
    url = f"{endpoint}/latest/meta-data/spot/instance-action"  # 404 until there is a notice
    return _request(url, headers={"X-aws-ec2-metadata-token": token}) is not None


def is_preempted_by_google(endpoint: str = "http://metadata.google.internal") -> bool:
    """Whether Google has announced that it will take back this spot instance, 30 s before."""
    url = f"{endpoint}/computeMetadata/v1/instance/preempted"
    return _request(url, headers={"Metadata-Flavor": "Google"}) == "TRUE"


CLOUDS: dict[str, Callable[[], bool]] = {"aws": is_preempted_by_aws, "gcp": is_preempted_by_google}


def _announce_preemption(deadline_seconds: float, address: str | None) -> None:
    from ray._private import services
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated import autoscaler_pb2

    node_ids = services.find_node_ids()
    if not node_ids:
        print("no Ray node runs on this host")
        return
    client = GcsClient(address=services.canonicalize_bootstrap_address_or_die(address))
    heads = {
        node_id.hex()
        for node_id, node in client.get_all_node_info(timeout=10.0).items()
        if node.is_head_node
    }
    for node_id in sorted(node_ids - heads):
        is_accepted, reason = client.drain_node(
            node_id,
            autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
            MESSAGE,
            int((time.time() + deadline_seconds) * 1000),
        )
        print(f"node {node_id}: " + ("drained" if is_accepted else f"not drained: {reason}"))


def _processes(matches: Callable[[Sequence[str]], bool]) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])  # leaves out processes that have ended
        if (words := process.info["cmdline"]) and matches(words)
    ]


def _is_train_command(words: Sequence[str]) -> bool:
    """Whether this is `txl train` or its module, and not a shell that calls it."""
    return any(
        command == "train" and program.rsplit("/", 1)[-1] in ("txl", "txl_dist")
        for program, command in pairwise(words[:5])
    )


def _request(url: str, *, headers: dict[str, str], method: str = "GET") -> str | None:
    """The answer of the metadata service; None without one."""
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        # A proxy cannot reach the metadata service of this host.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=2.0) as response:
            return str(response.read().decode())
    except (OSError, http.client.HTTPException):
        return None


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -P -m cluster.drain_node", description=MESSAGE)
    parser.add_argument("--deadline-seconds", type=float, required=True)
    parser.add_argument("--address", help="of the Ray cluster")
    parser.add_argument("--when-preempted", choices=CLOUDS, help="wait for the cloud's notice")
    options = parser.parse_args(words)
    if options.when_preempted:
        while not CLOUDS[options.when_preempted]():
            time.sleep(5.0)
    drain_this_host(deadline_seconds=options.deadline_seconds, address=options.address)


if __name__ == "__main__":
    main()
