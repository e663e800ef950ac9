"""The setup that an out-of-memory log is about: the config, the model, and the options that neither says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from zplan.planner.activations import prefers_eager
from zplan.planner.config import ITEMSIZE, Attention, Checkpointing
from zplan.planner.errors import ZplanError, did_you_mean
from zplan.planner.hardware import Hardware, hardware_from
from zplan.planner.lint import Subject, deepspeed_view
from zplan.planner.lint_launch import is_accelerate
from zplan.planner.need import Setup
from zplan.planner.relaxed import Document
from zplan.planner.sequence import default_seq
from zplan.planner.units import parse_count

_WORDS: dict[str, tuple[str, ...]] = {
    "checkpointing": tuple(get_args(Checkpointing)),
    "attention": tuple(get_args(Attention)),
}


def make_setup(document: Document, source: str, subject: Subject, given: Mapping[str, Any]) -> Setup | None:
    """The setup, or None where no model is named.

    Parameters
    ----------
    given
        Options of `zplan check`: model, params, seq, checkpointing, attention, gpu.
    """
    if is_accelerate(document.value):
        raise ZplanError(f"`{source}` is accelerate's", "give the DeepSpeed config that it makes or names, with --oom")
    for name, words in _WORDS.items():
        value = given.get(name)
        if value is not None and value not in words:
            raise ZplanError(
                f"`--{name} {value}` is unknown", did_you_mean(value, words) or f"use {' or '.join(words)}"
            )
    if given.get("model") is None and given.get("params") is None:
        return None
    from zplan.planner.sources import model_from

    params = given.get("params")
    model = model_from(given.get("model"), None if params is None else parse_count(params, "--params"))
    view = deepspeed_view(document, subject)
    card = hardware_from(gpus=1, gpu=given["gpu"]) if given.get("gpu") else Hardware(1, 1, 0)
    unshared = not card.flash and view.itemsize != ITEMSIZE["fp32"] and model.arch.shares_keys
    attention: Attention = given.get("attention") or ("eager" if prefers_eager(model.arch) or unshared else "sdpa")
    return Setup(
        view=view,
        spec=model.spec,
        seq=subject.seq or default_seq(model.arch),
        checkpointing=given.get("checkpointing") or "none",
        attention=attention,
        flash=card.flash,
        cudnn_width=card.cudnn_width,
    )
