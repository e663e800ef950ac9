"""From a config and a mesh to the planner's `Choice`: what this process will allocate."""

from __future__ import annotations

from zplan.planner.config import Choice, Transport
from zplan.planner.deterministic import check_deterministic
from zplan.planner.dsconfig import TrainingConfig
from zplan.planner.errors import ZplanError
from zplan.planner.fused import check_compiled
from zplan.planner.runnable import refuse_unrunnable
from zplan.runtime.deterministic import check_workspace
from zplan.runtime.mesh import Mesh


def choice_of(training: TrainingConfig, mesh: Mesh) -> Choice:
    """The planner's `Choice` for what this process will allocate; refused where a key of it can't be run.

    `seq` stands for what the config says, else 0.
    """
    choice = Choice(
        stage=training.stage,
        world_size=mesh.world_size,
        micro_batch=training.micro_batch,
        accumulation=training.accumulation,
        seq=training.seq or 0,
        precision=training.precision,
        checkpointing=training.checkpointing,
        checkpoint_every=training.checkpoint_every,
        checkpoint_offload=training.checkpoint_offload,
        padded=training.padded,
        attention=training.attention,
        cross_entropy=training.cross_entropy,
        kernels=training.kernels,
        ring_slots=training.ring_slots,
        piece_numel=training.piece_numel,
        persist_numel=training.persist_numel,
        device="cuda" if mesh.device.type == "cuda" else "cpu",
        compile=training.compile,
        optimizer_in_backward=training.optimizer_in_backward,
        transport=_transport(training, mesh),
        deterministic=training.deterministic,
        check_replicas_every=training.check_replicas_every,
        reduce=training.reduce or ("exchange" if mesh.one_host or training.deterministic else "scatter"),
        saving=training.saving,
        optimizer=training.optimizer,
        reduce_dtype=training.reduce_dtype,
        offload=training.offload,
    )
    check_compiled(choice)
    check_deterministic(choice)
    if choice.deterministic:
        check_workspace(mesh.device)
    refuse_unrunnable(choice)
    return choice


def _transport(training: TrainingConfig, mesh: Mesh) -> Transport:
    """Copies where asked for, or where nothing is said and they work. Every rank must ask."""
    asked = training.transport
    if asked == "collectives" or mesh.world_size == 1 or mesh.pretended or mesh.device.type != "cuda":
        return "collectives"
    if mesh.reads_peers():
        return "copies"
    if asked == "copies":
        raise ZplanError(
            f"`transport` is `copies`, but not every one of the {mesh.world_size} GPUs can read the others' memory",
            'write `"transport": "collectives"`, or plan again for this machine',
        )
    return "collectives"
