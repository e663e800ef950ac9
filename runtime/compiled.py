"""`torch.compile` of each block's `forward`.

Hooks stay outside the compiled region: compiling a module whole would trace through them, and the parameters that they
bring and take away would be frozen into the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from zplan.planner.errors import ZplanError

BACKEND = "inductor"


def compile_forwards(blocks: Sequence[nn.Module]) -> Callable[[], None]:
    """Compile the blocks' `forward`, at their first call.

    Returns
    -------
    Callable
        Puts back what was there.
    """
    if not blocks:
        raise ZplanError(
            "`compile` is on and no unit of this model is a block",
            "name the blocks with `units=`, or leave `compile` out",
        )
    before = [(m, m.__dict__.get("forward")) for m in blocks]
    for m in blocks:
        m.forward = torch.compile(m.forward, backend=BACKEND)

    def undo() -> None:
        for m, own in before:
            if own is None:
                m.__dict__.pop("forward", None)
            else:
                m.forward = own

    return undo
