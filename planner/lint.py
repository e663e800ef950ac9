"""The linter: what is wrong in a config, what is silently ignored, and what it costs in bytes.

A rule is a function from a `View` of one config to findings; the files `lint_*.py` hold them by subject. An *error*
makes a tool refuse the file or do something else than it says; a *warning* is silently ignored or costly; a *note* is
worth knowing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from zplan.planner.costs import Cost, state_rates
from zplan.planner.dsschema import CURRENT, UNPREFIXED
from zplan.planner.errors import ZplanError, did_you_mean
from zplan.planner.relaxed import Document, Path, Place

Severity = Literal["error", "warning", "note"]
Consumer = Literal["any", "deepspeed", "hf", "accelerate", "lightning"]
CONSUMERS = get_args(Consumer)


@dataclass(frozen=True)
class Subject:
    """What the config is for, as far as it is known. None means not said."""

    consumer: Consumer = "any"
    """The program that reads the file: DeepSpeed alone, or a trainer that fills in "auto"."""
    release: tuple[int, ...] = CURRENT
    """DeepSpeed's."""
    gpus: int | None = None
    """Over all nodes."""
    nodes: int = 1
    mem_bytes: int | None = None
    """Per GPU."""
    host_mem_bytes: int | None = None
    """Per node."""
    model: str = ""
    """Its name, in messages."""
    num_params: int | None = None
    trainable: int | None = None
    """Parameters that are trained, where that is not all."""
    hidden: int | None = None
    largest_tensor: int | None = None
    """Elements."""
    layers: int | None = None
    vocab: int | None = None
    batch_norm: bool = False
    """The model has BatchNorm layers."""
    model_type: str = ""
    experts: int = 0
    """Per block; 0 for a dense model."""
    dtype: str = ""
    """What the published weights are in."""
    micro_batch: int | None = None
    """What the launcher passes (`--per_device_train_batch_size`)."""
    seq: int | None = None
    """Tokens per sequence."""
    was_batch: int | None = None
    """Sequences per step of the run that the learning rate is from."""
    was_gpus: int | None = None
    """Ranks of the run whose checkpoint is resumed."""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """One thing to say about a config."""

    rule: str
    severity: Severity
    message: str
    fix: str = ""
    """What to write instead; empty where nothing need change."""
    key: str = ""
    """Dotted, as written."""
    place: Place | None = None
    refused: bool = False
    """Whether current DeepSpeed refuses the file for it."""
    nbytes: int | None = None


@dataclass(frozen=True)
class View:
    """One DeepSpeed config, seen by the rules."""

    document: Document
    config: Mapping[str, Any]
    prefix: Path
    """Where in the document the config lies."""
    subject: Subject

    @property
    def zero(self) -> dict[str, Any]:
        """The `zero_optimization` block by prefixed names."""
        block = self.config.get("zero_optimization")
        if block is True:
            return {"stage": 1}
        return {str(UNPREFIXED.get(k, k)): v for k, v in block.items()} if isinstance(block, Mapping) else {}

    @property
    def stage(self) -> int:
        """The stage that is asked for; 0 where there is none or it is no stage."""
        stage = whole(self.zero.get("stage", 0))
        return stage if stage is not None and stage <= 3 else 0

    def block(self, *path: str) -> dict[str, Any]:
        """A block of the config, empty where there is none."""
        here: Any = self.config
        for name in path:
            here = here.get(name) if isinstance(here, Mapping) else None
        return dict(here) if isinstance(here, Mapping) else {}

    def offload(self, what: Literal["param", "optimizer"]) -> str:
        """Where a block sends parameters or optimizer states: "none", "cpu" or "nvme"."""
        old = "cpu_offload" if what == "optimizer" else "cpu_offload_param"
        if self.zero.get(old) in (True, "true", "True"):
            return "cpu"
        device = self.block("zero_optimization", f"offload_{what}").get("device", "none")
        return device if device in ("cpu", "nvme") else "none"

    def enabled(self, name: str) -> bool | None:
        """Whether a precision block is on; None where a trainer decides ("auto")."""
        value = self.block(name).get("enabled", False)
        return None if value == "auto" else value in (True, 1, "true", "True")

    @property
    def fragment(self) -> bool:
        """Whether it says neither a batch size nor a precision: part of a config."""
        return not self.config.keys() & {
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "fp16",
            "bf16",
            "bfloat16",
        }

    @property
    def itemsize(self) -> int:
        """Bytes of one parameter element in compute; 16 bits where a trainer decides or a fragment does not say."""
        fp32 = self.enabled("fp16") is False and self.enabled("bf16") is False
        return 4 if fp32 and not self.fragment else 2

    def zero_path(self, key: str) -> Path:
        """Where a key of the zero block is, given its prefixed name."""
        short = key.removeprefix("stage3_")
        return "zero_optimization", key if key in self.block("zero_optimization") or key == short else short

    def place(self, path: Iterable[str | int]) -> Place | None:
        return self.document.places.get((*self.prefix, *path))

    def find(  # noqa: PLR0913 - the fields of a finding
        self,
        rule: str,
        severity: Severity,
        path: Path,
        message: str,
        fix: str = "",
        *,
        refused: bool = False,
        nbytes: int | None = None,
    ) -> Finding:
        """A finding about the key at a path."""
        key = ".".join(str(p) for p in path)
        return Finding(rule, severity, message, fix, key, self.place(path), refused, nbytes)


