"""GPUs by name, this machine's GPUs through a stand-in nvidia-smi, and the overhead lines."""

import stat

import pytest

from zplan.planner.config import Choice
from zplan.planner.errors import ZplanError
from zplan.planner.hardware import Hardware, find_gpu, hardware_from, local_gpus, read_gpus
from zplan.planner.overhead import MEASURED, overhead_lines
from zplan.planner.units import GIB, MIB

H200_LINE = "0, GPU-aaaaaaaa, NVIDIA H200, 143771, 9.0"


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Puts an nvidia-smi that prints the given lines first on the path."""

    def install(*lines, status=0, sleep=0):
        path = tmp_path / "nvidia-smi"
        text = "\n".join(lines)
        path.write_text(f"#!/bin/sh\n[ {sleep} = 0 ] || exec sleep {sleep}\ncat <<'E'\n{text}\nE\nexit {status}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return install


def test_the_table_is_whole():
    rows = read_gpus()
    assert len(rows) == 54 and all(r.mem_bytes > 8 * GIB for r in rows)


@pytest.mark.parametrize(
    ("asked", "name", "mib"),
    [
        ("RTX 4090", "RTX 4090", 24564),
        ("rtx4090", "RTX 4090", 24564),
        ("4090", "RTX 4090", 24564),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 24564),
        ("H200", "H200 SXM 141GB", 143771),
        ("h100 sxm", "H100 SXM 80GB", 81559),
        ("A100 80GB", "A100 PCIe 80GB", 81920),
        ("L4", "L4", 23034),
        ("A10", "A10", 23028),
        ("T4", "T4", 15360),
        ("RTX 3080 12GB", "RTX 3080 12GB", 12288),
    ],
)
def test_a_gpu_by_name(asked, name, mib):
    gpu, notes = find_gpu(asked)
    assert (gpu.name, gpu.mem_bytes, notes) == (name, mib * MIB, ())


def test_every_name_of_the_table_finds_its_row():
    for row in read_gpus():
        assert find_gpu(row.name)[0] == row


def test_a_label_stands_in_where_no_total_is_known():
    gpu, notes = find_gpu("B100")
    assert gpu.mem_bytes == 192 * 10**9 and "label" in notes[0]
    assert "not an NVIDIA card" in find_gpu("MI300X")[1][0]


@pytest.mark.parametrize(
    ("asked", "said", "hint"),
    [
        ("A100", "could be A100 PCIe 40GB", "one of these"),
        ("RTX 3080", "could be RTX 3080 10GB, RTX 3080 12GB", "one of these"),
        ("RTX 4091", "unknown GPU `RTX 4091`", "did you mean `RTX 4090`?"),
        ("toaster", "unknown GPU `toaster`", "zplan gpus"),
        ("RTX 4090,H100 SXM 80GB", "names several GPUs", "cards of one kind: name the smallest"),
        ("", "unknown GPU", "zplan gpus"),
    ],
)
def test_names_that_mean_no_single_card(asked, said, hint):
    with pytest.raises(ZplanError) as caught:
        find_gpu(asked)
    assert said in caught.value.message and hint in caught.value.hint


def test_memory_given_overrides_the_table():
    assert hardware_from(gpus=8, gpu="RTX 4090", mem_bytes=20 * GIB).mem_bytes == 20 * GIB
    hw = hardware_from(gpus=8, gpu="RTX 4090", nodes=2)
    assert (hw.mem_bytes, hw.gpus_per_node) == (24564 * MIB, 4)
    assert hw.told() == "8 x RTX 4090, 23.99 GiB each, on 2 nodes"
    assert hardware_from(mem_bytes=GIB).world_size == 1


@pytest.mark.parametrize(("gpus", "nodes", "hint"), [(8, 3, "use 6 or 9"), (2, 3, "use 3")])
def test_gpus_are_the_total_over_all_nodes(gpus, nodes, hint):
    with pytest.raises(ZplanError) as caught:
        hardware_from(gpus=gpus, mem_bytes=GIB, nodes=nodes)
    assert caught.value.hint == hint


def test_this_machine_is_read(smi):
    smi(H200_LINE, H200_LINE.replace("0, GPU-a", "1, GPU-b"))
    hw = hardware_from()
    assert (hw.world_size, hw.gpu, hw.mem_bytes) == (2, "H200 SXM 141GB", 143771 * MIB)
    assert hw.compute_capability == "9.0" and "2 x NVIDIA H200" in hw.notes[0]
    assert hardware_from(gpus=8).world_size == 8


def test_cards_that_differ(smi):
    smi(H200_LINE, "1, GPU-b, NVIDIA Odd Card, 8000, 8.9")
    hw = hardware_from()
    assert (hw.gpu, hw.mem_bytes, hw.world_size) == ("NVIDIA Odd Card", 8000 * MIB, 2)
    assert "differ" in hw.notes[0]


@pytest.mark.parametrize(("visible", "count"), [("1", 1), ("0,1", 2), ("", 0), ("GPU-aaaa", 1), ("7", 0)])
def test_hidden_cards_do_not_count(smi, monkeypatch, visible, count):
    smi(H200_LINE, H200_LINE.replace("0, GPU-a", "1, GPU-b"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert len(local_gpus()) == count


@pytest.mark.parametrize("how", [{"status": 9}, {"sleep": 5}], ids=["fails", "hangs"])
def test_an_nvidia_smi_that_does_not_answer(smi, how):
    smi("garbage", **how)
    assert local_gpus() == []


def test_no_gpu_here(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ZplanError) as caught:
        hardware_from(gpus=8)
    assert "no NVIDIA GPU" in caught.value.message and "--mem" in caught.value.hint


PHASES = ("idle", "loss", "step")


def test_overheads_say_where_they_come_from():
    measured = overhead_lines(Hardware(2, 1, 143771 * MIB, "H200 SXM 141GB"), Choice(0, 2), PHASES)
    assert {x.id: x.nbytes // MIB for x in measured}["overhead.driver"] == 526
    assert all(x.note and x.kind == "overhead" for x in measured)
    other = overhead_lines(Hardware(2, 1, 24 * GIB), Choice(0, 2), PHASES)
    assert {x.source for x in other} == {"estimate"}
    assert all(span == (0, 2) for x in other for span in x.spans)


def test_one_rank_has_no_communicator_and_the_cpu_no_card():
    hw = Hardware(1, 1, 24 * GIB)
    assert not any("nccl" in x.id for x in overhead_lines(hw, Choice(0, 1), PHASES))
    assert any("nccl" in x.id for x in overhead_lines(hw, Choice(0, 2), PHASES))
    assert overhead_lines(hw, Choice(0, 2, device="cpu"), PHASES) == ()


@pytest.mark.parametrize(
    ("communicators", "choice"),
    [
        (0, Choice(3, 1)),
        (1, Choice(0, 2)),
        (2, Choice(3, 2)),
        (1, Choice(3, 2, transport="copies")),
        (1, Choice(3, 2, runtime="fsdp2")),
        (1, Choice(0, 1, runtime="deepspeed", tensor_parallel=2)),
        (3, Choice(3, 8, runtime="deepspeed", tensor_parallel=2, hpz=2)),
    ],
)
def test_communicators_are_counted(communicators, choice):
    for hw in (Hardware(8, 1, 24 * GIB), Hardware(8, 1, 143771 * MIB, "H200 SXM 141GB")):
        lines = [x for x in overhead_lines(hw, choice, PHASES) if "nccl" in x.id]
        assert sum(x.instances for x in lines) == communicators


def test_measured_cards_are_in_the_table():
    names = {r.name for r in read_gpus()}
    assert set(MEASURED) <= names


def test_workspaces_follow_the_card():
    def workspace(capability):
        lines = overhead_lines(Hardware(1, 1, GIB, "card", None, capability), Choice(0, 1), PHASES)
        return next(x for x in lines if x.id == "overhead.cublas")

    assert (workspace("8.9").nbytes, workspace("9.0").nbytes, workspace("").nbytes) == (9 * MIB, 32 * MIB, 32 * MIB)
    assert workspace("8.9").instances == 2
