"""Questions about many choices at once: `--top`, `--max`, `--min`, `--sweep`, and no machine at all."""

from __future__ import annotations

from typing import Any, Protocol

from zplan.planner.answer import open_search
from zplan.planner.errors import ZplanError
from zplan.planner.extremes import Open, extreme, hardware_given
from zplan.planner.request import Request
from zplan.planner.search import Search


class Reply(Protocol):
    """What every question is answered with."""

    @property
    def fits(self) -> bool:
        """Whether anything does."""

    def text(self) -> str:
        """For people."""

    def json(self) -> dict[str, Any]:
        """Exact bytes and unrounded seconds."""


def ask(request: Request, asked: dict[str, Any]) -> Reply:
    """Answer one question.

    Parameters
    ----------
    request
        The model, the machine and what is fixed.
    asked
        `top`, `max`, `min` or `sweep` with its value; none of them asks for the fewest of each common GPU.
    """
    if len(asked) > 1:
        raise ZplanError(f"{' and '.join(f'--{name}' for name in asked)} are different questions", "ask one at a time")
    for name, value in asked.items():
        if name == "top":
            return _top(request, value)
        if name == "sweep":
            from zplan.planner.sweep import sweep

            return sweep(request, _opener(), value)
        if name == "min" and value == "gpus" and not hardware_given(request):
            break
        return extreme(request, _opener(), end=name, what=value)
    from zplan.planner.fewest import fewest_of_each

    return fewest_of_each(request, _opener())


def _opener() -> Open:
    """What opens the searches of one question; those of one model share what does not depend on the machine."""
    known: dict[Any, Search] = {}

    def open_(request: Request) -> Search:
        key = (request.model, request.params, request.tuning)
        search = open_search(request, remainder=True, like=known.get(key))
        known.setdefault(key, search)
        return search

    return open_


def _top(request: Request, most: int) -> Reply:
    from zplan.planner.front import front

    if most < 1:
        raise ZplanError(f"`--top {most}` shows nothing", "use 1 or more")
    return front(open_search(request, remainder=True), most)


def no_machine(request: Request) -> bool:
    """Whether nothing is said of the machine, and this one has no GPU to stand in."""
    from zplan.planner.hardware import local_gpus

    return not hardware_given(request) and request.get("device") != "cpu" and not local_gpus()


def reply_json(reply: Reply, request: Request) -> str:
    """A reply as one JSON document."""
    from zplan import __version__
    from zplan.planner.answer_json import SCHEMA_VERSION
    from zplan.planner.writing import render

    head = {"schema_version": SCHEMA_VERSION, "zplan_version": __version__, "asked": dict(request.asked)}
    return render({**head, **reply.json()}) + "\n"
