"""What is refused before any rank starts, with the numbers and the way out."""

import pytest

from zplan.planner.errors import ZplanError
from zplan.planner.ledger import Ledger, Line
from zplan.runtime import preflight
from zplan.runtime.preflight import check_host_memory, check_world, limit_device_memory

GIB = 2**30


def test_a_plan_for_another_number_of_gpus_names_the_command_for_this_one():
    with pytest.raises(ZplanError, match="the plan is for 8 ranks and this machine has 1 GPU .hint") as caught:
        check_world(8, 1, "zplan plan --gpus 1 -o p.json")
    assert caught.value.hint == "plan for this machine: zplan plan --gpus 1 -o p.json"
    with pytest.raises(ZplanError, match="for 2 ranks and this machine has 4 GPUs") as caught:
        check_world(2, 4, "zplan plan --gpus 4 -o p.json")
    assert caught.value.hint.endswith("or show it 2 of them with CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(("world_size", "gpus"), [(4, 4), (4, 0)])
def test_as_many_gpus_as_ranks_or_none_at_all_is_fine(world_size, gpus):
    check_world(world_size, gpus, "")


def test_host_memory_counts_every_rank_and_its_process():
    check_host_memory(4, 2 * GIB, available=10 * GIB, base=GIB // 2)
    with pytest.raises(ZplanError, match="4 ranks need 10.00 GiB of host memory and 9.99 GiB is available: each takes"):
        check_host_memory(4, 2 * GIB, available=10 * GIB - 2**23, base=GIB // 2)


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [("1000", "400", 600), ("max", "400", 5000), ("9000", "10", 5000), (None, None, 5000)],
)
def test_a_container_s_limit_counts(tmp_path, monkeypatch, limit, used, expected):
    import psutil

    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 5000})())
    monkeypatch.setattr(preflight, "CGROUP", tmp_path)
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text(used + "\n")
    assert preflight.available_host_bytes() == expected


def test_a_process_with_torch_is_measured():
    assert 2**24 < preflight.process_bytes() < 2**33


def test_no_torch_is_one_sentence(monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ZplanError, match="needs torch, which is not installed") as caught:
        preflight.require_torch()
    assert "zplan[runtime]" in caught.value.hint


def test_zplan_device_hides_gpus(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("ZPLAN_DEVICE", raising=False)
    assert preflight.num_gpus() == 3
    monkeypatch.setenv("ZPLAN_DEVICE", "cpu")
    assert preflight.num_gpus() == 0


class FakeCuda:
    """Stands for `torch.cuda` where there is no GPU."""

    def __init__(self, free: int, total: int) -> None:
        self.free, self.total, self.fraction = free, total, None

    def mem_get_info(self, device):
        return self.free, self.total

    def get_device_properties(self, device):
        return type("Properties", (), {"total_memory": self.total})()

    def set_per_process_memory_fraction(self, fraction, device):
        self.fraction = fraction


@pytest.fixture
def ledger():
    def line(name, nbytes, kind):
        return Line(name, nbytes, ((0, 0),), kind)

    return Ledger(
        ("idle",),
        (
            line("params.flat.block", 10 * GIB, "states"),
            line("overhead.driver", GIB // 2, "overhead"),
            line("overhead.context", GIB // 2, "overhead"),
            line("overhead.nccl", GIB, "overhead"),
            line("overhead.cublas", GIB, "overhead"),
        ),
    )


def fake_cuda(monkeypatch, free, total):
    import torch

    cuda = FakeCuda(free, total)
    for name in ("mem_get_info", "get_device_properties", "set_per_process_memory_fraction"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    return cuda, torch.device("cuda", 3)


def test_device_memory_leaves_out_what_is_there_already(monkeypatch, ledger):
    _, device = fake_cuda(monkeypatch, 12 * GIB, 24 * GIB)
    preflight.check_device_memory(ledger, device)
    _, device = fake_cuda(monkeypatch, 12 * GIB - 2**23, 24 * GIB)
    with pytest.raises(ZplanError, match="GPU 3 has 11.99 GiB of 24.00 GiB free and the plan's peak needs 12.00 GiB"):
        preflight.check_device_memory(ledger, device)


def test_cap_leaves_the_allocator_the_card_less_what_lies_beside_it(monkeypatch, ledger):
    cuda, device = fake_cuda(monkeypatch, 0, 80 * GIB)
    limit_device_memory(24 * GIB, ledger, device)
    assert cuda.fraction == 22 / 80
    for wrong in (GIB, 81 * GIB):
        with pytest.raises(ZplanError, match="is not between the 2.00 GiB .* and the 80.00 GiB of this card"):
            limit_device_memory(wrong, ledger, device)
