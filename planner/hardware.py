"""GPUs and nodes: our table, this machine's own GPUs, and what is asked for. Never torch."""

from __future__ import annotations

import os
import re
from functools import cache
from typing import NamedTuple

from zplan.planner.errors import ZplanError, did_you_mean
from zplan.planner.units import MIB, format_bytes, format_gib

AMPERE = 8.0
"""Compute capability from which cards compute in bf16 and have flash attention."""
DATA = os.path.join(os.path.dirname(__file__), "data")


class Gpu(NamedTuple):
    """One row of the GPU table, as far as planning memory goes."""

    name: str
    vendor: str
    device_name: str
    """What the driver calls it; may be empty."""
    mem_bytes: int
    """What the vendor's tool reports as the total, else the size on the label in 10^9 bytes."""
    mem_reported: bool
    compute_capability: str
    bf16_tflops: float | None = None
    """Dense peaks, 10^12 a second; None where not supported or not known."""
    fp16_tflops: float | None = None
    hbm_gb_s: float | None = None
    nvlink_gb_s: float | None = None
    """Both directions together; 0 for none."""
    pcie_gb_s: float | None = None
    """One direction."""


NVLINK_TO_ALL = 300.0
"""GB/s. Cards below it have bridges between two GPUs at best; from it on, boards join all GPUs of a node."""


class Hardware(NamedTuple):
    """The machines of one job."""

    world_size: int
    """GPUs over all nodes."""
    nodes: int
    mem_bytes: int
    """Total per GPU, the driver's own share included."""
    gpu: str | None = None
    """Name in our table, or the driver's name; None when only the memory is known."""
    host_mem_bytes: int | None = None
    """Per node; None when not given."""
    compute_capability: str = ""
    notes: tuple[str, ...] = ()
    nvme_bytes: int | None = None
    """Per node; None when not given."""
    nvlink: bool = False
    """Whether NVLink joins all GPUs of a node."""

    @property
    def bf16(self) -> bool:
        """Whether its cards compute in bf16: NVIDIA's from Ampere on; a card of which nothing is known passes."""
        return not self.compute_capability[:1].isdigit() or float(self.compute_capability) >= AMPERE

    @property
    def flash(self) -> bool:
        """Whether torch's flash attention runs on them: from Ampere on too (torch 2.11, `sdp_utils.cpp`)."""
        return self.bf16

    @property
    def cudnn_width(self) -> int:
        """Widest heads for which torch tries cuDNN's fused attention before its own, 0 where it does not.

        Compute capabilities 9.0 and 10.0 (torch 2.11, `sdp_utils.cpp`: `check_prefer_cudnn_attention`).
        """
        return {"9.0": 256, "10.0": 128}.get(self.compute_capability, 0)

    @property
    def gpus_per_node(self) -> int:
        return self.world_size // self.nodes

    def told(self) -> str:
        """In words: `8 x RTX 4090, 23.99 GiB each, 1 node`."""
        what = f"x {self.gpu}" if self.gpu else ("GPU" if self.world_size == 1 else "GPUs")
        mem = f"{format_gib(self.mem_bytes)} GiB" + (" each" if self.world_size > 1 else "")
        return f"{self.world_size} {what}, {mem}" + (f", on {self.nodes} nodes" if self.nodes > 1 else "")


def read_gpus() -> list[Gpu]:
    """The GPU table."""
    return list(_gpu_table())


@cache
def _gpu_table() -> tuple[Gpu, ...]:
    import csv

    with open(os.path.join(DATA, "gpus.csv"), encoding="utf-8", newline="") as f:
        return tuple(
            Gpu(
                name=row["name"],
                vendor=row["vendor"],
                device_name=row["device_name"],
                mem_bytes=int(row["total_mib"]) * MIB if row["total_mib"] else int(row["nominal_gb"]) * 10**9,
                mem_reported=bool(row["total_mib"]),
                compute_capability=row["compute_capability"],
                bf16_tflops=_number(row["bf16_dense_tflops"]),
                fp16_tflops=_number(row["fp16_dense_tflops"]),
                hbm_gb_s=_number(row["hbm_gb_s"]),
                nvlink_gb_s=_number(row["nvlink_gb_s"]),
                pcie_gb_s=_number(row["pcie_gb_s"]),
            )
            for row in csv.DictReader(f)
        )


def _number(cell: str) -> float | None:
    return float(cell) if cell else None


def _words(name: str) -> frozenset[str]:
    """Letters and digits of a name as a set, so that `RTX4090`, `rtx 4090` and `GeForce RTX 4090` can meet."""
    return frozenset(re.findall(r"[a-z]+|\d+", name.lower())) - {"nvidia", "geforce", "tesla", "amd", "instinct"}


