"""Offload in the planner: where each byte goes, that none is lost, and that nothing offloaded is run by mistake."""

import json
from dataclasses import replace

import pytest
import workload as w
from hypothesis import given, settings
from hypothesis import strategies as st

import zplan
from zplan.planner.answer import DoesNotFit
from zplan.planner.config import Choice, Offload
from zplan.planner.errors import ZplanError
from zplan.planner.folding import by_part, fold, foldable
from zplan.planner.models import ModelSpec, decoder_units
from zplan.planner.offload import SECTOR, offloaded
from zplan.planner.optimizers import kind_of
from zplan.planner.placement import place
from zplan.planner.plan_file import load_plan, save_plan
from zplan.planner.predict import predict
from zplan.planner.runnable import limits
from zplan.planner.units import GIB

DEEP = replace(w.LLAMA, layers=12)
SPEC = ModelSpec("deep", decoder_units(DEEP), DEEP)
CPU, NVME = Offload("cpu"), Offload("nvme")
BOTH, BOTH_NVME = Offload("cpu", "cpu"), Offload("nvme", "nvme")
STATES = ("optim.master", "optim.exp_avg", "optim.exp_avg_sq")


def choose(stage=3, world_size=4, offload=CPU, **more) -> Choice:
    return Choice(stage, world_size, seq=16, offload=offload, **more)


def total(ledger, ids, tier) -> int:
    """Bytes of all lines of a tier whose id starts with one of `ids`."""
    return sum(x.total_bytes for x in ledger.lines if x.tier == tier and x.id.startswith(ids))


choices = st.builds(
    choose,
    stage=st.integers(0, 3),
    world_size=st.sampled_from([1, 2, 4, 8]),
    offload=st.builds(
        Offload, st.sampled_from(["cpu", "nvme"]), st.sampled_from(["none", "cpu", "nvme"]), st.floats(0.01, 1)
    ),
    accumulation=st.integers(1, 3),
    precision=st.sampled_from(["bf16", "fp32"]),
    optimizer=st.sampled_from(["adamw", "adamw-bf16"]),
).map(lambda c: replace(c, offload=replace(c.offload, params=c.offload.params if c.stage == 3 else "none")))


@settings(max_examples=60)
@given(choices)
def test_no_state_is_lost_and_none_is_held_twice(choice):
    """Masters, moments and gradients of every unit lie in exactly one memory, at their size of before."""
    there, before = predict(SPEC, choice), predict(SPEC, replace(choice, offload=Offload()))
    place_of = "pinned" if choice.offload.optimizer == "cpu" else "nvme"
    placements = place(SPEC, choice)
    moved = {p.unit.name for p in offloaded(placements, choice.offload)}
    owned = {p.unit.name: p.owned_numel for p in placements}
    away = sum(owned[name] for name in moved)
    kind = kind_of(choice.optimizer)
    for state in kind.states:
        name, size = f"optim.{state.name}.", state.itemsize
        assert total(there, name, "device") == size * (sum(owned.values()) - away)
        assert size * away <= total(there, name, place_of) <= size * away + SECTOR * len(moved)
    assert total(there, "grads.host.", "pinned") == 4 * away
    assert_stepped_on_once(there, placements, moved, choice)
    gradients = ("grads.shard.", "grads.full.")
    assert (total(there, gradients, "device") == 0) == (len(moved) == len(placements))
    if moved and choice.offload.params == "none":  # else a ring on one rank takes masters that it did without
        stayed = sum(owned.values()) - away
        whole = 2 * stayed if total(before, "optim.master_low.", "device") else 0  # what stays has masters in one piece
        assert total(there, "optim.", "device") - whole < total(before, "optim.", "device")
    assert {x.source for x in there.lines if x.tier in ("pinned", "nvme")} <= {"estimate"}


