"""Token ids to vectors, and vectors to the loss of the next token.

`AdaptiveEmbedding` has one table, or one per cluster of the vocabulary, narrower for rarer tokens
(`div_val`). `AdaptiveSoftmax` is plain, or has a shortlist and clusters of rarer tokens:

    p(token) = head(token)                        if the token is in the shortlist (cluster 0)
    p(token) = head(cluster) * tail(token)        if it is in another cluster

The head is a softmax over the shortlist's tokens and the other clusters, a tail is one over the
tokens of a cluster. A tail is computed only for positions with a target in its cluster. Softmax
and embedding can share their tables (`tie_weight`) and projections (`tie_projs`). `cutoffs` assume
a vocabulary sorted by falling frequency. Clusters are numbered as in the vocabulary; the original
stores their head columns in reverse, which convert/original_model.py undoes.

On GPUs, the logits of a linear layer exist for a limited number of rows (`linear_cross_entropy`),
and kernels (kernels.py) read and write them as few times as possible.

Sources: adaptive input: Baevski & Auli 2019, arXiv:1809.10853; adaptive softmax: Grave et al. 2017,
arXiv:1609.04309; weight tying: Press & Wolf 2017, arXiv:1608.05859.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, embedding, linear, pad

from txl_dist.model import devices
from txl_dist.model.config import ModelConfig

# Shapes: B lanes, T segment tokens, N = B T rows, R rows of one cluster, D d_model, E width of a
# table, V vocabulary

IGNORED = -1
"""Target of a position that is not scored."""
VECTOR_BYTES = 16
"""Rows of another multiple of bytes cannot be loaded by the largest loads of a GPU."""
ROW_MULTIPLE = 64
"""On GPUs, rows of a tail are padded to a multiple of this: matrix products of aligned sizes, and
fewer different sizes for the memory allocator."""


@dataclass(frozen=True, slots=True)
class ClusterTargets:
    """Targets of the head, and rows and targets of every cluster after the shortlist.

    On a CPU, the rows of a cluster are selected where the targets are. On a GPU, the number of rows
    is a result of the device, for which the host would have to wait, once per cluster. So there the
    rows are found on the host, before the targets are copied to the GPU, and one copy brings all of
    them. See docs/decisions/0039-no-synchronisation-in-a-micro-batch.md.
    """

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
    packed = devices.to_device(torch.cat(parts), device)
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


class AdaptiveEmbedding(nn.Module):
    """forward(token_BT) -> x_BTD, scaled by sqrt(d_model) if the config says so.

    `weights[i]` [ids, E] and `projections[i]` [D, E] are those of the ids in `bounds[i]`. Without
    `div_val` and `d_embed` there are no projections, because E equals D.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.bounds = config.table_bounds
        self.weights = nn.ParameterList(
            torch.empty(stop - start, width)
            for (start, stop), width in zip(self.bounds, config.table_widths, strict=True)
        )
        self.projections = nn.ParameterList(
            torch.empty(config.d_model, width)
            for width in config.table_widths
            if config.has_projection
        )
        self.scale = config.d_model**0.5 if config.scale_embedding else 1.0

    def forward(self, token_BT: Tensor) -> Tensor:
        if len(self.weights) == 1:
            return self._vectors(0, token_BT) * self.scale
        has_to_wait = devices.host_waits_for(token_BT.device)
        lookup = self._mask_rows if has_to_wait else self._select_rows
        return lookup(token_BT.flatten()).view(*token_BT.shape, -1) * self.scale

    def _select_rows(self, token_N: Tensor) -> Tensor:
        """Vectors [N, D]. Each table computes its own tokens: the least work."""
        first = self.weights[0]
        x_ND = first.new_zeros(len(token_N), self.projections[0].shape[0])
        for table, (start, stop) in enumerate(self.bounds):
            # Even without rows: if a parameter had a gradient on some ranks only, the
            # gradient reduction would hang or mix up parameters.
            row_N = ((token_N >= start) & (token_N < stop)).nonzero().squeeze(1)
            x_ND = x_ND.index_add(0, row_N, self._vectors(table, token_N[row_N] - start))
        return x_ND

    def _mask_rows(self, token_N: Tensor) -> Tensor:
        """The same for GPUs, in shapes that do not depend on the tokens.

        Selecting rows would make the host wait for the GPU. Each table computes all tokens, but
        tables of rarer tokens are `div_val` times narrower: with 4, a third more work in total.
        """
        vectors_ND = []
        for table, (start, stop) in enumerate(self.bounds):
            inside_N = (token_N >= start) & (token_N < stop)
            x_ND = self._vectors(table, torch.where(inside_N, token_N - start, 0))
            vectors_ND.append(x_ND.masked_fill(~inside_N[:, None], 0))
        return torch.stack(vectors_ND).sum(0)

    def _vectors(self, table: int, token: Tensor) -> Tensor:
        x = embedding(token, self.weights[table])
        if not len(self.projections):
            return x
        # The residual stream and the memory stay fp32 under autocast.
        return linear(x, self.projections[table]).to(x.dtype)


