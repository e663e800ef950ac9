"""How fast a card and what is around it are: from our table, from measurements on a named machine, or assumed.

[Note: efficiency] Matrix products in a training step do not reach a card's peak, nor what a single large product
reaches. `EFFICIENCY` is the share of the peak that they do reach. These shares are the only numbers here that come from
whole training steps: that of Hopper from zplan's own runs of a 1.3B and a 7B model on two H200s
(`docs/benchmarks/runtime_h200x2_202611.md`), that of the A100 from published runs of FSDP (MosaicML's llm-foundry,
MPT 7B and 30B). Fused attention reaches what FlashAttention-2 is published to reach: 35 % on H100 (FlashAttention-3
paper), 50 to 73 % on A100 (its own). Everything else follows from the ops, from vendors' figures, or from a machine's
own ceilings. `docs/planner.md` says how far off predictions are, on runs that were not used too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zplan.planner.config import Precision
from zplan.planner.hardware import Gpu, Hardware, find_gpu

GB = 10**9

EFFICIENCY, ATTENTION = 0.5, 0.35
"""Shares of the dense peak that matrix products and fused attention reach in a step. See [Note: efficiency]."""

BY_CAPABILITY = {"8.0": (0.7, 0.5)}
"""The same for other compute capabilities."""

PASSES = 3
"""Times that memory is read or written for each byte an elementwise op writes: two operands, one result."""

HBM_SHARE = 0.89
"""Of a vendor's memory bandwidth: what a device copy reaches on an H200, 4,284 of 4,800 GB/s."""

NVLINK_SHARE = 0.59
"""Of one direction of a vendor's NVLink figure: what NCCL reaches between two H200s, 267 of 450 GB/s."""

PCIE_SHARE = 0.88
"""Of a vendor's PCIe figure: what pinned copies reach on an H200's host, 55.3 of 63 GB/s."""

PEER_SHARE = 0.5
"""Of PCIe, between cards without NVLink: through host memory, assumed."""


@dataclass(frozen=True)
class Speeds:
    """Rates of one GPU and its share of the machine. Rates in operations or bytes a second, times in seconds."""

    peak_flops: float
    """Dense, in the compute dtype, as the vendor states it."""
    efficiency: float
    """Share of `peak_flops` that matrix products reach; see [Note: efficiency]."""
    attention: float
    """Share that fused attention reaches."""
    hbm: float
    """Bytes read plus written by a device copy."""
    intra: float
    """Bytes that a rank sends in a collective within a node."""
    network: float
    """Bytes that a node sends, over all its network cards."""
    pcie: float
    """Between pinned host memory and one GPU, each way."""
    host: float
    """Bytes that the host's optimizer step reads plus writes, for a whole node."""
    disk_read: float
    disk_write: float
    """Of a node."""
    call: float = 35e-6
    """Of one collective, however small: two H200s take 42 microseconds for 2 MiB and 163 for 32."""
    hop: float = 1e-6
    """Each rank that a ring passes within a node; assumed."""
    far_hop: float = 5e-6
    """Each node that a ring passes; assumed."""
    assumed: tuple[str, ...] = ()
    """Which of these were not measured on this card, in words."""


_H200 = Speeds(
    peak_flops=989e12,
    efficiency=EFFICIENCY,
    attention=ATTENTION,
    hbm=4283.6e9,
    intra=266.9e9,
    network=8 * 50e9,
    pcie=55.3e9,
    host=106.1e9,
    disk_read=1.81e9,
    disk_write=3.03e9,
)
MEASURED = {"H200 SXM 141GB": _H200}
"""Ceilings of a machine with two H200s: torch 2.11, NCCL over NVLink, 16 host cores, 2026-11."""


def speeds(
    hardware: Hardware, precision: Precision, *, efficiency: float | None = None, network: int | None = None
) -> Speeds | None:
    """Speeds of a machine; None where no card is named or its peak is not known.

    Parameters
    ----------
    hardware
        Its card's name is looked up in the GPU table.
    precision
        Of compute. The table has no peak of plain fp32, so there is none for it.
    efficiency
        Instead of `EFFICIENCY`; attention reaches no more than that.
    network
        Bytes a second that a node sends, instead of what is assumed for its kind.
    """
    if hardware.gpu is None or hardware.gpu == "CPU rank":
        return None
    from zplan.planner.errors import ZplanError

    try:
        gpu, _ = find_gpu(hardware.gpu)
    except ZplanError:
        return None  # A card that only this machine's driver knows.
    peak = {"bf16": gpu.bf16_tflops, "fp16": gpu.fp16_tflops, "fp32": None}[precision]
    if not peak or not gpu.hbm_gb_s:
        return None
    found = MEASURED.get(gpu.name) or _from_table(gpu, hardware)
    products, attention = BY_CAPABILITY.get(gpu.compute_capability, (EFFICIENCY, ATTENTION))
    products = efficiency or products
    found = replace(found, peak_flops=peak * 1e12, efficiency=products, attention=min(attention, products))
    if network is not None:
        return replace(found, network=float(network))
    near = _per_node(gpu, hardware)
    told = f"network of {near / GB:g} GB/s a node" if hardware.nodes > 1 else ""
    return replace(found, network=near, assumed=(*found.assumed, *((told,) if told else ())))


def _from_table(gpu: Gpu, hardware: Hardware) -> Speeds:
    """Vendors' figures times what an H200 reaches of its own."""
    assert gpu.hbm_gb_s is not None
    pcie = (gpu.pcie_gb_s or 31.5) * GB
    bridged = "SXM" not in gpu.name and gpu.nvlink_gb_s and hardware.gpus_per_node > 2
    nvlink = 0.0 if bridged else gpu.nvlink_gb_s or 0.0
    intra = NVLINK_SHARE * nvlink / 2 * GB if nvlink else PEER_SHARE * pcie
    way = "NVLink" if nvlink else "PCIe"
    return replace(
        _H200,
        hbm=HBM_SHARE * gpu.hbm_gb_s * GB,
        intra=intra,
        pcie=PCIE_SHARE * pcie,
        host=100 * GB,
        disk_read=2 * GB,
        disk_write=2 * GB,
        assumed=(f"{way} at {intra / GB:.0f} GB/s", "the shares of its peaks that an H200 reaches of its own"),
    )


def _per_node(gpu: Gpu, hardware: Hardware) -> float:
    """Network of a node: one 400 Gbit/s card for each GPU of Hopper or later on NVLink, 200 of those before; else one
    of 100 Gbit/s for the node.
    """
    if not gpu.nvlink_gb_s or gpu.nvlink_gb_s < 300:
        return 12.5 * GB
    each = 50 if not gpu.compute_capability[:1].isdigit() or float(gpu.compute_capability) >= 9 else 25
    return hardware.gpus_per_node * each * GB
