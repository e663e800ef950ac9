"""Hooks into a model's modules and parameters and tells where forward and backward are. Nobody else hooks into them."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zplan.cuda_ops.linear_cross_entropy import give_gradient_to
from zplan.runtime.backward import Backward
from zplan.runtime.calls import Calls
from zplan.runtime.detect import Found
from zplan.runtime.forward import Forward
from zplan.runtime.phases import Phases
from zplan.runtime.reducer import Reducer
from zplan.runtime.unit import FlatUnit
from zplan.runtime.uses import Uses
from zplan.runtime.windows import Windows


class Hooks:
    """All hooks of one engine, and the passes that they report to."""

    def __init__(
        self, model: nn.Module, found: list[Found], windows: Windows, reducer: Reducer, phases: Phases
    ) -> None:
        calls = Calls()
        self.windows, self.uses = windows, Uses(windows, reducer)
        self.backward = Backward(windows, calls, self.uses, reducer, phases)
        self.forward = Forward(windows, calls, self.uses, self.backward, reducer, phases)
        self.handles: list[RemovableHandle] = []
        # Before the users' own, which may read weights, and so the last to be registered is the first to run. `m is`:
        # `copy.deepcopy` copies hooks along, and the copy is nobody's.
        for f in reversed(found):
            self._register_unit(f)
        self._register_model(model)

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        for unit in self.windows.flat.values():
            for p in unit.params:
                give_gradient_to(p, None)

    def _register_model(self, model: nn.Module) -> None:
        def pre_forward(m: nn.Module, _args: Any) -> None:
            if m is model:
                self.forward.start()

        def post_forward(m: nn.Module, _args: Any, out: Any) -> None:
            if m is model:
                self.forward.end(failed=out is None)

        self.handles.append(model.register_forward_pre_hook(pre_forward, prepend=True))
        self.handles.append(model.register_forward_hook(post_forward, always_call=True))

    def _register_unit(self, f: Found) -> None:
        name, module = f.unit.name, f.module

        def pre_forward(m: nn.Module, _args: Any) -> None:
            if m is module:
                self.forward.enter(name)

        def post_forward(m: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            if m is module:
                self.forward.leave(name, out, (args, kwargs))

        self.handles.append(module.register_forward_pre_hook(pre_forward, prepend=True))
        self.handles.append(module.register_forward_hook(post_forward, with_kwargs=True))
        if name in self.windows.flat:
            self._register_parameters(self.windows.flat[name])

    def _register_parameters(self, unit: FlatUnit) -> None:
        for i, p in enumerate(unit.params):
            self.handles.append(p.register_post_accumulate_grad_hook(lambda _p, i=i: self.backward.land(unit, i)))
            if len(self.windows.users[unit.name]) == 1:
                # A tied weight's gradients are left to autograd, which adds them up. Of one that is taken here it
                # still says when it has landed. Weakly, as the unit holds the parameter that is the key.
                give_gradient_to(p, partial(_take, weakref.ref(unit), i))


def _take(unit: weakref.ref[FlatUnit], index: int, grad: Tensor) -> None:
    owner = unit()
    assert owner is not None, "a gradient without a unit"
    owner.take_grad(index, grad)
