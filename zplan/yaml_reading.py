"""YAML configs, with the place of every key. The planner itself needs no YAML library."""

from __future__ import annotations

from typing import Any

from zplan.planner.errors import ZplanError
from zplan.planner.relaxed import DEEPEST, Document, Path


def read_yaml(text: str, source: str) -> Document:
    """Read a config written as YAML, as accelerate and FSDP have them."""
    if not text.strip():
        raise ZplanError(f"`{source}` is empty", "write the file again")
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise ZplanError(f"reading `{source}` needs PyYAML", "pip install pyyaml, or give the config as JSON") from None
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        found = Document({}, "yaml")
        value = _yaml_value(loader, root, (), found)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark
        at = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ZplanError(f"`{source}` is not valid YAML: {e.problem}{at}", "check the indentation there") from None
    except yaml.YAMLError as e:
        raise ZplanError(f"`{source}` is not valid YAML: {str(e).splitlines()[0]}", "check the file") from None
    except ValueError as e:
        raise ZplanError(f"`{source}` is not valid YAML: {e}", "check the file") from None
    if not isinstance(value, dict):
        raise ZplanError(f"`{source}` holds no mapping of keys to values", "check that it is the right file")
    found.value = value
    return found


def _yaml_value(loader: Any, node: Any, path: Path, found: Document) -> Any:
    if len(path) > DEEPEST:
        raise ValueError("it nests too deeply to be a config")
    if node is None:
        return None
    if node.id == "mapping":
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(loader.construct_object(key_node, deep=True))
            here = (*path, key)
            if key in out:
                found.duplicates.append(here)
            found.places[here] = (key_node.start_mark.line + 1, key_node.start_mark.column + 1)
            out[key] = _yaml_value(loader, value_node, here, found)
        return out
    if node.id == "sequence":
        return [_yaml_value(loader, item, (*path, i), found) for i, item in enumerate(node.value)]
    value = loader.construct_object(node)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
