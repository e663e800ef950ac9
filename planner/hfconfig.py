"""From the keys of a Hugging Face `config.json` to an `Architecture`.

A missing key has the default of the `transformers` class of that `model_type`. What the decoder does not do is refused
by name; dropout, which it leaves out, is a note.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from zplan.planner.errors import ZplanError
from zplan.planner.models import LLAMA_CLASS, REMOTE, Architecture
from zplan.planner.reading import kind_of, want_bool, want_int, want_number, want_object, want_str

NOT_BUILT_HINT = "`zplan models` lists the families that zplan knows, and which of them it can plan"


NEVER_NULL = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
"""Keys whose null means nothing; elsewhere (`num_key_value_heads`, `head_dim`) it stands for the default."""


@dataclass(frozen=True)
class Keys:
    """Typed reads of one config: a missing key or null gives the default."""

    config: Mapping[str, Any]
    where: str

    def integer(self, name: str, default: int | None, *, least: int = 1) -> int:
        value = self.config.get(name)
        if value is None:
            if name in NEVER_NULL and name in self.config:
                raise ZplanError(f"`{name}` of {self.where} is null", "write its value, or leave the key out")
            if default is None:
                raise ZplanError(f"{self.where} has no `{name}`", "check that it is the whole config.json")
            return default
        return want_int(name, self.where, value, least=least)

    def number(self, name: str, default: float) -> float:
        value = self.config.get(name)
        return default if value is None else want_number(name, self.where, value)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.config.get(name)
        return default if value is None else want_bool(name, self.where, value)

    def text(self, name: str, default: str) -> str:
        value = self.config.get(name)
        return default if value is None else want_str(name, self.where, value)

    def inner(self, name: str) -> Keys:
        """The block of that name; an empty one where there is none."""
        block = want_object(name, self.where, self.config.get(name) or {})
        return Keys(block, f"`{name}` of {self.where}")

    def rope(self) -> Keys:
        """The block about rotary positions: `rope_scaling`, or the newer `rope_parameters`."""
        return self.inner("rope_scaling" if self.config.get("rope_parameters") is None else "rope_parameters")

    def fail(self, what: str, hint: str) -> NoReturn:
        """Refuse the config as a whole."""
        raise ZplanError(f"{self.where} {what}", hint)

    def refuse(self, name: str, value: object, allowed: tuple[object, ...]) -> None:
        """Refuse a value that asks for what the decoder does not do."""
        if value not in allowed:
            raise ZplanError(f"`{name}` of {self.where} is {kind_of(value)}, which is not built yet", NOT_BUILT_HINT)


def read_architecture(config: Mapping[str, Any], source: str) -> tuple[Architecture, tuple[str, ...]]:
    """The shape a config describes, and notes on what is left out.

    Parameters
    ----------
    config
        The keys of a `config.json`.
    source
        What it is called in errors, such as its path.
    """
    keys = Keys(config, f"`{source}`")
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ZplanError(f"`{source}` has no `model_type`", "check that it is a model's config.json")
    if kind in ("llama", "mistral") and (beyond := _beyond_the_decoder(keys)):
        return _as_class(keys, beyond)
    if kind in _FAMILIES:
        read, classes = _FAMILIES[kind]
        _check_class(keys, classes)
        return read(keys)
    from zplan.planner.hfshapes import ARCHITECTURES, read_shape, taken_as

    if kind not in ARCHITECTURES:
        raise ZplanError(f"model_type `{kind}` of `{source}` is not built yet", NOT_BUILT_HINT)
    _check_class(keys, ARCHITECTURES[kind])
    note = f"model_type `{kind}` is estimate only: zplan has no decoder of its own for it, so `zplan plan` refuses it"
    arch = read_shape(kind, keys)
    notes = (note, *taken_as(arch))
    from zplan.planner.hfdropout import DROPOUTS, with_dropout

    if kind in DROPOUTS:
        return with_dropout(arch, keys), notes
    if kind in REMOTE:
        notes += (
            f"no class of transformers is there for model_type `{kind}`, whose code comes with its weights: its "
            "activations follow that code, with nothing to check them against",
        )
    return arch, (*notes, *_dropout_note(keys, _DROPOUTS))


def _beyond_the_decoder(keys: Keys) -> str:
    """What a config of Llama's or Mistral's type asks for that zplan's own decoder can't do and the class can."""
    if keys.config["model_type"] == "llama":  # Mistral's class knows neither key.
        for name in ("attention_bias", "mlp_bias"):
            if keys.flag(name, default=False):
                return f"`{name}`"
    block = keys.rope()
    kind = block.text("rope_type", block.text("type", "default"))
    return f"rotary scaling `{kind}`" if kind in _CLASS_ROPES else ""


def _as_class(keys: Keys, beyond: str) -> tuple[Architecture, tuple[str, ...]]:
    """The shape as transformers' class runs it, estimate only."""
    from zplan.planner.hfdropout import with_dropout
    from zplan.planner.hfshapes import SHAPES, read_shape

    kind, config = keys.config["model_type"], dict(keys.config)
    _check_class(keys, SHAPES[LLAMA_CLASS].architectures)
    window = None
    if kind == "mistral":
        config = {**_MISTRAL, **{k: v for k, v in config.items() if k not in ("attention_bias", "mlp_bias")}}
        window = config.get("sliding_window", 4096)
    arch = with_dropout(read_shape(LLAMA_CLASS, Keys(config, keys.where)), keys)
    arch = replace(arch, window=None if window is None else want_int("sliding_window", keys.where, window))
    note = f"{beyond} of {keys.where} makes model_type `{kind}` estimate only: zplan's decoder has none of it"
    return arch, (note,)


