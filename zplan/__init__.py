"""zplan: a memory planner for large-model training, and a ZeRO runtime that proves its plans.

Public names load lazily, so `import zplan` costs no torch and no numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_WHERE = {
    "ZplanError": "zplan.planner.errors",
    "estimate": "zplan.planner.api",
    "plan": "zplan.planner.api",
    "initialize": "zplan.runtime.initialize",
    "summon": "zplan.runtime.initialize",
    "meta_init": "zplan.runtime.initialize",
    "cap_tables": "zplan.runtime.tables",
}

__all__ = ["ZplanError", "cap_tables", "estimate", "initialize", "meta_init", "plan", "summon"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        try:
            return getattr(import_module(_WHERE[name]), name)
        except ModuleNotFoundError as missing:
            if missing.name != "torch":
                raise
            from zplan.planner.errors import ZplanError

            hint = "pip install 'zplan[runtime]'"
            raise ZplanError(f"`zplan.{name}` needs torch, which is not installed", hint) from None
    raise AttributeError(f"module `zplan` has no attribute `{name}`")


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
