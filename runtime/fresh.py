"""Initial values for modules that were built on the meta device, by the model's own rules, equal on all ranks.

A module's rule is `_init_weights(module)` of the nearest module around it that has one (transformers' convention, which
fills buffers such as rotary tables too), else its own `reset_parameters()`, or `_reset_parameters()` as torch's
attention calls it. Each unit draws from a seed of its own.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zplan.planner.errors import ZplanError
from zplan.runtime.detect import Found


class Fresh:
    """Initial values of one model that is, in part or whole, on the meta device."""

    def __init__(self, model: nn.Module, device: torch.device, seed: int) -> None:
        self.model, self.device, self.seed = model, device, seed
        self.names = {m: n for n, m in model.named_modules()}
        self.rules: dict[nn.Module, Callable[[nn.Module], None] | None] = {}
        self._find_rules(model, None)

    def _find_rules(self, module: nn.Module, rule: Callable[[nn.Module], None] | None) -> None:
        rule = getattr(module, "_init_weights", rule)
        self.rules.setdefault(module, rule)
        for child in module.children():
            if child not in self.rules:
                self._find_rules(child, rule)

    def reset(self, f: Found) -> None:
        """Make a unit's meta parameters real, in fp32, and fill them: leaves first, then the modules around them."""
        mine = {q for _, params in f.segments() for q in params}
        touched: set[nn.Module] = set()
        with self._seeded(f.unit.name):
            for module in reversed(list(f.module.modules())):
                own = list(module.parameters(recurse=False))
                if any(q.is_meta and q in mine for q in own):
                    self._fill(module, own)
                    touched.add(module)
                elif not own and touched.intersection(module.children()) and mine.issuperset(module.parameters()):
                    touched.add(module)
                    rule = self.rules.get(module)
                    if rule is not None:
                        with torch.no_grad():
                            rule(module)

    def fill_buffers(self) -> None:
        """Fill what buffers are still on the meta device: those of modules without parameters of their own."""
        with self._seeded("buffers"):
            for module in self.model.modules():
                if any(b.is_meta for b in module.buffers(recurse=False)):
                    own = list(module.parameters(recurse=False))
                    self._fill(module, own)

    def _fill(self, module: nn.Module, own: list[nn.Parameter]) -> None:
        rule = self.rules.get(module)
        reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
        if rule is None and reset is None:
            where = self.names.get(module) or "the model"
            raise ZplanError(
                f"`{where}` was built on the meta device and has no `reset_parameters`",
                "pass `init=` to `zplan.initialize` for parameters, and build buffers on a real device",
            )
        # What another unit owns, or this one has been given already, keeps its values.
        kept = [(q, q.detach().clone()) for q in own if not q.is_meta]
        for q in own:
            if q.is_meta:
                empty = torch.empty(
                    q.shape, dtype=torch.float32 if q.is_floating_point() else q.dtype, device=self.device
                )
                torch.utils.swap_tensors(q, nn.Parameter(empty, requires_grad=q.requires_grad))
        buffers = [key for key, b in module.named_buffers(recurse=False) if b.is_meta]
        for key in buffers:
            b = module.get_buffer(key)
            setattr(module, key, torch.full(b.shape, _unlikely(b), dtype=b.dtype, device=self.device))
        with torch.no_grad():
            rule(module) if rule is not None else reset()
            for q, values in kept:
                q.copy_(values)
        for key in buffers:
            self._check_filled(module, key)

    def _check_filled(self, module: nn.Module, key: str) -> None:
        b = module.get_buffer(key)
        left = b.isnan() if b.is_floating_point() else b == _unlikely(b)
        if b.dtype != torch.bool and b.numel() and bool(left.any()):
            name = f"{self.names.get(module)}.{key}".lstrip(".")
            raise ZplanError(
                f"buffer `{name}` was built on the meta device and nothing fills it",
                "build the module's buffers on a real device, or fill them before `zplan.initialize`",
            )

    @contextmanager
    def unreferenced(self) -> Iterator[None]:
        """Recurrent modules keep weak references to their weights, which can't be swapped while there are any."""
        held = [m for m in self.model.modules() if isinstance(m, nn.RNNBase) and any(p.is_meta for p in m.parameters())]
        for module in held:
            module._flat_weight_refs = []
        yield
        for module in held:
            module._flat_weight_refs = [weakref.ref(w) if w is not None else None for w in module._flat_weights]

    def _seeded(self, name: str) -> _Seeded:
        return _Seeded(self.device, self.seed + zlib.crc32(name.encode()))


class _Seeded:
    """Run with a seed, and leave the generators as they were."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.seed = seed
        self.fork = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])

    def __enter__(self) -> None:
        self.fork.__enter__()
        torch.manual_seed(self.seed)

    def __exit__(self, *error: object) -> None:
        self.fork.__exit__(*error)


def _unlikely(b: Tensor) -> float | int | bool:
    """A value that an initializer would not leave behind."""
    if b.is_floating_point():
        return float("nan")
    return False if b.dtype == torch.bool else torch.iinfo(b.dtype).min
