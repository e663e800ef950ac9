"""What was asked and what was chosen, as frozen values. After parsing nobody reads flags, files or the environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["bf16", "fp16", "fp32"]
Checkpointing = Literal["none", "selective", "full"]
Attention = Literal["sdpa", "eager"]
Device = Literal["cuda", "cpu"]
Saving = Literal["foreground", "background"]
Reduce = Literal["exchange", "scatter"]
Transport = Literal["collectives", "copies"]
Runtime = Literal["zplan", "deepspeed", "fsdp2", "ddp"]
CrossEntropy = Literal["plain", "bf16", "chunked", "fused"]
Kernels = Literal["torch", "fused"]
Place = Literal["none", "cpu", "nvme"]

ITEMSIZE: dict[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of one parameter element in compute."""

DEFAULT_CLIP = 1.0
"""Largest gradient norm where a config does not say it, as in DeepSpeed since mid-2026."""


@dataclass(frozen=True)
class Offload:
    """What lies off the device between its uses."""

    optimizer: Place = "none"
    params: Place = "none"
    """Stage 3 only."""
    ratio: float = 1.0
    """Share of the elements that is offloaded, 0 to 1: the first units of the schedule up to that share."""

    def told(self) -> str:
        """In words: `none`, `cpu`, `cpu, parameters nvme`, `cpu for 0.5 of the elements`."""
        share = "" if self.ratio == 1 else f" for {self.ratio:g} of the elements"
        return f"{self.optimizer}{share}" + ("" if self.params == "none" else f", parameters {self.params}")


@dataclass(frozen=True)
class ZeroSizes:
    """DeepSpeed's own sizes, by the names of its config and with its defaults (0.19); elements unless said otherwise.

    zplan's runtime reads none of them.
    """

    reduce_bucket_size: int = 500_000_000
    overlap_comm: bool = True
    """Two buckets instead of one at stages 1 and 2. DeepSpeed's own default there is off; emitted configs say it."""
    stage3_prefetch_bucket_size: int = 50_000_000
    stage3_max_live_parameters: int = 1_000_000_000
    stage3_max_reuse_distance: int = 1_000_000_000
    stage3_param_persistence_threshold: int = 100_000
    sub_group_size: int = 1_000_000_000
    pin_memory: bool = True
    """Of what is offloaded."""
    optimizer_buffer_count: int = 4
    """`offload_optimizer.buffer_count`: pinned buffers of the largest sub-group that states on NVMe pass through."""
    param_buffer_count: int = 5
    """`offload_param.buffer_count`: pinned buffers of `param_buffer_size` that parameters on NVMe pass through."""
    param_buffer_size: int = 100_000_000
    param_max_in_cpu: int = 1_000_000_000
    """`offload_param.max_in_cpu`: of parameters on NVMe, so many of a rank's have room in host memory."""