def find_gpu(name: str) -> tuple[Gpu, tuple[str, ...]]:
    """The row a name means, and notes.

    An exact name wins; else the rows that hold all its words, as long as they agree on the memory.
    """
    rows = read_gpus()
    wanted = _words(name)
    exact = [r for r in rows if wanted == _words(r.name)] or [r for r in rows if wanted == _words(r.device_name)]
    loose = [r for r in rows if wanted <= _words(r.name) | _words(r.device_name)]
    found = (exact or loose) if wanted else []
    if not found and any(mark in name for mark in ",+;"):
        raise ZplanError(f"`--gpu {name}` names several GPUs", "zplan plans for cards of one kind: name the smallest")
    if not found:
        near = did_you_mean(name.lower(), [r.name.lower() for r in rows])
        if near:
            near = next(near.replace(r.name.lower(), r.name) for r in rows if f"`{r.name.lower()}`" in near)
        raise ZplanError(f"unknown GPU `{name}`", near or "`zplan gpus` lists them; or give its memory with --mem")
    if len({r.mem_bytes for r in found}) > 1:
        raise ZplanError(f"`{name}` could be {', '.join(r.name for r in found)}", "give one of these names")
    gpu, notes = found[0], []
    if not gpu.mem_reported:
        notes.append(f"no reported total is known for {gpu.name}: its label is taken, {format_bytes(gpu.mem_bytes)}")
    if gpu.vendor != "NVIDIA":
        notes.append(f"{gpu.name} is not an NVIDIA card: activations and overheads are those of CUDA")
    return gpu, tuple(notes)


def local_gpus() -> list[Gpu]:
    """NVIDIA GPUs of this machine as nvidia-smi tells them, those that CUDA_VISIBLE_DEVICES hides left out."""
    import subprocess

    query = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=2, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = []
    for line in done.stdout.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 5 and cells[3].isdigit() and _is_visible(cells[0], cells[1], visible):
            found.append(
                Gpu(cells[2], "NVIDIA", cells[2], int(cells[3]) * MIB, mem_reported=True, compute_capability=cells[4])
            )
    return found


def _is_visible(index: str, uuid: str, visible: str | None) -> bool:
    if visible is None:
        return True
    return any(v.strip() == index or (len(v.strip()) > 4 and uuid.startswith(v.strip())) for v in visible.split(","))


def hardware_from(
    *,
    gpus: int | None = None,
    mem_bytes: int | None = None,
    gpu: str | None = None,
    nodes: int = 1,
    host_mem_bytes: int | None = None,
    nvme_bytes: int | None = None,
    device: str = "cuda",
) -> Hardware:
    """The hardware that was asked for; what is left out is read from this machine.

    Parameters
    ----------
    gpus
        Total over all nodes. Left out: one when a card is described, else this machine's GPUs.
    mem_bytes
        Per GPU. Left out: what the table says of `gpu`, else what this machine's GPUs report.
    gpu
        Name in the table.
    nodes
        Machines; they hold equally many GPUs.
    host_mem_bytes, nvme_bytes
        Per node.
    device
        On `cpu` a "GPU" is a rank and its memory an equal share of this machine's, unless given.
    """
    notes: tuple[str, ...] = ()
    name, capability, links = gpu, "", 0.0
    if gpu is not None:
        row, notes = find_gpu(gpu)
        name, capability, links = row.name, row.compute_capability, _links(row)
        mem_bytes = mem_bytes or row.mem_bytes
    elif device == "cpu":
        gpus, name = gpus or 1, "CPU rank"
        mem_bytes = mem_bytes or host_memory() // max(1, gpus // nodes)
    elif mem_bytes is None:
        here, count, notes = _this_machine()
        name, capability, mem_bytes = here.name, here.compute_capability, here.mem_bytes
        links = here.nvlink_gb_s or 0.0
        gpus = gpus or count
    if gpus is None:
        gpus, notes = 1, (*notes, "--gpus is not given: one GPU")
    if gpus % nodes:
        fewer = gpus // nodes * nodes
        raise ZplanError(
            f"--gpus {gpus} is the total and does not split over --nodes {nodes}",
            f"use {f'{fewer} or ' if fewer else ''}{fewer + nodes}",
        )
    assert mem_bytes is not None
    nvlink = links >= NVLINK_TO_ALL
    return Hardware(gpus, nodes, mem_bytes, name, host_mem_bytes, capability, notes, nvme_bytes, nvlink)


def _links(row: Gpu) -> float:
    """NVLink of a row, for boards that join all GPUs of a node: PCIe cards have bridges between two at best."""
    return (
        row.nvlink_gb_s or 0.0 if row.vendor == "NVIDIA" and "PCIe" not in row.name and "NVL" not in row.name else 0.0
    )


def host_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _this_machine() -> tuple[Gpu, int, tuple[str, ...]]:
    """The smallest GPU here, under its name in the table where it is known; how many there are; notes."""
    found = local_gpus()
    if not found:
        raise ZplanError("no NVIDIA GPU was found on this machine", 'give --gpus 8 --mem 24, or --gpu "RTX 4090"')
    least = min(found, key=lambda g: g.mem_bytes)
    notes = (f"read from this machine: {len(found)} x {least.device_name}",)
    if len({(g.device_name, g.mem_bytes) for g in found}) > 1:
        notes = (f"this machine's {len(found)} GPUs differ: the smallest, {least.device_name}, stands for all",)
    row = next((r for r in read_gpus() if r.device_name == least.device_name), None)
    links = _links(row) if row else 0.0
    return least._replace(name=row.name if row else least.device_name, nvlink_gb_s=links), len(found), notes