MAX_LOGITS = 2**29
"""On GPUs, the most logits of head or tail at a time: 1 GiB in bf16, 2 GiB in fp32."""
HEAD_MULTIPLE = 8
"""On GPUs the columns of the head are padded to a multiple of this. With an odd number, as in the
paper's WikiText-103 (20,003), products in bf16 cannot load 16 bytes at a time."""


class AdaptiveSoftmax(nn.Module):
    """forward(hidden_BTD, target_BT, table) -> nats_BT; `logits` for all tokens.

    Its parameters are those that it does not share with the embedding `table`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.bounds = config.cluster_bounds
        self.has_biases = config.biases
        if config.biases:
            self.bias = nn.Parameter(torch.empty(config.num_ids))
        self.weights = nn.ParameterList(
            torch.empty(stop - start, width)
            for (start, stop), width in zip(config.table_bounds, config.table_widths, strict=True)
            if not config.tie_weight
        )
        widths = config.table_widths * (config.num_clusters if config.div_val == 1 else 1)
        self.projections = nn.ParameterDict(
            {
                str(cluster): torch.empty(config.d_model, width)
                for cluster, width in enumerate(widths)
                if config.has_projection and not config.is_tied(cluster)
            }
        )
        if config.cutoffs:
            self.cluster_weight = nn.Parameter(torch.empty(len(config.cutoffs), widths[0]))
            if config.biases:
                self.cluster_bias = nn.Parameter(torch.empty(len(config.cutoffs)))

    def forward(self, hidden_BTD: Tensor, target_BT: Tensor, table: AdaptiveEmbedding) -> Tensor:
        """Negative log-likelihood [B, T] in nats, in token order; 0 where the target is IGNORED.

        If the model is on a GPU, pass `target_BT` on the host: then nothing waits for the GPU.
        """
        hidden_ND, device = hidden_BTD.flatten(0, 1), hidden_BTD.device
        if not devices.host_waits_for(device):
            targets = select_targets(target_BT.flatten(), self.bounds)
        elif len(self.bounds) == 1:
            targets = ClusterTargets(devices.to_device(target_BT, device).flatten(), ())
        else:
            targets = copy_targets(target_BT, self.bounds, device)
        head, *tails = self._layers(table)
        nats_N = _nats(hidden_ND, targets.head_N, head)
        # Even without rows: the ranks of one step must have gradients for the same parameters, or
        # their reductions would not match.
        for tail, (row_R, target_R) in zip(tails, targets.tails, strict=True):
            nats_N = nats_N.index_add(0, row_R, _nats(hidden_ND[row_R], target_R, tail))
        return nats_N.view(target_BT.shape)

    def logits(self, hidden_BTD: Tensor, table: AdaptiveEmbedding) -> Tensor:
        """Logits of all tokens [B, T, V]; with clusters, they are normalised log-probabilities."""
        layers = self._layers(table)
        head = _logits(hidden_BTD, layers[0])
        if len(layers) == 1:
            return head
        shortlist = self.bounds[0][1]
        head = head.log_softmax(dim=-1)
        tails = [
            head[..., column : column + 1] + _logits(hidden_BTD, layer).log_softmax(dim=-1)
            for column, layer in enumerate(layers[1:], start=shortlist)
        ]
        return torch.cat([head[..., :shortlist], *tails], dim=-1)

    def _layers(self, table: AdaptiveEmbedding) -> list["_OutputLayer"]:
        """The head, then each tail."""
        sizes = [stop - start for start, stop in self.bounds]
        weights = list(self.weights if len(self.weights) else table.weights)
        # One `split` of the whole vocabulary: with a slice per cluster, each slice's gradient is
        # a tensor of the whole vocabulary (275 instead of 251 ms in benchmarks/model_speed.py).
        if len(weights) < len(sizes):
            weights = list(weights[0].split(sizes))
        # Zeros in place of absent biases: one path for all that follows.
        bias_V = self.bias if self.has_biases else weights[0].new_zeros(sum(sizes))
        biases = list(bias_V.split(sizes))
        if len(sizes) > 1:
            weights[0], biases[0] = self._head(weights[0], biases[0])
        return [
            _OutputLayer(self._projection(number, table), weight_VE, bias_V)
            for number, (weight_VE, bias_V) in enumerate(zip(weights, biases, strict=True))
        ]

    def _projection(self, number: int, table: AdaptiveEmbedding) -> Tensor | None:
        """That of a cluster [D, E], its own one or that of a table; None without any."""
        if str(number) in self.projections:
            return self.projections[str(number)]
        shared = table.projections
        return shared[min(number, len(shared) - 1)] if len(shared) else None

    def _head(self, weight_VE: Tensor, bias_V: Tensor) -> tuple[Tensor, Tensor]:
        """The head: tokens of the shortlist, then clusters, then on GPUs columns of padding."""
        num_clusters = len(self.cluster_weight)
        cluster_bias = self.cluster_bias if self.has_biases else bias_V.new_zeros(num_clusters)
        weights, biases = [weight_VE, self.cluster_weight], [bias_V, cluster_bias]
        num_columns = len(weight_VE) + num_clusters
        num_padding = -num_columns % HEAD_MULTIPLE
        if num_padding and devices.host_waits_for(weight_VE.device):
            weights.append(weight_VE.new_zeros(num_padding, weight_VE.shape[1]))
            biases.append(bias_V.new_full((num_padding,), -torch.inf))  # of probability 0
        return torch.cat(weights), torch.cat(biases)


class _OutputLayer(NamedTuple):
    """The linear layer of the head or of a tail."""

    projection_DE: Tensor | None
    weight_VE: Tensor
    bias_V: Tensor

    def project(self, hidden: Tensor) -> Tensor:
        return hidden if self.projection_DE is None else linear(hidden, self.projection_DE.t())


def _logits(hidden: Tensor, layer: _OutputLayer) -> Tensor:
    logits = linear(layer.project(hidden), layer.weight_VE, layer.bias_V)
    return logits.to(at_least_fp32(logits.dtype))


def _nats(hidden_ND: Tensor, target_N: Tensor, layer: _OutputLayer) -> Tensor:
    """Nats [N], 0 where the target is IGNORED."""
    if devices.host_waits_for(hidden_ND.device):
        return linear_cross_entropy(
            layer.project(hidden_ND), layer.weight_VE, layer.bias_V, target_N,
            max_logits=MAX_LOGITS,
        )  # fmt: skip
    logits_NV = _logits(hidden_ND, layer)
    return cross_entropy(logits_NV, target_N, ignore_index=IGNORED, reduction="none")


# Shapes: N rows, R rows of one chunk, E width, V vocabulary


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Under autocast logits are bf16: 8 bits of precision are too few to sum a vocabulary."""
    return torch.promote_types(dtype, torch.float32)


