"""The way in: from a module and a config to an engine, and the engines that this process has open."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zplan.planner.dsconfig import TrainingConfig, from_mapping
from zplan.planner.errors import ZplanError
from zplan.planner.runnable import refuse_unrunnable
from zplan.runtime.cut import cut_up
from zplan.runtime.engine import OPEN, Engine
from zplan.runtime.groups import Asked, Parameters
from zplan.runtime.materialize import Initializer
from zplan.runtime.mesh import Mesh, join
from zplan.runtime.optimizer import ShardedOptimizer
from zplan.runtime.phases import LISTENERS, PhaseListener
from zplan.runtime.schedule import Given, Scheduler, TorchScheduler
from zplan.runtime.summon import Whole
from zplan.runtime.weights import WeightFolder


def initialize(  # noqa: PLR0913  each is a choice of the user's own
    *,
    model: nn.Module,
    config: object = None,
    optimizer: Asked = None,
    model_parameters: Parameters | None = None,
    training_data: Any = None,
    weights: str | os.PathLike[str] | None = None,
    init: Initializer | None = None,
    seed: int = 0,
    world: int | None = None,
    checked: bool | None = None,
    units: Sequence[str] | None = None,
    resident: Sequence[str] = (),
    lr_scheduler: Given | None = None,
) -> tuple[Engine, ShardedOptimizer, Any, Scheduler | TorchScheduler | None]:
    """Turn a module into an engine that trains it under a plan or config.

    Parameters
    ----------
    model
        Any module, on the CPU, a GPU or the meta device. Its parameters are cut up one unit at a time.
    config
        A `Plan`, the path of a plan or of a DeepSpeed config, or such a config as a mapping. Under `zplan run` it may
        be left out.
    optimizer
        A torch optimizer over the model's parameters, or a class or function that makes one from parameters or groups;
        None for the config's. torch's AdamW, Adam and SGD run as zplan's own; others on flat slices, where they look at
        one element at a time, and on whole tensors only where nothing is sharded.
    model_parameters
        Parameters, or groups of them with an `lr`, `weight_decay` and so on of their own; by default all that require
        gradients.
    training_data
        A map-style dataset; the third value returned is then a loader that gives each rank its own micro-batches.
    weights
        A local safetensors folder (`save_pretrained` wrote it). Each rank reads only the bytes of what it keeps, so
        that a model built in `meta_init()` never lies whole on any host. Parameters that have values of their own and
        are not in the folder, such as those of adapters, keep them.
    init
        For modules on the meta device: fills one full fp32 parameter, given `(name, tensor)`, equally on all ranks.
    seed
        Seed for `reset_parameters` of modules on the meta device, and for the loader's shuffle.
    world
        Be rank 0 of this many in one process; collectives move nothing.
    checked
        Checked mode; by default what `ZPLAN_CHECK` says.
    units
        Patterns of module names (`model.layers.*`) that are gathered as one unit each, instead of those found by
        default; `zplan trace --units` prints them.
    resident
        Patterns of unit names that stage 3 keeps whole, since they are read outside their own forward or in a changing
        order.
    lr_scheduler
        A torch scheduler, or a function that makes one of an optimizer, instead of the config's `scheduler`. The engine
        moves it, by applied steps only.

    Returns
    -------
    tuple
        `(engine, optimizer, loader, scheduler)`; the scheduler is None where there is none.

    Raises
    ------
    ZplanError
        When the config can't be honoured, the plan is for another world size, or the model for another plan.
    """
    if checked is None:
        checked = os.environ.get("ZPLAN_CHECK", "0") not in ("", "0")
    mesh = join(pretend_world=world)
    engine = None
    try:
        _say_if_reserved_may_grow(mesh)
        _refuse_used(model)
        training = _training_config(config, model, mesh)
        if lr_scheduler is not None and training.schedule is not None:
            raise ZplanError("both the config's `scheduler` and `lr_scheduler` are given", "drop one of the two")
        folder = None if weights is None else WeightFolder(weights)
        cut = cut_up(
            model,
            training,
            mesh,
            units=units,
            resident=resident,
            optimizer=optimizer,
            parameters=model_parameters,
            weights=folder,
        )
        engine = Engine(model, training, cut, init=init, seed=seed, checked=checked, weights=folder)
        if lr_scheduler is not None:
            engine.scheduler = TorchScheduler(lr_scheduler, engine.optimizer)
        loader = None if training_data is None else _loader(training_data, engine, seed)
    except BaseException:
        # What is refused must not leave a group behind that the next call can't join.
        (mesh if engine is None else engine).close()
        raise
    return engine, engine.optimizer, loader, engine.scheduler


def _refuse_used(model: nn.Module) -> None:
    """Raise where another engine has the parameters, or left no values in them; or where one storage has two."""
    taken = {id(p) for engine in OPEN for p in engine.module.parameters()}
    storages: dict[tuple[torch.device, int], str] = {}
    for name, p in model.named_parameters():
        if p.numel() and not p.is_meta and type(p) is nn.Parameter:
            other = storages.setdefault((p.device, p.data_ptr()), name)
            if other != name and id(p) not in taken:
                raise ZplanError(
                    f"`{name}` and `{other}` are two parameters in one storage, which would be two apart",
                    "tie them as one parameter (`head.weight = embed.weight`), or give one a copy",
                )
        if id(p) in taken:
            raise ZplanError(f"`{name}` is trained by another engine, which is still open", "call its `close()` first")
        if p.dim() and p.numel() > 1 and not any(p.stride()) and bool(p.flatten()[0].isnan()):
            raise ZplanError(
                f"`{name}` has no values: an engine that kept a part of it was closed",
                "close it inside summon, which leaves the model whole: `with zplan.summon(model): engine.close()`",
            )


def _say_if_reserved_may_grow(mesh: Mesh) -> None:
    """Expandable segments keep what the allocator reserves next to what is allocated; they must be set before CUDA
    starts.
    """
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if mesh.device.type == "cuda" and mesh.rank == 0 and "expandable_segments:True" not in settings:
        sys.stderr.write(
            "zplan: expandable segments are off, so the allocator may reserve a fifth more than the ledger says; "
            "set PYTORCH_ALLOC_CONF=expandable_segments:True (`zplan run` does)\n"
        )


def _training_config(config: object, model: nn.Module, mesh: Mesh) -> TrainingConfig:
    if config is None:
        config = os.environ.get("ZPLAN_PLAN")
        if config is None:
            raise ZplanError("`initialize` needs a config", "pass `config=`: a plan, a path, or a mapping")
    from zplan.planner.plan_file import Plan, load_config

    if isinstance(config, (str, Path)):
        config = load_config(Path(config))
    if isinstance(config, Mapping):
        training = from_mapping(config, world_size=mesh.world_size)
        for note in training.notes if mesh.rank == 0 else ():
            sys.stderr.write(f"zplan: {note}\n")
        return training
    if isinstance(config, Plan):
        _check_plan(config, model, mesh)
        return config.training
    raise ZplanError(f"`config` is a {type(config).__name__}", "pass a plan, a path, or a mapping")


def _check_plan(plan: Any, model: nn.Module, mesh: Mesh) -> None:
    refuse_unrunnable(plan.choice)
    if plan.training.world_size != mesh.world_size:
        raise ZplanError(
            f"the plan is for {plan.training.world_size} ranks, this job has {mesh.world_size}",
            "plan again with `--gpus` set to this job's ranks",
        )
    have = sum(p.numel() for p in dict.fromkeys(model.parameters()))
    if plan.spec.num_held != have:
        packed = ", two of 4 bits counted as one" if plan.spec.num_held != plan.spec.num_params else ""
        raise ZplanError(
            f"the plan is for {plan.spec.num_held:,} parameters{packed}, this model has {have:,}",
            "plan for this model, or pass a config without a model",
        )


def _loader(dataset: Any, engine: Engine, seed: int) -> Any:
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, num_replicas=engine.world_size, rank=engine.rank, shuffle=True, seed=seed, drop_last=True
    )
    return DataLoader(dataset, batch_size=engine.choice.micro_batch, sampler=sampler, drop_last=True)


def engines() -> tuple[Engine, ...]:
    """Engines of this process that are open, oldest first."""
    return tuple(OPEN)


def watch_phases(listener: PhaseListener) -> None:
    """Make `listener` the `on_phase` of every engine that is made from now on in this process."""
    LISTENERS.append(listener)


def meta_init() -> AbstractContextManager[Any]:
    """Build a module without memory: `with zplan.meta_init(): model = Net()`; `initialize` makes it real, shard by
    shard.
    """
    return torch.device("meta")


@contextmanager
def summon(
    module: nn.Module, *, grads: bool = False, optim: bool = False, write: bool = False, timeout_s: float = 60.0
) -> Iterator[Whole]:
    """Whole parameters of a module that an engine trains, or of a part of it. Every rank must enter; see
    `Engine.summon`.

    Examples
    --------
    >>> with zplan.summon(model):              # doctest: +SKIP
    ...     torch.save(model.state_dict(), path)
    >>> with zplan.summon(model, grads=True) as whole:              # doctest: +SKIP
    ...     whole.grads["head.weight"].norm()
    """
    engine = _engine_of(module)
    with engine.summon(module, grads=grads, optim=optim, write=write, timeout_s=timeout_s) as whole:
        yield whole


def _engine_of(module: nn.Module) -> Engine:
    for engine in OPEN:
        if module is engine or any(m is module for m in engine.module.modules()):
            return engine
    raise ZplanError("no engine trains this module", "call `zplan.initialize(model=...)` first")