def assert_stepped_on_once(ledger, placements, moved, choice):
    """What the host steps on lies where the moments do: masters, or without them shards or copies, once a unit."""
    place_of = "pinned" if choice.offload.optimizer == "cpu" else "nvme"
    masters = kind_of(choice.optimizer).master
    size = 4 if masters else choice.itemsize
    away = size * sum(p.owned_numel for p in placements if p.unit.name in moved)
    stepped = ["optim.master.", "optim.weights."]
    if not masters and choice.offload.params == choice.offload.optimizer:
        stepped.append("params.shard.")
    assert away <= sum(total(ledger, x, place_of) for x in stepped) <= away + SECTOR * len(moved)
    if choice.offload.params != "none" and len(moved) == len(placements):
        assert not total(ledger, "params.shard.", "device")


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-bf16"])
def test_offloaded_shards_leave_the_card_with_and_without_masters(optimizer):
    """Llama 3.1 70B over 8 GPUs: what is left of the parameters is the ring and the final norm."""
    more = {"stage": 3, "offload": "cpu", "offload_params": "cpu", "optimizer": optimizer}
    e = zplan.estimate("llama-3.1-70b", gpus=8, mem=24, **more)
    numel = e.model.num_params
    assert not total(e.row.ledger, "params.shard.", "device")
    shards = total(e.row.ledger, "params.shard.", "pinned")
    assert 2 * numel // 8 * 0.999 < shards <= 2 * -(-numel // 8)
    assert total(e.row.ledger, "params.", "device") < 5 * 10**9


def test_without_masters_the_host_steps_on_the_shards_or_on_a_copy_of_them():
    """2 bytes a parameter either way where both lie on the host; a copy beside shards that stay on the card."""
    bf16 = {"optimizer": "adamw-bf16", "reduce_dtype": "bf16"}
    both, optimizer_only = predict(SPEC, choose(3, 4, BOTH, **bf16)), predict(SPEC, choose(3, 4, CPU, **bf16))
    owned = sum(p.owned_numel for p in place(SPEC, choose(3, 4, BOTH, **bf16)))
    states = ("optim.exp_avg", "optim.weights.", "params.shard.", "grads.host.")
    assert total(both, states, "pinned") == total(optimizer_only, states, "pinned") == 8 * owned
    assert total(optimizer_only, "params.shard.", "device") > 0 == total(both, "params.shard.", "device")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_textbook_rates_on_four_ranks(stage):
    """Device: weights 2 (a quarter at stage 3, beside the ring); host: master 4, moments 8, gradients 4, by rank."""
    ledger = predict(SPEC, choose(stage))
    padded = sum(p.layout.padded_numel for p in place(SPEC, choose(stage)))
    owned = padded if stage == 0 else padded // 4
    assert total(ledger, STATES, "pinned") == 12 * owned and total(ledger, "grads.host.", "pinned") == 4 * owned
    ringed = sum(p.layout.padded_numel for p in place(SPEC, choose(stage)) if p.ringed)
    shards, flat = total(ledger, "params.shard.", "device"), total(ledger, "params.flat.", "device")
    assert shards == 2 * ringed // 4 and flat == 2 * (padded - ringed)
    assert (ringed > 0) == (stage == 3)


@pytest.mark.parametrize(
    ("more", "rates"),
    [
        ({"offload": "cpu"}, {"pinned": 16}),
        ({"offload": "cpu", "offload_params": "cpu"}, {"pinned": 18}),
        ({"offload": "nvme", "offload_params": "cpu"}, {"nvme": 12, "pinned": 6}),
        ({"offload": "nvme", "offload_params": "nvme"}, {"nvme": 14, "pinned": 4}),
        ({"offload": "cpu", "optimizer": "adamw-bf16"}, {"pinned": 10}),
        ({"offload": "cpu", "offload_params": "cpu", "optimizer": "adamw-bf16"}, {"pinned": 10}),
    ],
)
def test_parameters_that_the_assumed_shape_lacks_are_counted_off_the_device_too(more, rates):
    """A count alone: what each memory holds of states and gradients is its rate times that count."""
    e = zplan.estimate(params=7e9, gpus=8, mem=24, stage=3, seq=128, checkpointing="full", **more)
    ids = ("optim.master", "optim.weights", "optim.exp_avg", "params.shard", "grads.host", "states.remainder")
    for tier, rate in rates.items():
        held = 8 * total(e.row.ledger, ids, tier)
        assert held == pytest.approx(rate * 7e9, rel=2e-5), tier
        assert total(e.row.ledger, "states.remainder", tier) > 0