_CLASS_ROPES = ("yarn", "dynamic", "longrope", "su")
_MISTRAL = {"num_key_value_heads": 8, "intermediate_size": 14336, "max_position_embeddings": 4096 * 32}
"""What its class takes where a config says nothing, and Llama's something else."""

_DROPOUTS = (
    *("attention_dropout", "hidden_dropout", "dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout_rate"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout"),
)


def _check_class(keys: Keys, classes: tuple[str, ...]) -> None:
    for name in keys.config.get("architectures") or ():
        keys.refuse("architectures", name, classes)
    keys.refuse("quantization_config", keys.config.get("quantization_config"), (None,))


def _llama(keys: Keys) -> tuple[Architecture, tuple[str, ...]]:
    for name in ("attention_bias", "mlp_bias"):
        keys.refuse(name, keys.flag(name, default=False), (False,))
    keys.refuse("hidden_act", keys.text("hidden_act", "silu"), ("silu", "swish"))
    keys.refuse("pretraining_tp", keys.integer("pretraining_tp", 1), (1,))
    mistral = keys.config["model_type"] == "mistral"
    hidden, heads = keys.integer("hidden_size", 4096), keys.integer("num_attention_heads", 32)
    # The two classes differ in these defaults only.
    kv_heads = keys.integer("num_key_value_heads", 8 if mistral and "num_key_value_heads" not in keys.config else heads)
    theta, scaling = _rope(keys)
    window = keys.config.get("sliding_window", 4096) if mistral else None
    arch = Architecture(
        family="llama",
        layers=keys.integer("num_hidden_layers", 32),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(keys, hidden, heads),
        ffn=keys.integer("intermediate_size", 14336 if mistral else 11008),
        vocab=keys.integer("vocab_size", 32000),
        max_seq=keys.integer("max_position_embeddings", 4096 * 32 if mistral else 2048),
        tied=keys.flag("tie_word_embeddings", default=False),
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        window=None if window is None else want_int("sliding_window", keys.where, window),
    )
    if heads % kv_heads:
        raise ZplanError(
            f"{keys.where} has {heads} heads and {kv_heads} key-value heads, which do not divide them",
            "check `num_attention_heads` and `num_key_value_heads`",
        )
    return arch, _dropout_note(keys, ("attention_dropout",))


def _head_dim(keys: Keys, hidden: int, heads: int) -> int:
    given = keys.config.get("head_dim")
    if given is None and hidden % heads:
        raise ZplanError(f"{keys.where} has {heads} heads, which do not divide its width {hidden}", "give `head_dim`")
    head_dim = keys.integer("head_dim", hidden // heads)
    if head_dim % 2:
        raise ZplanError(f"{keys.where} has an odd head width, {head_dim}", "rotary positions need an even one")
    return head_dim


_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings"),
}


def _rope(keys: Keys) -> tuple[float, tuple[tuple[str, float | str], ...]]:
    """Base and scaling of the rotary positions."""
    inner = keys.rope()
    theta = inner.number("rope_theta", keys.number("rope_theta", 10000.0))
    keys.refuse("partial_rotary_factor", inner.number("partial_rotary_factor", 1.0), (1.0,))
    kind = inner.text("rope_type", inner.text("type", "default"))
    inner.refuse("rope_type", kind, tuple(_ROPE_KEYS))
    if kind == "default":
        return theta, ()
    values: list[tuple[str, float | str]] = [("rope_type", kind)]
    for key in _ROPE_KEYS[kind]:
        if inner.config.get(key) is None:
            raise ZplanError(f"{inner.where} has no `{key}`", f'"{kind}" needs it')
        values.append((key, want_number(key, inner.where, inner.config[key])))
    return theta, tuple(sorted(values))


def _gpt2(keys: Keys) -> tuple[Architecture, tuple[str, ...]]:
    keys.refuse("activation_function", keys.text("activation_function", "gelu_new"), ("gelu_new", "gelu_pytorch_tanh"))
    keys.refuse("scale_attn_weights", keys.flag("scale_attn_weights", default=True), (True,))
    for name in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        keys.refuse(name, keys.flag(name, default=False), (False,))
    hidden, heads = keys.integer("n_embd", 768), keys.integer("n_head", 12)
    if hidden % heads:
        raise ZplanError(f"{keys.where} has {heads} heads, which do not divide its width {hidden}", "check `n_head`")
    arch = Architecture(
        family="gpt2",
        layers=keys.integer("n_layer", 12),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=keys.integer("n_inner", 4 * hidden),
        vocab=keys.integer("vocab_size", 50257),
        max_seq=keys.integer("n_positions", 1024),
        tied=keys.flag("tie_word_embeddings", default=True),
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
    )
    dropouts = {name: keys.number(name, 0.1) for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop")}
    return arch, _dropout_note(Keys({**keys.config, **dropouts}, keys.where), tuple(dropouts))


def _dropout_note(keys: Keys, names: tuple[str, ...]) -> tuple[str, ...]:
    asked = [name for name in names if keys.number(name, 0.0) > 0]
    return (f"dropout ({', '.join(asked)}) is left out: the plan is for training without it",) if asked else ()


_FAMILIES: dict[str, tuple[Callable[[Keys], tuple[Architecture, tuple[str, ...]]], tuple[str, ...]]] = {
    "llama": (_llama, ("LlamaForCausalLM",)),
    "mistral": (_llama, ("MistralForCausalLM",)),
    "gpt2": (_gpt2, ("GPT2LMHeadModel",)),
}
"""model_type -> its reader and the classes it describes."""

RUNNABLE_TYPES = tuple(_FAMILIES)
"""model_types that zplan plans and trains; the rest is estimate only."""
