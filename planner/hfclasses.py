"""Which step on a tape a Hugging Face class has; a new one has a row here, and one in `STYLES` of `hfstyles.py`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from zplan.planner.families import StepTape

TAPES = {
    "baichuan": "hfremote.BaichuanTape",
    "bert": "hfbert.BertTape",
    "bloom": "hfbloom.BloomTape",
    "chatglm": "hfremote.ChatGlmTape",
    "deepseek_v2": "hfmla.Mla2Tape",
    "deepseek_v3": "hfmla.MlaTape",
    "falcon": "hfgpts.FalconTape",
    "gemma3": "hfgemma3.Gemma3Tape",
    "gpt_oss": "hfgptoss.GptOssTape",
    "gptj": "hfgpts.GptjTape",
    "internlm2": "hfremote.InternLm2Tape",
    "t5": "hft5.T5Tape",
    "vit": "hfvit.VitTape",
}
"""model_type -> module and class, where they are not those of most decoders."""


def class_tape(model_type: str) -> type[StepTape]:
    """The step of a model_type; its module is imported for it alone."""
    module, _, name = TAPES.get(model_type, "hftape.ClassTape").partition(".")
    return cast("type[StepTape]", getattr(import_module(f"zplan.planner.{module}"), name))