def test_offloaded_parameters_leave_a_ring_on_one_gpu_too():
    alone = predict(SPEC, choose(3, 1, BOTH))
    assert total(alone, "params.ring.", "device") and not total(alone, "params.shard.", "device")
    blocks = [p for p in place(SPEC, choose(3, 1, BOTH)) if p.ringed]
    assert len(blocks) == 14, "twelve blocks, and embedding and head as guests"
    assert total(alone, "params.shard.", "pinned") == sum(2 * p.layout.padded_numel for p in blocks)
    optimizer_only = predict(SPEC, choose(3, 1, CPU))
    assert not total(optimizer_only, "params.ring.", "device")
    assert alone.peak_bytes() < optimizer_only.peak_bytes()


def test_nvme_takes_whole_sectors_and_needs_buffers_on_the_host():
    ledger = predict(SPEC, choose(offload=BOTH_NVME))
    files = [x for x in ledger.lines if x.tier == "nvme"]
    assert files and all(x.nbytes % SECTOR == 0 for x in files)
    assert {x.id.rpartition(".")[0] for x in files} == {*STATES, "params.shard"}
    largest = max(p.owned_numel for p in place(SPEC, choose()))
    states = next(x for x in ledger.lines if x.id == "offload.nvme.states")
    assert states.instances == 3 and states.nbytes >= 3 * 4 * largest
    assert next(x for x in ledger.lines if x.id == "offload.nvme.params").instances == choose().ring_slots + 1


def test_a_ratio_takes_the_first_units_up_to_it():
    placements = place(SPEC, choose())
    whole = sum(p.layout.numel for p in placements)
    for ratio in (0.05, 0.3, 0.5, 0.99, 1.0):
        moved = offloaded(placements, Offload("cpu", ratio=ratio))
        assert list(moved) == list(placements[: len(moved)])
        share = sum(p.layout.numel for p in moved) / whole
        rest = placements[len(moved)].layout.numel / whole if len(moved) < len(placements) else 0
        assert share <= ratio + 1e-9 < share + rest + 1e-9 or ratio == share == 1


@pytest.mark.parametrize("offload", [CPU, NVME, BOTH, BOTH_NVME])
@pytest.mark.parametrize(("stage", "world_size"), [(0, 1), (2, 4), (3, 1), (3, 4)])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_folded_models_give_the_whole_ledgers_sums(offload, stage, world_size, accumulation):
    if stage < 3:
        offload = replace(offload, params="none")
    choice = choose(stage, world_size, offload, accumulation=accumulation)
    assert foldable(choice) and not foldable(replace(choice, offload=replace(offload, ratio=0.5)))
    ledger = predict(SPEC, choice)
    found, whole = fold(SPEC, ring_slots=2).vectors(choice, lambda phases: ()), by_part(ledger.lines, ledger.phases)
    for part in ("host", "nvme"):
        assert max(found.get(part, [0])) == max(whole.get(part, [0])), part
    assert max(
        map(sum, zip(*(v for k, v in found.items() if k not in ("host", "nvme", "low", "high")), strict=True))
    ) == (ledger.peak_bytes())


def test_seven_billion_on_one_card_with_the_optimizer_on_the_host():
    e = zplan.estimate(params=7e9, gpus=1, mem=24, offload="cpu", host_mem=128)
    assert e.fits and e.estimate_only and "`--offload cpu`" in e.estimate_only[0]
    uses = {use.tier: use for use in e.tiers}
    assert 16 * 6.9e9 < uses["pinned"].nbytes < 16 * 7.2e9
    small = zplan.estimate(params=7e9, gpus=1, mem=24, offload="cpu", host_mem=64)
    assert not small.fits and "of host memory" in small.verdict.text
    disk = zplan.estimate(params=7e9, gpus=1, mem=24, offload="nvme", host_mem=64, nvme=60)
    assert not disk.fits and "of NVMe" in disk.verdict.text
    assert any(r.option == "--nvme 79" for r in disk.remedies)
    assert zplan.estimate(params=7e9, gpus=1, mem=24, offload="nvme", host_mem=64, nvme=100).fits