def linear_cross_entropy(
    x_NE: Tensor,
    weight_VE: Tensor,
    bias_V: Tensor,
    target_N: Tensor,
    *,
    max_logits: int,
) -> Tensor:
    """Nats [N] of a linear layer, in chunks of at most `max_logits` logits; 0 where IGNORED.

        nats_n = log(sum_v exp(logit_nv)) - logit_(n, target n)        logit = x W^T + b

    Forward keeps one float per row, the logarithm of the sum, and the logits of the last chunk.
    Backward starts with these and computes those of the other chunks again, at most a third more
    work for this layer. Gradients of logits take their place, so there is one chunk of logits at a
    time. Sums over the vocabulary and over chunks are fp32, or fp64 for fp64 inputs. Under
    autocast, products have its dtype.
    """
    device = x_NE.device.type
    is_cast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if is_cast else x_NE.dtype
    num_rows, most = len(x_NE), max(1, max_logits // len(weight_VE))
    # Of equal size, or else the last one, whose logits are kept, could be much smaller.
    size = max(1, math.ceil(num_rows / max(1, math.ceil(num_rows / most))))
    starts = range(0, max(1, num_rows), size)  # one chunk even without rows
    chunks = tuple(slice(start, min(start + size, num_rows)) for start in starts)
    with torch.autocast(device, enabled=False):
        return _LinearCrossEntropy.apply(x_NE, weight_VE, bias_V, target_N, chunks, dtype)


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, x_NE: Tensor, weight_VE: Tensor, bias_V: Tensor, target_N: Tensor,
        chunks: tuple[slice, ...], dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        """`dtype`: that of the products."""
        ctx.chunks, ctx.input_dtypes = chunks, (x_NE.dtype, weight_VE.dtype, bias_V.dtype)
        ctx.width = x_NE.shape[1]
        x_NE, weight_VE = _with_vectors(x_NE, dtype), _with_vectors(weight_VE, dtype)
        bias_V = bias_V.to(dtype)
        total_N = x_NE.new_empty(len(x_NE), dtype=at_least_fp32(dtype))
        nats_N = torch.empty_like(total_N)
        logit_RV = None
        for rows in chunks:
            del logit_RV  # before the next are computed
            logit_RV = linear(x_NE[rows], weight_VE, bias_V)
            torch.ops.txl_dist.cross_entropy(logit_RV, target_N[rows], total_N[rows], nats_N[rows])
        ctx.save_for_backward(x_NE, weight_VE, bias_V, target_N, total_N)
        ctx.last_logit_RV = logit_RV
        return nats_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NE, weight_VE, bias_V, target_N, total_N = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        # They are overwritten; another backward (`retain_graph`) computes them again.
        logit_RV, ctx.last_logit_RV = ctx.last_logit_RV, None
        shape, width = (len(x_NE), ctx.width), ctx.width
        d_x_NE = x_NE.new_empty(shape, dtype=ctx.input_dtypes[0]) if wants_x else None
        d_weight_VE = d_bias_V = None
        for rows in reversed(ctx.chunks):
            if logit_RV is None:
                logit_RV = linear(x_NE[rows], weight_VE, bias_V)
            torch.ops.txl_dist.cross_entropy_backward_(
                logit_RV, target_N[rows], total_N[rows], gradients[0][rows]
            )
            if d_x_NE is not None:
                d_x_NE[rows] = (logit_RV @ weight_VE)[:, :width]
            if wants_weight:
                d_weight_VE = _sum(d_weight_VE, (logit_RV.t() @ x_NE[rows])[:, :width])
            if wants_bias:
                d_bias_V = _sum(d_bias_V, logit_RV.sum(0, dtype=total_N.dtype))
            logit_RV = None  # before the next are computed
        results = zip((d_x_NE, d_weight_VE, d_bias_V), ctx.input_dtypes, strict=True)
        return (*(None if x is None else x.to(dtype) for x, dtype in results), None, None, None)


def _with_vectors(x_NE: Tensor, dtype: torch.dtype) -> Tensor:
    """`x_NE` in a dtype; if that is bf16, with zeros at the end of rows that are not aligned.

    With rows of 820 bytes (d_model 410), products in bf16 load 4 bytes at a time.
    """
    padding = -x_NE.shape[1] % (VECTOR_BYTES // dtype.itemsize)
    if dtype.itemsize > 2 or not padding:
        return x_NE.to(dtype)
    aligned = x_NE.new_zeros(len(x_NE), x_NE.shape[1] + padding, dtype=dtype)
    aligned[:, :-padding] = x_NE
    return aligned


def _sum(before: Tensor | None, more: Tensor) -> Tensor:
    """In fp32 at least, once there is something to add."""
    return more if before is None else before.to(at_least_fp32(before.dtype)).add_(more)


devices.define_operator(
    "cross_entropy",
    "(Tensor logits, Tensor target, Tensor(a!) logsumexp, Tensor(b!) nats) -> ()",
    kernel="txl_dist.model.kernels:write_nats",
    empty_results=lambda *_: None,
)
devices.define_operator(
    "cross_entropy_backward_",
    "(Tensor(a!) logits, Tensor target, Tensor logsumexp, Tensor d_nats) -> ()",
    kernel="txl_dist.model.kernels:overwrite_with_gradient",
    empty_results=lambda *_: None,
)
