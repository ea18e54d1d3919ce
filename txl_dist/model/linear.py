"""A linear layer whose weight is several matrices, one below the other."""

from torch import nn


class StackedLinear(nn.Linear):
    """`nn.Linear` of `num_stacked` maps of the same input, computed as one product.

    The output is theirs side by side. Optimizers that treat a matrix as a whole, such as Muon, have
    to know: the best update of two matrices is not that of both as one.
    """

    def __init__(
        self, in_features: int, out_features: int, *, num_stacked: int, bias: bool = False
    ) -> None:
        super().__init__(in_features, num_stacked * out_features, bias=bias)
        self.num_stacked = num_stacked
