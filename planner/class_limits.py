"""What the op lists of Hugging Face classes leave out, and how it is refused."""

from __future__ import annotations

from zplan.planner.config import Choice
from zplan.planner.errors import ZplanError
from zplan.planner.models import REMOTE, Architecture, decoder_units
from zplan.planner.sequence import IMAGES

BIAS_STEP = 16
"""Tokens that the memory-efficient kernel takes a bias of scores in multiples of."""


def only_eager(arch: Architecture) -> bool:
    """Whether a class refuses fused attention; or torch has no kernel for Falcon's one pair of keys and values."""
    one_pair = arch.family == "falcon" and arch.kv_heads < arch.heads and not arch.trait("grouped")
    return arch.family in ("gemma2", "bloom", "gpt_oss") or one_pair


def check_class(arch: Architecture, choice: Choice) -> None:
    """Refuse what the op lists of Hugging Face classes leave out."""
    if choice.padded and arch.family in IMAGES:
        raise ZplanError(
            f"`--padded`: images of model_type `{arch.family}` are all of one size, so none is padded", "leave it out"
        )
    if arch.family == "t5":
        _check_t5(choice)
    if arch.family in REMOTE:
        _check_remote(arch, choice)
    if choice.cross_entropy in ("fused", "chunked") and _own_head(arch):
        raise ZplanError(
            f"the head of model_type `{arch.family}` is no plain matrix, so `--loss {choice.cross_entropy}` has no "
            "place in it",
            "use --loss plain",
        )
    no_kernel = choice.attention == "sdpa" and choice.device == "cpu" and arch.trait("attention_dropout")
    if no_kernel and arch.family != "t5":
        raise ZplanError(
            f"torch's fused attention on a CPU takes no dropout, which model_type `{arch.family}` has in its config",
            "use --attention eager",
        )
    fused, window = choice.attention == "sdpa", arch.trait("window")
    if fused and arch.family == "falcon" and only_eager(arch):
        raise ZplanError(
            f"fused attention of {arch.heads} heads on one key-value head has no kernel in torch for the class of "
            "model_type `falcon`, and is not counted",
            "use --attention eager",
        )
    if fused and only_eager(arch):
        raise ZplanError(f"the class of model_type `{arch.family}` refuses fused attention", "use --attention eager")
    if fused and window and choice.seq >= window:
        raise ZplanError(
            f"with windows of {window} tokens model_type `{arch.family}` masks fused attention of {choice.seq} tokens, "
            "which is not counted yet",
            f"use --seq {window - 1} or less, or --attention eager",
        )
    if fused and choice.device == "cuda" and choice.precision == "fp32" and arch.shares_keys:
        raise ZplanError(
            f"{arch.heads} heads on {arch.kv_heads} key-value heads in fp32 have no fused attention in torch, "
            f"so the activations of model_type `{arch.family}` are not counted",
            "use --precision bf16",
        )


def _check_t5(choice: Choice) -> None:
    """See [Note: biased attention] in `planner/hft5.py`."""
    if choice.checkpoint_every > 1:
        raise ZplanError("`--checkpoint-every` is not counted for model_type `t5`", "leave it out")
    if choice.attention == "sdpa" and choice.device == "cuda" and choice.seq % BIAS_STEP:
        raise ZplanError(
            f"torch's fused attention pads the position bias of {choice.seq} tokens to a multiple of {BIAS_STEP}, "
            "which is not counted",
            f"use --seq {max(1, choice.seq // BIAS_STEP) * BIAS_STEP}, or --attention eager",
        )


def _check_remote(arch: Architecture, choice: Choice) -> None:
    if choice.attention == "eager" and arch.family != "internlm2":
        raise ZplanError(
            f"the code of model_type `{arch.family}` has no other attention than torch's fused one",
            "use --attention sdpa",
        )
    if choice.padded:
        raise ZplanError(
            f"`--padded`: masks of padded batches are not counted for model_type `{arch.family}`", "leave it out"
        )


def _own_head(arch: Architecture) -> bool:
    """Whether logits are more than features times a matrix: biased, capped or transformed."""
    biased = any(p.name.endswith("bias") for u in decoder_units(arch) if u.kind == "head" for p in u.params)
    return biased or bool(arch.trait("capped_logits") or arch.trait("normed_head"))