@dataclass(frozen=True)
class Choice:
    """Everything that decides what one rank of a runtime allocates and when."""

    stage: int
    """ZeRO stage, 0 to 3."""
    world_size: int
    """Data-parallel ranks over all nodes."""
    micro_batch: int = 1
    """Sequences per rank and micro-step."""
    accumulation: int = 1
    """Micro-steps per optimizer step."""
    seq: int = 2048
    """Tokens per sequence."""
    precision: Precision = "bf16"
    """dtype of compute and of the gathered parameters; master weights, moments and reduction are fp32."""
    checkpointing: Checkpointing = "none"
    """`full`: every block keeps its input only and is run again in backward."""
    attention: Attention = "sdpa"
    ring_slots: int = 2
    """Stage 3: gathered blocks held at once."""
    piece_numel: int = 32 * 2**20
    """Elements; cap of one reduce (`reduce_bucket_size`): 128 MiB in fp32."""
    persist_numel: int = 0
    """Stage 3: units of fewer elements stay whole on every rank (`stage3_param_persistence_threshold`)."""
    device: Device = "cuda"
    """Whose op table the activations follow."""
    compile: bool = False
    """Each block's `forward` goes through `torch.compile`. It decides itself what backward is given, so the activation
    lines are then those of the uncompiled blocks, as an upper bound."""
    deterministic: bool = False
    """The same bits at every stage and in every run: gradients of each micro-step are exchanged and added up in rank
    order, and torch keeps to deterministic algorithms. See [Note: fixed order] in `planner/buffers.py`."""
    check_replicas_every: int = 0
    """Optimizer steps after which ranks compare hashes of what all must hold alike; 0 for never."""
    optimizer_in_backward: bool = False
    """Each unit is updated as soon as its gradients are reduced, so that those of one unit exist at a time. Needs
    accumulation 1, no clipping and no loss scale."""
    reduce: Reduce = "exchange"
    """`exchange`: gradients travel in the compute dtype and are added up in fp32 where they arrive. `scatter`: an fp32
    reduce-scatter. At stage 0, and at stage 1 with accumulation, whole fp32 gradients are reduced in place either way.
    """
    transport: Transport = "collectives"
    """`copies`: ring slots and the exchange's slot lie in memory that the GPUs of one host read from each other."""
    saving: Saving = "foreground"
    """`background`: checkpoints are copied to host memory first and written behind training."""
    runtime: Runtime = "zplan"
    """Whose buffers are counted."""
    optimizer: str = "adamw"
    """A name of the optimizer table."""
    reduce_dtype: Precision = "fp32"
    """dtype in which gradients are reduced and accumulated."""
    cross_entropy: CrossEntropy = "plain"
    cudnn_width: int = 0
    """Widest heads whose fused attention torch gives to cuDNN, where a model leaves the kernel to torch: a fact of the
    card (`Hardware.cudnn_width`)."""
    flash: bool = True
    """Whether fused attention in 16 bits may be flash attention, and not the memory-efficient kernel: a fact of the
    card (`Hardware.flash`)."""
    kernels: Kernels = "torch"
    """`fused`: norms, gates and rotary embeddings of the built-in decoder by kernels of zplan's own."""
    checkpoint_every: int = 1
    """Blocks in one checkpointed segment."""
    checkpoint_offload: bool = False
    """Inputs of checkpointed segments wait in host memory."""
    padded: bool = False
    """Sequences are padded to `seq` rather than packed: a mask says which tokens count, and attention takes it."""
    offload: Offload = Offload()
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    hpz: int = 1
    """Ranks of a secondary parameter shard (ZeRO++ hpZ); 1 for none."""
    zero: ZeroSizes = ZeroSizes()
    """Of DeepSpeed, where that is the runtime."""

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step over all ranks."""
        return self.micro_batch * self.accumulation * self.world_size

    @property
    def num_gpus(self) -> int:
        """Over all nodes: data-parallel ranks times those that share one copy of the model."""
        return self.world_size * self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.precision]

    @property
    def reduce_itemsize(self) -> int:
        """Bytes of one gradient element on the wire and in accumulation."""
        return ITEMSIZE[self.reduce_dtype]

    @property
    def copies(self) -> bool:
        """Whether GPUs read each other's buffers: on one GPU, or on CPUs, there is nobody to read from."""
        return self.transport == "copies" and self.world_size > 1 and self.device == "cuda"

    @property
    def communicators(self) -> int:
        """Of one rank: one an axis of parallelism, for all that DDP, FSDP2 or DeepSpeed send along it. zplan's gathers
        have another where they are collectives, as they would wait for reduces.
        """
        axes = self.world_size, self.tensor_parallel, self.pipeline_parallel, self.context_parallel, self.hpz
        apart = self.runtime == "zplan" and self.world_size > 1 and self.stage > 0 and not self.copies
        return sum(ranks > 1 for ranks in axes) + apart

    @property
    def sharded(self) -> bool:
        """Whether parameters live in shards between uses: stage 3 on more than one rank."""
        return self.stage == 3 and self.world_size > 1
