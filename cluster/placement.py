"""Placement: the resources of a rank, and the nodes on which ranks may run (section `ray`).

Ray places ranks by resources. "At most k ranks on a node" is not among its strategies. So, if GPUs
or CPUs allow more than k, every rank reserves 1/k of a node's memory as Ray counts it. Ray then
cannot place more, also after a node was lost and replaced. This is bookkeeping only: Ray does not
limit the memory of a process.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from txl_dist.config.training_config import RayConfig
from txl_dist.errors import ConfigError

NODE_ID_LABEL = "ray.io/node-id"
"""Label that Ray gives to every node."""
_HEAD_RESOURCE = "node:__internal_head__"

Node = Mapping[str, Any]
"""An entry of `ray.nodes()`."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What Ray Train needs to place ranks."""

    use_gpu: bool
    resources: Mapping[str, float]
    """What a rank reserves."""
    labels: Mapping[str, str]
    """Ray's label selector: what the nodes of ranks must have, or must not have."""
    restrictions: str = ""
    """The settings that restrict the nodes of ranks, for messages."""

    def scaling_options(self) -> dict[str, Any]:
        """Arguments of Ray Train's ScalingConfig."""
        return {
            "use_gpu": self.use_gpu,
            "resources_per_worker": dict(self.resources),
            "label_selector": dict(self.labels) or None,
        }

    def max_ranks(self, node: Node) -> int:
        """How many ranks fit on a node on which nothing else runs."""
        return self.num_slots(node, node["Resources"])

    def num_slots(self, node: Node, free: Mapping[str, float]) -> int:
        """How many ranks fit into the free resources of a node."""
        if not _matches(node, self.labels):
            return 0
        return min(int(free.get(name, 0) // amount) for name, amount in self.resources.items())


def place_ranks(config: RayConfig, num_ranks: int, *, is_private: bool) -> Placement:
    """The placement on the connected cluster. Raises ConfigError if it cannot hold the ranks.

    A private Ray has one node, its head, without labels: settings about nodes do not apply to it.
    """
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    if not is_private:
        return choose_placement(config, nodes, num_ranks)
    config = config.model_copy(
        update={"ranks_on_head": True, "ranks_per_node": None, "node_labels": {}}
    )
    placement = choose_placement(config, nodes, num_ranks)
    if placement.max_ranks(nodes[0]) < num_ranks:
        raise ConfigError(
            f"{num_ranks} ranks need {dict(placement.resources)} each, and this machine has "
            f"{nodes[0]['Resources'].get('GPU', 0):g} GPUs. Start fewer ranks, set "
            "ray.gpus_per_rank=null, or use a cluster: --on ADDRESS"
        )
    return placement


def choose_placement(config: RayConfig, nodes: Sequence[Node], num_ranks: int) -> Placement:
    """The placement on `nodes`. Raises ConfigError if a wait for resources would never end."""
    labels = dict(config.node_labels)
    if not config.ranks_on_head:
        head = next((node for node in nodes if _HEAD_RESOURCE in node["Resources"]), None)
        if head is not None:
            labels[NODE_ID_LABEL] = f"!{head['NodeID']}"
    nodes = [node for node in nodes if _matches(node, labels)]
    gpus = _gpus_per_rank(config, nodes, num_ranks)
    resources: dict[str, float] = {}
    if gpus:
        resources["GPU"] = gpus
    if config.cpus_per_rank is not None or not gpus:
        resources["CPU"] = config.cpus_per_rank or 1
    restrictions = ", ".join(
        f"ray.{name}={value}"
        for name, value in config.model_dump().items()
        if name in ("ranks_per_node", "ranks_on_head", "node_labels")
        and value != RayConfig.model_fields[name].default
    )
    placement = Placement(bool(gpus), resources, labels, restrictions)
    limit = config.ranks_per_node
    if limit is None or (nodes and max(map(placement.max_ranks, nodes)) <= limit):
        return placement
    return replace(placement, resources={**resources, "memory": _memory_share(nodes, limit)})


def _matches(node: Node, selector: Mapping[str, str]) -> bool:
    """Whether Ray's label selector admits the node: `a`, `!a`, `in(a,b)` or `!in(a,b)` by label."""
    for label, condition in selector.items():
        text = condition.removeprefix("!")
        values = text[3:-1].split(",") if text.startswith("in(") else [text]
        is_one_of_them = node["Labels"].get(label) in values
        if is_one_of_them == condition.startswith("!"):
            return False
    return True


def _gpus_per_rank(config: RayConfig, nodes: Sequence[Node], num_ranks: int) -> int:
    """GPUs of a rank. Raises ConfigError if the cluster has some, but too few."""
    if config.gpus_per_rank is not None:
        return config.gpus_per_rank  # the nodes may still have to start: Ray waits for them
    num_gpus = int(sum(node["Resources"].get("GPU", 0) for node in nodes))
    if 0 < num_gpus < num_ranks:
        raise ConfigError(
            f"{num_ranks} ranks need one GPU each, and Ray has {num_gpus} where ranks may run. "
            f"Start at most {num_gpus} ranks, or use CPUs: ray.gpus_per_rank=0. If more nodes are "
            "about to start: ray.gpus_per_rank=1"
        )
    return 1 if num_gpus else 0


def _memory_share(nodes: Sequence[Node], ranks_per_node: int) -> int:
    """Bytes of memory that at most `ranks_per_node` ranks can reserve on any of the nodes."""
    sizes = [size for node in nodes if (size := int(node["Resources"].get("memory", 0)))]
    if not sizes:
        raise ConfigError(
            f"ray.ranks_per_node={ranks_per_node}: Ray has no node for ranks yet, so their share "
            "of a node is unknown. Start the nodes first, or set it to null"
        )
    share = min(sizes) // ranks_per_node
    if max(sizes) // share > ranks_per_node:
        raise ConfigError(
            f"ray.ranks_per_node={ranks_per_node}: the memory of the nodes differs too much "
            f"({min(sizes) / 2**30:.1f} to {max(sizes) / 2**30:.1f} GiB as Ray counts it). Start "
            "all nodes with the same ray start --memory BYTES, or choose similar ones by "
            "ray.node_labels"
        )
    return share


def num_threads(*, ranks_on_node: int, cpus_per_rank: int | None, ray_cpus: float) -> int:
    """Threads of a rank on this node. `ray_cpus` is what the node offers to Ray; 0: unknown."""
    if cpus_per_rank is not None:
        return cpus_per_rank
    # Ray knows the limit of a container and what the administrator has set, this machine only all.
    num_cpus = os.cpu_count() or 1
    usable = min(num_cpus, int(ray_cpus)) if ray_cpus else num_cpus
    return max(1, usable // ranks_on_node)
