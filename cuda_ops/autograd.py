"""What the backward functions of all ops share."""

from __future__ import annotations

import torch


def refuse_second_derivative(op: str) -> None:
    """Called in a backward: raises where it would have to be differentiated itself.

    `once_differentiable` of torch refuses only where the incoming gradient has a history, and lets a second derivative
    that goes through the saved tensors be silently left out.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(f"`create_graph=True` through {op}, whose gradients have no derivative")
