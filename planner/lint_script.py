"""Training scripts: the DeepSpeed configs written in them as dicts, variables that nothing reads, imports that fail.

A script is parsed and never run. Values that are not literals are unknown and their keys left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from zplan.planner.errors import ZplanError
from zplan.planner.lint import Finding, Report, Subject, View, check_deepspeed, nearest
from zplan.planner.lint_meaning import INERT_VARIABLES
from zplan.planner.relaxed import Document, Path, Place

CONFIG_KEYS = frozenset({"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"})
"""A dict with one of these keys is taken for a config."""

CHECKPOINTING = "deepspeed.runtime.activation_checkpointing"
EXPORTS: dict[str, tuple[str, ...]] = {
    CHECKPOINTING: ("checkpointing", "config"),
    "deepspeed.ops.adam": ("DeepSpeedCPUAdam", "FusedAdam", "ZenFlowCPUAdam"),
    "deepspeed.ops.lion": ("DeepSpeedCPULion", "FusedLion"),
    "deepspeed.runtime.lr_schedules": ("LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"),
}
"""Module -> what training scripts can import from it."""


def check_script(text: str, source: str, subject: Subject) -> Report:
    """Check what a Python training script says to DeepSpeed.

    Parameters
    ----------
    text
        The script.
    source
        What it is called in errors.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        line = getattr(e, "lineno", None)
        at = f" (line {line})" if line else ""
        raise ZplanError(f"`{source}` is not valid Python{at}", "check the file") from None
    found = [*_imports(tree), *_variables(tree)]
    configs = list(_configs(tree))
    if not configs:
        return Report(source, "Python script", "no DeepSpeed config as a dict in it", tuple(found))
    reports = []
    for document in configs:
        view = View(document, document.value, (), subject)
        reports.append(check_deepspeed(view, source, "Python script with a DeepSpeed config", found))
        found = []
    first = reports[0]
    if len(reports) == 1:
        return first
    kind = f"Python script with {len(reports)} DeepSpeed configs"
    findings = tuple(f for r in reports for f in r.findings)
    return Report(source, kind, first.headline, findings, first.costs, first.resolved)


def _configs(tree: ast.AST) -> Iterator[Document]:
    """Dict literals that look like configs, outermost ones only."""
    inside: set[ast.AST] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Dict) or node in inside:
            continue
        keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
        if keys & CONFIG_KEYS:
            inside.update(ast.walk(node))
            document = Document({}, "json")
            document.value = _literal(node, (), document)
            yield document


_UNKNOWN = object()


def _literal(node: ast.expr, path: Path, document: Document) -> Any:
    """The value of an expression, or `_UNKNOWN`; the places of keys are noted on the way."""
    if isinstance(node, ast.Dict):
        block: dict[str, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                continue
            here = (*path, key.value)
            document.places[here] = _place(key)
            read = _literal(value, here, document)
            if read is not _UNKNOWN:
                block[key.value] = read
        return block
    try:
        found: Any = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return _UNKNOWN
    if isinstance(found, tuple):
        found = list(found)
    return found if isinstance(found, (bool, int, float, str, list, type(None))) else _UNKNOWN


def _place(node: ast.expr) -> Place:
    return node.lineno, node.col_offset + 1


def _imports(tree: ast.AST) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        place = node.lineno, node.col_offset + 1
        known = EXPORTS.get(node.module)
        for name in () if known is None else [alias.name for alias in node.names]:
            if known is not None and name not in known and name != "*":
                fix = nearest(name, known) or f"it has {', '.join(known)}"
                message = f"`{node.module}` has no `{name}`: the import fails"
                yield Finding("import-missing", "error", message, fix, place=place)
        if node.module.startswith(CHECKPOINTING):
            message = "DeepSpeed's checkpointing acts only on models that call its own checkpoint function"
            fix = "for transformers models: model.gradient_checkpointing_enable()"
            yield Finding("activation-checkpointing-inert", "warning", message, fix, place=place)


def _variables(tree: ast.AST) -> Iterator[Finding]:
    """`os.environ["NAME"] = ...` and `os.environ.setdefault("NAME", ...)` of variables without effect."""
    for node in ast.walk(tree):
        name: ast.expr | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and _is_environ(node.value):
            name = node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_environ(node.func.value):
            name = node.args[0] if node.func.attr == "setdefault" and node.args else None
        if isinstance(name, ast.Constant) and name.value in INERT_VARIABLES:
            message = f"${name.value} is set but has no effect: {INERT_VARIABLES[name.value]}"
            yield Finding("inert-variable", "warning", message, "delete the line", place=_place(name))


def _is_environ(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "environ"
