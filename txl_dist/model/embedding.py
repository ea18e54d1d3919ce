"""Token ids to vectors: one table, or one per cluster, narrower for rarer tokens (`div_val`).

`cutoffs` assume a vocabulary sorted by falling frequency.
Source: adaptive input representations, Baevski & Auli 2019, arXiv:1809.10853.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from txl_dist.model import host_copies
from txl_dist.model.config import ModelConfig

# Shapes: B lanes, T segment tokens, N = B T, D d_model, E width of a table


class AdaptiveEmbedding(nn.Module):
    """forward(token_BT) -> x_BTD, scaled by sqrt(d_model) as the paper's code does.

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
        self.scale = config.d_model**0.5

    def forward(self, token_BT: Tensor) -> Tensor:
        if len(self.weights) == 1:
            return self._vectors(0, token_BT) * self.scale
        has_to_wait = host_copies.host_waits_for(token_BT.device)
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