def test_parameters_off_the_device_mean_stage_3():
    e = zplan.estimate(params=7e9, gpus=2, mem=16, offload="cpu", offload_params="cpu")
    stage = next(d for d in e.decisions if d.name == "stage")
    assert (stage.value, stage.chosen, stage.reason) == (3, False, "asked by --offload-params")
    assert [r.choice.offload.params for r in e.rows] == ["none", "none", "none", "cpu"]


def test_offload_is_proposed_as_an_estimate_and_never_chosen():
    e = zplan.estimate(params=13e9, gpus=2, mem=24, host_mem=512)
    assert not e.fits and e.row.choice.offload == Offload()
    assert [r.estimate_only for r in e.remedies] == [False] * (len(e.remedies) - 1) + [True]
    last = e.remedies[-1]
    assert last.option == "--offload cpu"
    again = zplan.estimate(params=13e9, gpus=2, mem=24, host_mem=512, offload="cpu")
    assert again.fits and again.peak_bytes == last.peak_bytes
    with pytest.raises(DoesNotFit) as caught:
        zplan.plan(params=13e9, gpus=2, mem=24, host_mem=512)
    assert "offload" not in caught.value.hint
    assert "estimate only" in _report(e).split("--offload cpu)")[1].splitlines()[0]


def _report(e):
    from zplan.planner.report import report

    return report(e)


def test_what_no_offload_helps_is_told_with_the_way_out():
    e = zplan.estimate(params=1e12, gpus=64, mem=24)
    assert "Nor would it with every state offloaded" in e.verdict.text and "`params.ring.block`" in e.verdict.text
    assert "tensor parallelism" in e.verdict.text
    tight = zplan.estimate("llama-3-70b", gpus=8, mem=16, seq=8192)
    assert "Nor would it" in tight.verdict.text and "Use --seq " in tight.verdict.text
    seq = int(tight.verdict.text.split("Use --seq ")[1].split(",")[0])
    found = zplan.estimate("llama-3-70b", gpus=8, mem=16, seq=seq, offload="cpu", offload_params="cpu")
    assert found.fits
    assert "Nor would it" not in zplan.estimate(params=13e9, gpus=2, mem=24).verdict.text


def test_a_plan_keeps_it_and_only_a_run_refuses(tmp_path):
    made = zplan.plan(
        "smollm2-135m", gpus=2, mem=8, seq=64, offload="cpu", offload_params="nvme", offload_ratio=0.5, nvme=10
    )
    assert made.estimate_only and made.ds_config()["zero_optimization"]["offload_optimizer"] == {
        "device": "cpu",
        "ratio": 0.5,
    }
    path, _ = save_plan(made, tmp_path / "plan.json")
    again = load_plan(path)
    assert again == made and again.choice.offload == Offload("cpu", "nvme", 0.5)
    assert [x.key for x in limits(again.choice)] == ["--offload"]
    from zplan.planner.runnable import refuse_unrunnable

    with pytest.raises(ZplanError, match="`--offload cpu for 0.5 of the elements, parameters nvme` is estimate only"):
        refuse_unrunnable(again.choice, again.spec)


def test_an_engine_refuses_a_config_that_offloads():
    from zplan.runtime.initialize import initialize

    config = w.config(3)
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    with pytest.raises(ZplanError, match="`--offload cpu` is estimate only"):
        initialize(model=w.build(w.LLAMA), config=config, init=w.fill)


def test_a_config_says_the_same_as_options():
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/disk", "buffer_count": 4},
            "offload_param": {"device": "cpu", "pin_memory": True},
        },
    }
    by_config = zplan.estimate("gpt2", gpus=2, mem=8, config=config)
    by_option = zplan.estimate("gpt2", gpus=2, mem=8, stage=3, micro_batch=1, offload="nvme", offload_params="cpu")
    assert by_config.row.choice == by_option.row.choice
    assert any("`nvme_path`" in note for note in by_config.notes)
    assert json.loads(by_config.to_json())["estimate_only"]


def test_starting_holds_what_is_offloaded_on_the_host():
    e = zplan.estimate(params=7e9, gpus=1, mem=24, offload="cpu")
    start = next(a for a in e.activities if a.name == "initialise")
    assert start.ledger.per_phase("pinned")[-1] == e.row.ledger.peak_bytes("pinned")
    assert start.ledger.per_phase("pinned")[1] < GIB * 16, "unit by unit"
