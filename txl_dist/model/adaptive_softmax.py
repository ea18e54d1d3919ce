"""Softmax over the next token: plain, or adaptive with a shortlist and clusters of rarer tokens.

    p(token) = head(token)                        if the token is in the shortlist (cluster 0)
    p(token) = head(cluster) * tail(token)        if it is in another cluster

The head is a softmax over the shortlist's tokens and the other clusters, a tail is one over the
tokens of a cluster. A tail is computed only for positions with a target in its cluster. Softmax
and embedding can share their tables (`tie_weight`) and projections (`tie_projs`). Clusters are
numbered as in the vocabulary; the original stores their head columns in reverse, which
original_weights.py undoes.

Sources: Grave et al. 2017, arXiv:1609.04309; weight tying: Press & Wolf 2017, arXiv:1608.05859.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from txl_dist.model import host_copies
from txl_dist.model.chunked_cross_entropy import MAX_LOGITS, chunked_cross_entropy
from txl_dist.model.cluster_targets import (
    IGNORED,
    ClusterTargets,
    copy_targets,
    select_targets,
)
from txl_dist.model.config import ModelConfig
from txl_dist.model.embedding import AdaptiveEmbedding

# Shapes: B lanes, T segment tokens, N = B T, D d_model, V vocabulary

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
        self.bias = nn.Parameter(torch.empty(config.vocab_size))
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
            self.cluster_bias = nn.Parameter(torch.empty(len(config.cutoffs)))

    def forward(self, hidden_BTD: Tensor, target_BT: Tensor, table: AdaptiveEmbedding) -> Tensor:
        """Negative log-likelihood [B, T] in nats, in token order; 0 where the target is IGNORED.

        If the model is on a GPU, pass `target_BT` on the host: then nothing waits for the GPU.
        """
        hidden_ND = hidden_BTD.flatten(0, 1)
        targets = self._targets(target_BT, hidden_ND.device)
        layers = self._layers(table)
        nats_N = self._nats(0, hidden_ND, targets.head_N, layers, table)
        # Even without rows: the ranks of one step must have gradients for the same parameters, or
        # their reductions would not match.
        for number, (row_R, target_R) in enumerate(targets.tails, start=1):
            nats_R = self._nats(number, hidden_ND[row_R], target_R, layers, table)
            nats_N = nats_N.index_add(0, row_R, nats_R)
        return nats_N.view(target_BT.shape)

    def logits(self, hidden_BTD: Tensor, table: AdaptiveEmbedding) -> Tensor:
        """Logits of all tokens [B, T, V]; with clusters, they are normalised log-probabilities."""
        layers = self._layers(table)
        head = self._logits_of(0, hidden_BTD, layers, table)
        if len(self.bounds) == 1:
            return head
        shortlist = self.bounds[0][1]
        head = head.log_softmax(dim=-1)
        tails = [
            head[..., shortlist + number - 1 : shortlist + number]
            + self._logits_of(number, hidden_BTD, layers, table).log_softmax(dim=-1)
            for number, _ in self._clusters()
        ]
        return torch.cat([head[..., :shortlist], *tails], dim=-1)

    def _clusters(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """(number, bounds) of each cluster after the shortlist, which is number 0."""
        return enumerate(self.bounds[1:], start=1)

    def _layers(self, table: AdaptiveEmbedding) -> list[tuple[Tensor, Tensor]]:
        """Weight and bias of the head, then of each tail."""
        sizes = [stop - start for start, stop in self.bounds]
        weights = list(self.weights if len(self.weights) else table.weights)
        # One `split` of the whole vocabulary: with a slice per cluster, each slice's gradient is
        # a tensor of the whole vocabulary (steps of 275 instead of 251 ms in `txl bench model`).
        if len(weights) < len(sizes):
            weights = list(weights[0].split(sizes))
        biases = list(self.bias.split(sizes))
        if len(sizes) > 1:
            weights[0], biases[0] = self._head(weights[0], biases[0])
        return list(zip(weights, biases, strict=True))

    def _head(self, weight_VE: Tensor, bias_V: Tensor) -> tuple[Tensor, Tensor]:
        """The head: tokens of the shortlist, then clusters, then on GPUs columns of padding."""
        weights, biases = [weight_VE, self.cluster_weight], [bias_V, self.cluster_bias]
        num_columns = len(weight_VE) + len(self.cluster_weight)
        num_padding = -num_columns % HEAD_MULTIPLE
        if num_padding and host_copies.host_waits_for(weight_VE.device):
            weights.append(weight_VE.new_zeros(num_padding, weight_VE.shape[1]))
            biases.append(bias_V.new_full((num_padding,), -torch.inf))  # of probability 0
        return torch.cat(weights), torch.cat(biases)

    def _targets(self, target_BT: Tensor, device: torch.device) -> ClusterTargets:
        if not host_copies.host_waits_for(device):
            return select_targets(target_BT.flatten(), self.bounds)
        if len(self.bounds) == 1:
            return ClusterTargets(host_copies.to_device(target_BT, device).flatten(), ())
        return copy_targets(target_BT, self.bounds, device)

    def _nats(
        self,
        number: int,
        hidden_ND: Tensor,
        target_N: Tensor,
        layers: list[tuple[Tensor, Tensor]],
        table: AdaptiveEmbedding,
    ) -> Tensor:
        """Nats [N] of the head (0) or of a tail."""
        weight_VE, bias_V = layers[number]
        is_large = len(hidden_ND) * len(weight_VE) > MAX_LOGITS
        if is_large and host_copies.host_waits_for(hidden_ND.device):
            x_NE = self._project(number, hidden_ND, table)
            return chunked_cross_entropy(x_NE, weight_VE, bias_V, target_N, max_logits=MAX_LOGITS)
        logits_NV = self._logits_of(number, hidden_ND, layers, table)
        return cross_entropy(logits_NV, target_N, ignore_index=IGNORED, reduction="none")

    def _logits_of(
        self,
        number: int,
        hidden: Tensor,
        layers: list[tuple[Tensor, Tensor]],
        table: AdaptiveEmbedding,
    ) -> Tensor:
        projected = self._project(number, hidden, table)
        return _at_least_fp32(linear(projected, *layers[number]))

    def _project(self, number: int, hidden: Tensor, table: AdaptiveEmbedding) -> Tensor:
        if str(number) in self.projections:
            return linear(hidden, self.projections[str(number)].t())
        if not len(table.projections):
            return hidden
        return linear(hidden, table.projections[min(number, len(table.projections) - 1)].t())


def _at_least_fp32(logits: Tensor) -> Tensor:
    """Under autocast logits are bf16: 8 bits of precision are too few to sum a vocabulary."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