@dataclass(frozen=True)
class Report:
    """Everything about one file."""

    source: str
    kind: str
    """In words: "DeepSpeed config", "accelerate config"."""
    headline: str
    findings: tuple[Finding, ...]
    costs: tuple[Cost, ...] = ()
    resolved: tuple[tuple[str, str, str], ...] = ()
    """Keys that are "auto": `(key, value, why)`."""

    def count(self, severity: Severity) -> int:
        return sum(f.severity == severity for f in self.findings)

    @property
    def rules(self) -> frozenset[str]:
        return frozenset(f.rule for f in self.findings)


Rule = Callable[[View], Iterator[Finding]]


def whole(value: object) -> int | None:
    """A whole number of at least 0 as written, `2e8` included; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e18:
        return None
    return int(value) if value == int(value) else None


def check_document(document: Document, source: str, subject: Subject) -> Report:
    """Check a config of any of the kinds that we know."""
    from zplan.planner.lint_launch import check_accelerate, is_accelerate

    if "schema_version" in document.value and "ledger" in document.value:
        raise ZplanError(f"`{source}` is a plan, not a config", "`zplan emit` writes configs from it")
    if is_accelerate(document.value):
        return check_accelerate(document, source, subject)
    view = deepspeed_view(document, subject)
    inside = f" in `{view.prefix[0]}`" if view.prefix else ""
    return check_deepspeed(view, source, f"DeepSpeed config{inside}")


def deepspeed_view(document: Document, subject: Subject) -> View:
    """The DeepSpeed config of a document: the whole of it, or the block in which a trainer's file keeps it."""
    for wrapper in ("deepspeed", "deepspeed_config", "ds_config"):
        if isinstance(document.value.get(wrapper), dict):
            return View(document, document.value[wrapper], (wrapper,), subject)
    return View(document, document.value, (), subject)


def check_deepspeed(view: View, source: str, kind: str, more: Iterable[Finding] = ()) -> Report:
    """All rules over one DeepSpeed config."""
    from zplan.planner import lint_keys, lint_meaning, lint_model, lint_sizes
    from zplan.planner.autofill import resolve_auto
    from zplan.planner.costs import costs

    rules: tuple[Rule, ...] = (*lint_keys.RULES, *lint_meaning.RULES, *lint_sizes.RULES, *lint_model.RULES)
    found = [*more, *(f for rule in rules for f in rule(view))]
    order = get_args(Severity)
    found.sort(key=lambda f: (order.index(f.severity), f.place or (10**9, 0)))
    return Report(source, kind, headline(view), tuple(found), costs(view), resolve_auto(view))


def headline(view: View) -> str:
    """What the config asks for, in one line."""
    if view.enabled("bf16") or view.enabled("fp16"):
        precision = "bf16" if view.enabled("bf16") else "fp16"
    elif view.fragment:
        precision = "a fragment that says no precision, taken as 16 bits"
    else:
        precision = "fp32" if view.itemsize == 4 else "precision of the trainer"
    parts = [f"stage {view.stage}", precision]
    if view.offload("optimizer") != "none":
        parts.append(f"optimizer states on {view.offload('optimizer')}")
    if view.offload("param") != "none":
        parts.append(f"parameters on {view.offload('param')}")
    for memory, rate in state_rates(view, view.stage).items():
        if memory != "GPU" and rate.split:
            parts.append(f"{rate.split} bytes a parameter {'in host memory' if memory == 'host' else 'on NVMe'}")
    return ", ".join(parts)


def nearest(word: str, known: Iterable[str]) -> str:
    """`did you mean ...?`, or nothing."""
    return did_you_mean(word.strip(), known) or ""
