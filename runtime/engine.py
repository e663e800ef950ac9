"""The engine: puts the parts of one training together, and is what users hold.

The calls are those that people already write: `engine(batch)`, `engine.backward(loss)`, `engine.step()`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from zplan.planner.buffers import terms_numel
from zplan.planner.dsconfig import TrainingConfig
from zplan.planner.errors import ZplanError
from zplan.planner.placement import shards_states
from zplan.runtime.arena import Arena
from zplan.runtime.breakdown import breakdown_of, telling_of
from zplan.runtime.checkpoint import Checkpoints, Resume
from zplan.runtime.collectives import Collectives
from zplan.runtime.compiled import compile_forwards
from zplan.runtime.cut import Cut
from zplan.runtime.deterministic import be_deterministic
from zplan.runtime.gatherer import Gatherer
from zplan.runtime.guards import check_frozen, check_loss, check_own, guard_state_dicts, refuse_unless_whole
from zplan.runtime.hooks import Hooks
from zplan.runtime.in_backward import InBackward
from zplan.runtime.materialize import COMPUTE_DTYPE, Initializer, materialize, move_buffers
from zplan.runtime.nonfinite import NonFinite, first_nonfinite
from zplan.runtime.optimizer import ShardedOptimizer
from zplan.runtime.phases import PhaseListener, Phases
from zplan.runtime.precision import check_scale
from zplan.runtime.reducer import Reducer
from zplan.runtime.replicas import Replicas, check_alike
from zplan.runtime.schedule import Scheduler, TorchScheduler, scheduler_of
from zplan.runtime.sentinel import Sentinels
from zplan.runtime.streams import Streams
from zplan.runtime.summon import Summoned, Whole
from zplan.runtime.update import Update
from zplan.runtime.weights import WeightFolder, load_weights
from zplan.runtime.windows import Windows

OPEN: list[Engine] = []
"""Engines of this process that were not closed, oldest first."""


class Engine(nn.Module):
    """A module trained under one plan. Made by `initialize`; call it like the module itself.

    Attributes
    ----------
    module
        The user's module, whose parameters are now views of flat buffers.
    grad_norm
        0-dim fp32 tensor on the device: gradient norm of the last step, averaged, before clipping.
    global_steps, global_samples
        Optimizer steps taken and sequences consumed by them, over all ranks; a loaded checkpoint's count goes on.
    breakdown
        Times of the parts of a step, where the config has `wall_clock_breakdown`; else None.
    on_phase
        Called with the ledger's name of each phase as it begins; None for nobody.
    """

    def __init__(
        self,
        model: nn.Module,
        training: TrainingConfig,
        cut: Cut,
        *,
        init: Initializer | None,
        seed: int,
        checked: bool,
        weights: WeightFolder | None,
    ) -> None:
        super().__init__()
        self.module, self.training_config = model, training
        self.mesh, self.choice = mesh, choice = cut.mesh, cut.choice
        self.arena = Arena(mesh.device)
        self.units = materialize(
            model,
            cut.found,
            cut.placements,
            choice,
            self.arena,
            mesh=mesh,
            init=init,
            seed=seed,
            bound=() if weights is None else weights.names,
        )
        self.trained = [u for u in self.units if not u.placement.frozen]
        self.frozen = [u for u in self.units if u.placement.frozen]
        move_buffers(model, mesh.device)
        if mesh.device.type == "cuda":
            torch.cuda.empty_cache()  # what construction left cached would count as reserved for ever
        self.streams = Streams(mesh.device, overlap=training.overlap)
        self.collectives = Collectives(mesh, self.arena, checked=checked, num_terms=terms_numel(choice))
        self.gatherer = Gatherer(self.units, choice, self.collectives, self.streams)
        self.reducer = Reducer(self.trained, choice, self.arena, self.collectives, self.streams)
        if weights is not None:
            load_weights(self, weights)
        self.optimizer = ShardedOptimizer(self.trained, choice, training, cut.optimizer, self.arena)
        self.in_backward: InBackward | None = None
        if choice.optimizer_in_backward:
            self.in_backward = InBackward(self.optimizer, self.gatherer, self.collectives)
        self.reducer.feed(self.optimizer, self.in_backward)
        self.scheduler: Scheduler | TorchScheduler | None = scheduler_of(training.schedule, self.optimizer)
        """`initialize` puts a torch scheduler here."""
        self.replicas: Replicas | None = None
        if mesh.world_size > 1 and choice.check_replicas_every:
            every = choice.check_replicas_every
            self.replicas = Replicas(self.units, self.optimizer, self.collectives, self.arena, every)
        self.sentinels = Sentinels(p for u in self.trained for p in u.params)
        blocks = [f.module for f in cut.found if f.unit.kind == "block"]
        self.uncompile = compile_forwards(blocks) if choice.compile else None
        self.windows = Windows(cut.found, self.units, self.gatherer)
        self.windows.ahead = training.prefetch_numel if training.overlap else 0
        self.phases = Phases()
        self.hooks = Hooks(model, cut.found, self.windows, self.reducer, self.phases)
        self.update = Update(
            self.optimizer, self.in_backward, self.collectives, self.gatherer, self.windows, self.hooks.uses
        )
        self.guards = guard_state_dicts(model, self.units, sharded=shards_states(choice))
        self.breakdown = breakdown_of(training, self.collectives, self.streams)
        self.telling = telling_of(self, training)
        self.global_steps = self.global_samples = 0
        self._graph_kept = False
        """The last backward was one with `retain_graph`."""
        self.checkpoints = Checkpoints(self)
        self.undo_deterministic = be_deterministic(compiled=choice.compile) if choice.deterministic else None
        self.closed = False
        OPEN.append(self)

    # --- what users read -------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self.mesh.rank

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    @property
    def grad_norm(self) -> Tensor:
        return self.optimizer.norm

    def first_nonfinite(self) -> NonFinite | None:
        """Where this rank's gradients of the last step were first not finite, or None. Waits for the device.

        Every rank answers for its own slices: where one says None another may know.
        """
        return first_nonfinite(self.optimizer)

    @property
    def on_phase(self) -> PhaseListener | None:
        return self.phases.listener

    @on_phase.setter
    def on_phase(self, listener: PhaseListener | None) -> None:
        self.phases.listener = listener

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` will be applied."""
        return self.reducer.micro_step >= self.choice.accumulation

    # --- the step --------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module. Outside `no_grad` this is a training forward and fixes or follows the schedule."""
        self._alive()
        self.sentinels.hide()
        if self.choice.precision != "fp32":
            dtype = COMPUTE_DTYPE[self.choice.precision]
            args, kwargs = tree_map_only(Tensor, lambda t: _cast(t, dtype), (args, kwargs))
        breakdown = self.breakdown if torch.is_grad_enabled() else None
        with nullcontext() if breakdown is None else breakdown.span("forward"):
            try:
                return self.module(*args, **kwargs)
            except BaseException:
                self.hooks.forward.stop()
                raise

    def backward(self, loss: Tensor, *, num_tokens: int | None = None, retain_graph: bool = False) -> Tensor:
        """Backward of one micro-step. The step averages over ranks and micro-steps; `loss` is returned as it is.

        A micro-step is whatever runs between forwards: several calls after one forward add up. To add up over several
        forwards, put all but the last backward in `no_sync()`.

        Parameters
        ----------
        loss
            Mean loss of the micro-batch.
        num_tokens
            What that mean was taken over, on this rank. The step then divides by the tokens of all ranks and
            micro-steps, so that each token weighs the same. Every backward of a step must say it, or none. With 0 the
            rank contributes zeros, whatever `loss` is.
        retain_graph
            Keep the graph for another backward of the same forward.

        With `optimizer_in_backward` this updates the parameters too, so there is one backward in a step, and the
        learning rate is what it is now.
        """
        self._settled()
        count = None if num_tokens is None else float(num_tokens)  # a tensor is read once
        if count is not None and not count >= 0:
            raise ZplanError(f"`num_tokens` is {num_tokens}", "give the number of tokens that `loss` is the mean of")
        nothing = count == 0
        if not nothing:
            check_loss(loss)
        with nullcontext() if self.in_backward is None else self.in_backward.backward(retain_graph=retain_graph):
            self._backward(loss, num_tokens, retain_graph=retain_graph, nothing=nothing)
        self.sentinels.show()
        return loss

    def _backward(self, loss: Tensor, num_tokens: int | None, *, retain_graph: bool, nothing: bool) -> None:
        self.reducer.check_due()
        if self.in_backward is not None:
            if self.replicas is not None:  # after this backward no unit is whole until the next forward
                self.replicas.compare(self.global_steps + 1)
            if self.scheduler is not None:
                self.scheduler.before_step()
        # A further loss of a forward needs the graph that the one before it kept.
        self.optimizer.weigh(num_tokens, again=self._graph_kept and not self.reducer.forwarded)
        self._graph_kept = retain_graph
        self.sentinels.hide()
        self.phases.begin("backward.loss")
        if self.hooks.uses.spans is not None:
            check_own(self.module, self.units)
        if isinstance(loss, Tensor):
            self.hooks.uses.look(loss)
        check_frozen(self.frozen)
        if nothing and not (
            isinstance(loss, Tensor) and loss.requires_grad and any(unit.slot is not None for unit in self.units)
        ):
            self.hooks.backward.empty()
            return
        total = loss if num_tokens is None else loss * num_tokens
        scaler = self.optimizer.scaler
        with nullcontext() if self.breakdown is None else self.breakdown.span("backward"):
            # Where recomputes gather, this rank can take part in the others' gathers only by going the same way.
            self.hooks.backward.run(
                total, scale=None if scaler is None else scaler.scale, retain_graph=retain_graph, discarding=nothing
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward calls inside do not end their micro-step: gradients are added to those of the next one outside.

        They are summed and not averaged, as in DDP, in fp32: where one rank without accumulation keeps them in bf16,
        2 bytes a parameter more until the step. Nothing is sent at stages 0 and 1 with accumulation unless
        `deterministic`; elsewhere each adds to the shard.
        """
        if self.in_backward is not None:
            raise self.in_backward.refusal("`no_sync`", "would add to gradients that are applied as they land")
        before, self.reducer.held = self.reducer.held, True
        try:
            yield
        finally:
            self.reducer.held = before

    def step(self) -> None:
        """Apply the optimizer at the accumulation boundary; elsewhere do nothing.

        With `optimizer_in_backward` it was applied in backward, and this tells the norm and counts.
        """
        self._alive()
        if self.reducer.held:
            raise ZplanError("`step` inside `no_sync`", "call it after the last backward of the micro-step, outside")
        if self.hooks.backward.in_task:
            raise ZplanError(
                "`step` after a backward that broke off, with gradients of some units only",
                "call `engine.reset_step()` on every rank and run the step's forwards anew",
            )
        if not self.is_gradient_accumulation_boundary():
            return
        self.sentinels.hide()
        self.phases.begin("step")
        if self.in_backward is None and self.replicas is not None:
            self.replicas.compare(self.global_steps + 1)
        check_scale(self.optimizer.scaler, self.reducer.suspects, self.collectives, self.global_steps)
        if self.scheduler is not None and self.in_backward is None:
            self.scheduler.before_step()
        with nullcontext() if self.breakdown is None else self.breakdown.span("step"):
            self.update.apply()
        if self.scheduler is not None:
            self.scheduler.count()
        if self.optimizer.scaler is not None:
            self.optimizer.scaler.update(self.optimizer.scalars.skip)
        self.optimizer.finish()
        self.optimizer._opt_called = True  # torch's schedulers warn where nobody calls the optimizer's own step
        self.reducer.drop()
        self.global_steps += 1
        self.global_samples += self.choice.global_batch
        if self.collectives.checked:
            self.phases.begin("check")
            check_alike(self.units, self.optimizer, self.collectives)
        self.phases.begin("idle")
        if self.telling is not None:
            self.telling.after_step()

    def penalty(self, *, l1: float = 0.0, l2: float = 0.0) -> Tensor:
        """Add `l1 * sum(|p|) + l2 * sum(p**2)` over all trained parameters to the loss of the coming step.

        The way to such a term at stage 3, where parameters are not whole outside their units. Call it once in a step,
        between its first forward and `step`, on every rank; it counts once, whatever the accumulation. Its gradient is
        in norm and clipping. Costs a pass over weights and gradients, and 2 bytes a parameter until the step where one
        rank without accumulation keeps gradients in bf16.

        Returns
        -------
        Tensor
            Its value, 0-dim fp32 on the device, without a graph: for logs.
        """
        self._alive()
        if self.in_backward is not None:
            raise self.in_backward.refusal("`penalty`", "would add to gradients that are applied as they land")
        return self.update.penalty.add(l1, l2)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip this step's gradients to a global L2 norm, instead of the config's, and return the norm before that.

        Returns
        -------
        Tensor
            0-dim fp32, on the device: `grad_norm`.
        """
        self._alive()
        if self.in_backward is not None:
            raise self.in_backward.refusal("`clip_grad_norm_`", "comes after the gradients were applied")
        if norm_type != 2.0:
            raise ZplanError(f"`clip_grad_norm_` with norm_type {norm_type}", "only the L2 norm (2.0) is built")
        if max_norm is None or not max_norm >= 0:
            raise ZplanError(
                f"`clip_grad_norm_` with a largest norm of {max_norm}", "give a number; `inf` tells the norm alone"
            )
        if not self.is_gradient_accumulation_boundary():
            raise ZplanError(
                f"`clip_grad_norm_` after {self.reducer.micro_step} of {self.choice.accumulation} micro-steps",
                "call it right before the step that is applied (`engine.is_gradient_accumulation_boundary()`)",
            )
        self.update.measure(clip=max_norm)
        return self.grad_norm

    def reset_step(self) -> None:
        """Forget the gradients of an unfinished step, after an error that was caught. Every rank must call it.

        With `optimizer_in_backward` that is an error once backward has updated something: the way out is a checkpoint.
        """
        if self.in_backward is not None:
            self.in_backward.agree()
        self._forget()
        self._alive()

    def _forget(self) -> None:
        self.sentinels.hide()
        self.hooks.forward.stop()
        self.hooks.backward.reset()
        self.update.penalty.forget()
        self.optimizer.finish()
        self.reducer.abandon()
        for unit in self.units:
            self.gatherer.release(unit, spent=False)

    # --- whole views -----------------------------------------------------------------------------------------------

    def summon(
        self,
        module: nn.Module | None = None,
        *,
        grads: bool = False,
        optim: bool = False,
        write: bool = False,
        timeout_s: float = 60.0,
    ) -> AbstractContextManager[Whole]:
        """Whole parameters of `module` (the whole model by default) while inside. Every rank must enter.

        Parameters
        ----------
        grads, optim
            Give whole gradients and moments too, as fp32 tensors by parameter name.
        write
            Keep what is written to any of these: every rank must write the same values. Without it changed parameters
            are an error.
        timeout_s
            How long to wait for the other ranks before saying which is missing.
        """
        self._settled()
        check_own(self.module, self.units)
        if grads and self.in_backward is not None:
            raise self.in_backward.refusal("`summon(grads=True)`", "finds no gradients: they are applied as they land")
        return Summoned(self, module or self.module, grads=grads, optim=optim, write=write, timeout_s=timeout_s)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Refused outside `summon` where parameters are not whole."""
        refuse_unless_whole(self.units)
        return self.module.state_dict(*args, **kwargs)

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        *,
        overwrite: bool = False,
        keep: int | None = None,
        background: bool | None = None,
    ) -> Path:
        """Write a checkpoint between two steps. Every rank must call it.

        Parameters
        ----------
        save_dir
            Folder of all checkpoints of a run, on a file system that all nodes share.
        tag
            Name of this one; `global_step{N}` by default. One that exists is an error unless `overwrite`.
        client_state
            JSON values of the caller's own, given back by `load_checkpoint`.
        keep
            Delete all but the newest so many, after this one is safe.
        background
            Return when the states are copied to host memory, and write behind training; by default what the config's
            `saving` says, which must have made room for it. Errors are raised by the next save, by
            `wait_for_checkpoint` or by `close`.

        Returns
        -------
        Path
            Where the checkpoint lies, or will.
        """
        self._settled()
        if self.replicas is not None:
            self.replicas.look_back()
        return self.checkpoints.save(
            Path(save_dir), tag, client_state, overwrite=overwrite, keep=keep, background=background
        )

    def wait_for_checkpoint(self) -> None:
        """Until a save in the background is committed; raises what went wrong with it."""
        self.checkpoints.wait()

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        *,
        resume: Resume = "latest",
        weights_only: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Go on from a checkpoint, whatever world size, stage or precision wrote it. Every rank must call it.

        Parameters
        ----------
        tag
            Which one; by default `resume` decides.
        resume
            `latest`: what the file of that name names; that there is none is an error. `auto`: the newest checkpoint
            that is whole, saying which were skipped and why; a fresh start only where there is none at all.
        weights_only
            Leave moments, counters and random states as they are.

        Returns
        -------
        tuple
            Path of the checkpoint (None on a fresh start) and the client state.
        """
        self._alive(mending=True)
        broken = self.in_backward is not None and bool(self.in_backward.broken)
        if broken:
            self._forget()
        found = self.checkpoints.load(Path(load_dir), tag, resume=resume, weights_only=weights_only)
        if self.in_backward is not None and found[0] is not None and not weights_only:
            self.in_backward.mend()
        self.hooks.uses.open_early()
        if self.scheduler is not None:
            self.scheduler.count()
        return found

    def save_16bit_model(self, save_dir: str | os.PathLike[str]) -> Path:
        """Write a bf16 folder that transformers' `from_pretrained` loads. Every rank must call it, between two steps.

        Unit by unit, so that it costs one unit in the compute dtype; `save_dir` must not exist yet.
        """
        from zplan.runtime.hf_export import export_engine

        self._settled()
        export_engine(self, Path(save_dir))
        return Path(save_dir)

    # --- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove hooks, end this engine's groups, and the job if it started that. Parameters keep what they show."""
        if self.closed:
            return
        try:
            self.checkpoints.wait()
            if self.replicas is not None:
                self.replicas.look_back()
        finally:
            self.hooks.close()
            for handle in self.guards:
                handle.remove()
            self.collectives.watchdog.stop()
            if self.uncompile is not None:
                self.uncompile()
            if self.undo_deterministic is not None:
                self.undo_deterministic()
            self.sentinels.hide()
            if self in OPEN:
                OPEN.remove(self)
            self.closed, self.telling = True, None
            self.checkpoints.close()
            self.mesh.close()

    def _alive(self, *, mending: bool = False) -> None:
        """Raise where the engine was closed, or where only a checkpoint can help and this is not it."""
        if self.closed:
            raise ZplanError("this engine was closed", "call `zplan.initialize` again")
        if self.in_backward is not None and not mending:
            self.in_backward.check()

    def _settled(self) -> None:
        """As `_alive`, where the last step's outcome matters; waits until it is known."""
        self._alive()
        if self.in_backward is not None:
            self.in_backward.check_last_step(self.global_steps)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
