"""Torch's optimizers, without its compiler.

Torch wraps the methods of its optimizers to keep `torch.compile` out of them, and the first call of
a wrapped one imports the compiler: half as much work as importing torch. Nothing is compiled here,
so these are the same methods without the wrappers.
"""

from __future__ import annotations

from inspect import unwrap

from torch.optim import Optimizer


class Uncompiled(Optimizer):
    """To be inherited before an optimizer of torch."""

    add_param_group = unwrap(Optimizer.add_param_group)
    zero_grad = unwrap(Optimizer.zero_grad)
