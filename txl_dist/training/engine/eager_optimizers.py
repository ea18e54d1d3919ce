"""torch's Adam, AdamW and their base class, without the import of torch's compiler.

torch decorates methods of its optimizers for programs that compile them. The first call of a
decorated method imports the compiler: 1.6 s of CPU time at every start of a rank. An optimizer is
never compiled here (`training.compile` compiles layers), so the methods of these classes are
torch's without the decorators.
"""

import inspect

import torch
from torch import optim


class EagerOptimizer(optim.Optimizer):
    """Base class. `step` of a subclass needs `torch.no_grad()`, which is among the decorators."""

    add_param_group = inspect.unwrap(optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(optim.Optimizer.zero_grad)


class Adam(EagerOptimizer, optim.Adam):
    """`torch.optim.Adam`."""

    step = torch.no_grad()(inspect.unwrap(optim.Adam.step))


class AdamW(EagerOptimizer, optim.AdamW):
    """`torch.optim.AdamW`."""

    step = torch.no_grad()(inspect.unwrap(optim.AdamW.step))
