"""Which rows the head and the tails of the adaptive softmax score.

On a CPU, the rows of a cluster are selected where the targets are. On a GPU, the number of rows is
a result of the device, for which the host would have to wait, once per cluster. So there the rows
are found on the host, before the targets are copied to the GPU, and one copy brings all of them.
See docs/decisions/0039-no-synchronisation-in-a-micro-batch.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from txl_dist.model.host_copies import to_device

# Shapes: N rows (all lanes and tokens), R rows of one cluster

IGNORED = -1
"""Target of a position that is not scored."""
ROW_MULTIPLE = 64
"""On GPUs, rows of a tail are padded to a multiple of this: matrix products of aligned sizes, and
fewer different sizes for the memory allocator."""


@dataclass(frozen=True, slots=True)
class ClusterTargets:
    """Targets of the head, and rows and targets of every cluster after the shortlist."""

    head_N: Tensor
    """Token ids of the shortlist, or the column of another cluster in the head."""
    tails: tuple[tuple[Tensor, Tensor], ...]
    """Per cluster: rows [R], and their targets counted from the cluster's start [R]."""


def select_targets(target_N: Tensor, bounds: Sequence[tuple[int, int]]) -> ClusterTargets:
    """The targets of each cluster, on the device of `target_N`. The host waits if it is a GPU."""
    head_N, tails = target_N, []
    for column, (start, stop) in enumerate(bounds[1:], start=bounds[0][1]):
        inside_N = (target_N >= start) & (target_N < stop)
        head_N = torch.where(inside_N, column, head_N)
        row_R = inside_N.nonzero().squeeze(1)
        tails.append((row_R, target_N[row_R] - start))
    return ClusterTargets(head_N, tuple(tails))


def copy_targets(
    target_BT: Tensor, bounds: Sequence[tuple[int, int]], device: torch.device
) -> ClusterTargets:
    """The targets of each cluster on `device`, found on the host.

    If `target_BT` is on a GPU, this waits for it once.
    """
    parts = find_on_host(target_BT, bounds)
    packed = to_device(torch.cat(parts), device)
    head_N, *rest = packed.split([len(part) for part in parts])
    return ClusterTargets(head_N, tuple(zip(rest[::2], rest[1::2], strict=True)))


def find_on_host(target_BT: Tensor, bounds: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Targets of the head, then rows and targets of each tail, padded to a multiple.

    Padding is row 0 with target IGNORED: it adds 0 to the nats and the gradient of that row.
    """
    selected = select_targets(target_BT.cpu().flatten(), bounds)
    parts = [selected.head_N]
    for row_R, target_R in selected.tails:
        padding = (0, -len(row_R) % ROW_MULTIPLE)
        parts += [pad(row_R, padding), pad(target_R, padding, value=IGNORED)]
    return parts
