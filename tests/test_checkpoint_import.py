"""DeepSpeed's checkpoint folders: every element arrives, training goes on as it would have, nothing pickled is run."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import deepspeed_folder as ds
import pytest
import torch
from torch import nn

from zplan import cli
from zplan.planner.errors import ZplanError
from zplan.runtime.checkpoint_format import ADAMW, WEIGHT
from zplan.runtime.checkpoint_read import Checkpoint
from zplan.runtime.ds_import import import_deepspeed
from zplan.runtime.ds_import_layout import sliced_parameters, whole_groups
from zplan.runtime.engine import Engine
from zplan.runtime.initialize import initialize

VOCAB, WIDTH, LR = 37, 10, 1e-3


class Net(nn.Module):
    """Odd sizes, a tied head and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.still = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = self.head(self.norm(x + self.still(x)))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.roll(-1, 1).flatten())


def net() -> Net:
    torch.manual_seed(5)
    return Net()


def sample(index: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (8,), generator=torch.Generator().manual_seed(index))


def content(**more: Any) -> ds.Content:
    """A run of `Net` with random moments."""
    torch.manual_seed(9)
    model = net()
    named = dict(model.named_parameters())
    trained = {n: p.detach().clone() for n, p in named.items() if p.requires_grad}
    return ds.Content(
        states={n: (p, torch.randn_like(p) * 1e-3, torch.rand_like(p) * 1e-5) for n, p in trained.items()},
        frozen={n: p.detach() for n, p in named.items() if not p.requires_grad},
        tied={"head.weight": "embed.weight"},
        **more,
    )


def same(path: Path, want: ds.Content) -> None:
    """Every element of every state is the one that went in."""
    with Checkpoint(path) as checkpoint:
        assert not list(checkpoint.verify())
        for name, values in want.states.items():
            for state, value in zip((WEIGHT, *ADAMW), values, strict=True):
                got = torch.from_numpy(checkpoint.whole(state, name, value.numel()).copy())
                assert torch.equal(got, value.reshape(-1)), (state, name)
        for name, value in want.frozen.items():
            got = torch.from_numpy(checkpoint.whole("frozen", name, value.numel()).copy())
            if want.dtype == torch.bfloat16:
                got = got.view(torch.bfloat16)
            assert torch.equal(got, value.to(want.dtype).reshape(-1)), name
        assert {p.name for p in checkpoint.manifest.parameters} == {*want.states, *want.frozen}


GROUPS = [["layers.0.weight", "layers.1.weight", "layers.2.weight", "embed.weight"]]
GROUPS.append(["norm.bias", "norm.weight", "layers.1.bias", "layers.0.bias", "layers.2.bias"])


@pytest.mark.parametrize("world_size", [1, 2, 3, 24])
@pytest.mark.parametrize(
    ("stage", "more"),
    [(1, {}), (2, {"align": 8}), (2, {"align": 16}), (3, {}), (3, {"sub_group": 40})],
    ids=["1", "2-align8", "2-align16", "3", "3-sub-groups"],
)
def test_every_element_arrives(tmp_path, stage, more, world_size):
    """Also with two groups in another order, and with more ranks than most parameters have elements."""
    for number, groups in enumerate(([], GROUPS)):
        want = content(groups=groups, dtype=torch.bfloat16 if number else torch.float32)
        source = ds.write(tmp_path / f"ds{number}", want, stage, world_size, **more)
        found = import_deepspeed(source, tmp_path / f"z{number}")
        same(found.path, want)
        m = found.manifest
        assert (m.global_step, m.applied_steps, m.global_samples, m.world_size) == (7, 7, 42, world_size)
        assert (m.lr, m.training["stage"], m.aliases) == (5e-4, stage, {"head.weight": "embed.weight"})


def test_what_else_moves_over(tmp_path):
    """Loss scale, what JSON can hold of the client state; and notes on the rest."""
    scaler = {"cur_scale": 4096.0, "cur_iter": 90, "last_overflow_iter": 60, "cur_hysteresis": 2, "dtype": torch.half}
    client = {"epoch": 3, "rows": torch.ones(2)}
    want = content(scaler=scaler, client_state=client, dtype=torch.float16, buffers={"seen": torch.ones(3)})
    found = import_deepspeed(ds.write(tmp_path / "ds", want, 2, 2), tmp_path / "z")
    assert found.manifest.loss_scale == (4096.0, 2.0, 30.0) and found.manifest.training["precision"] == "fp16"
    assert found.manifest.client_state == {"epoch": 3}
    assert any("`rows` stay behind" in n for n in found.notes) and any("`seen`, stay behind" in n for n in found.notes)


@pytest.mark.parametrize("kept", [("exp_avg",), ("momentum_buffer",), ("sum",), ()], ids=str)
@pytest.mark.parametrize("stage", [2, 3])
def test_moments_of_other_optimizers_arrive_by_their_names(tmp_path, kept, stage):
    """Lion, SGD with momentum, Adagrad, SGD. SGD counts no steps: those of the engine stand, less the skipped."""
    want = content()
    source = ds.write(tmp_path / "ds", want, stage, 2)
    inner = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    for path in (source / "global_step7").glob("*optim_states.pt"):
        with ds.deepspeed_names():
            raw = torch.load(path, weights_only=False)
            for group in raw["optimizer_state_dict"][inner]["state"].values():
                values, _ = group.pop("exp_avg"), (group.pop("exp_avg_sq"), group.pop("step"))
                group |= dict.fromkeys(kept, values)
            if not kept:
                raw["optimizer_state_dict"][inner]["state"] = {}  # as torch's SGD has it
            torch.save(raw, path)
    found = import_deepspeed(source, tmp_path / "z")
    assert found.manifest.applied_steps == 7
    with Checkpoint(found.path) as checkpoint:
        for p in checkpoint.manifest.parameters:
            assert p.frozen or p.moments == kept
            for state in () if p.frozen else kept:
                got = torch.from_numpy(checkpoint.whole(state, p.name, p.numel).copy())
                assert torch.equal(got, want.states[p.name][1].reshape(-1))


# --- going on --------------------------------------------------------------------------------------------------------


def start(stage: int, world_size: int, global_batch: int = 6) -> Engine:
    config = {
        "train_micro_batch_size_per_gpu": global_batch // world_size,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zplan": {"seq": 8},
    }
    return initialize(model=net(), config=config)[0]


def go(engine: Engine, steps: int) -> tuple[list[float], dict[str, Any]]:
    """Losses of this rank and all parameters in the end."""
    losses = []
    for _ in range(steps):
        first = engine.global_samples + engine.rank * engine.choice.micro_batch
        loss = engine(torch.stack([sample(first + i) for i in range(engine.choice.micro_batch)]))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    with engine.summon():
        return losses, {n: p.detach().clone().numpy() for n, p in engine.module.named_parameters()}


def load_and_go_on(rank: int, world_size: int, folder: str, stage: int) -> tuple[list[float], dict[str, Any]]:
    engine = start(stage, world_size)
    engine.load_checkpoint(folder)
    found = go(engine, 3)
    engine.close()
    return found


def mean_loss(ranks: list[Any]) -> list[float]:
    return [sum(row) / len(ranks) for row in zip(*(r[0] for r in ranks), strict=True)]


def torch_goes_on(want: ds.Content) -> tuple[list[float], dict[str, Any]]:
    """What torch's AdamW makes of the same states."""
    model = net()
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, weight_decay=0.01)
    for name, (weight, first, second) in want.states.items():
        named[name].data.copy_(weight)
        optimizer.state[named[name]] = {
            "step": torch.tensor(float(want.step)),
            "exp_avg": first.clone(),
            "exp_avg_sq": second.clone(),
        }
    losses = []
    for step in range(3):
        loss = model(torch.stack([sample(6 * (want.step + step) + i) for i in range(6)]))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses, {n: p.detach().numpy() for n, p in model.named_parameters()}


def test_training_goes_on_from_its_states(tmp_path, capsys):
    want = content(lr=LR)
    losses, params = torch_goes_on(want)
    for stage in (1, 3):
        found = import_deepspeed(ds.write(tmp_path / f"ds{stage}", want, stage, 2), tmp_path / f"z{stage}")
        assert not found.notes
        got, values = load_and_go_on(0, 1, str(tmp_path / f"z{stage}"), 0)
        assert got == pytest.approx(losses, rel=1e-6)
        for name, value in params.items():
            assert values[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
    assert "random states" in capsys.readouterr().err


@pytest.mark.gloo
def test_other_ranks_and_stages_go_on_alike(run_ranks, tmp_path):
    want = content(lr=LR)
    losses, _ = torch_goes_on(want)
    import_deepspeed(ds.write(tmp_path / "ds", want, 3, 2), tmp_path / "z")
    for world_size, stage in ((3, 3), (2, 1)):
        found = run_ranks(world_size, load_and_go_on, str(tmp_path / "z"), stage)
        assert mean_loss(found) == pytest.approx(losses, rel=1e-6)


def deepspeed_run(rank: int, world_size: int, folder: str, stage: int, bf16: bool) -> tuple[list[float], Any, Any]:
    """Three steps of the real package, a save, three more: losses of these, parameters in the end and at the save."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "DS_ACCELERATOR": "cpu"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
    import deepspeed

    # Sums through shared memory, which it would compile first: minutes, and a lock that a killed run leaves behind.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {
        "train_micro_batch_size_per_gpu": 6 // world_size,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": 150},
        "bf16": {"enabled": bf16},
    }
    model = net()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)

    def whole() -> dict[str, Any]:
        with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
            return {n: p.detach().float().clone().numpy() for n, p in model.named_parameters()}

    losses = []
    for step in range(6):
        if step == 3:
            engine.save_checkpoint(folder, client_state={"epoch": 3})
            at_save = whole()
        first = 6 * step + rank * (6 // world_size)
        loss = engine(torch.stack([sample(first + i) for i in range(6 // world_size)]))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses[3:], whole(), at_save


@pytest.mark.witness
@pytest.mark.gloo
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the witness extra: deepspeed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_folder_of_the_real_package_is_gone_on_with(run_ranks, tmp_path, stage):
    """fp32: losses and parameters are what DeepSpeed makes of the next steps, on one rank and on others."""
    expected = run_ranks(2, deepspeed_run, str(tmp_path / "ds"), stage, False, limit=400)
    found = import_deepspeed(tmp_path / "ds", tmp_path / "z")
    assert found.manifest.client_state == {"epoch": 3} and found.manifest.applied_steps == 3
    for world_size, ours in ((1, 0), (3, 3)):
        got = run_ranks(world_size, load_and_go_on, str(tmp_path / "z"), ours)
        assert mean_loss(got) == pytest.approx(mean_loss(expected), rel=1e-6)
        for name, value in expected[0][1].items():
            assert got[0][1][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.witness
@pytest.mark.gloo
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the witness extra: deepspeed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_bf16_folder_of_the_real_package(run_ranks, tmp_path, stage):
    """Masters round to the very weights that DeepSpeed computes with."""
    weights = run_ranks(2, deepspeed_run, str(tmp_path / "ds"), stage, True, limit=400)[0][2]
    found = import_deepspeed(tmp_path / "ds", tmp_path / "z")
    assert found.manifest.training["precision"] == "bf16" and found.manifest.loss_scale is None
    with Checkpoint(found.path) as checkpoint:
        for p in checkpoint.manifest.parameters:
            value = torch.from_numpy(checkpoint.whole(p.value, p.name, p.numel).copy())
            value = value.view(torch.bfloat16) if p.frozen else value.bfloat16()
            assert (value.float().view(p.shape).numpy() == weights[p.name]).all(), p.name


# --- what is refused -------------------------------------------------------------------------------------------------


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_nothing_pickled_is_run(tmp_path):
    ran = tmp_path / "ran"
    source = ds.write(tmp_path / "ds", content(client_state={"x": Evil(ran)}), 2, 2)
    with pytest.raises(ZplanError, match=r"mp_rank_00_model_states.pt` names `posix.system`.*nothing of it was run"):
        import_deepspeed(source, tmp_path / "z")
    assert not ran.exists() and not (tmp_path / "z").exists()


def optim(rank: int) -> str:
    return f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def change(path: Path, **changes: Any) -> None:
    """Rewrite an entry of `optimizer_state_dict`."""
    with ds.deepspeed_names():
        raw = torch.load(path, weights_only=False)
        raw["optimizer_state_dict"] |= changes
        torch.save(raw, path)


FAULTS: dict[str, tuple[Any, str]] = {
    "a missing rank": (lambda f: (f / optim(0)).unlink(), r"lacks `zero_pp_rank_0_mp_rank_00_optim_states.pt`"),
    "the last rank missing": (lambda f: (f / optim(2)).unlink(), r"optimizer states of 2 ranks, .* spread over 3"),
    "a short file": (lambda f: os.truncate(f / optim(1), 600), r"rank_1_mp_rank_00_optim_states.pt` can't be read"),
    "model parallel": (lambda f: (f / "mp_rank_01_model_states.pt").write_bytes(b""), "model parallel ranks"),
    "pipeline": (lambda f: (f / "layer_01-model_00-model_states.pt").write_bytes(b""), "pipeline stages"),
    "experts": (lambda f: (f / "layer_0_expert_3_mp_rank_00_model_states.pt").write_bytes(b""), "experts"),
    "NVMe": (lambda f: (f / "offloaded_tensors").mkdir(), "states on NVMe"),
    "no ZeRO": (lambda f: [p.unlink() for p in f.glob("*_optim_states.pt")], "saved without ZeRO"),
    "a slice too long": (
        lambda f: change(f / optim(2), single_partition_of_fp32_groups=[torch.zeros(400)]),
        r"`exp_avg` and 400 of master weights|has .* elements of `exp_avg",
    ),
    "another optimizer": (
        lambda f: change(
            f / optim(0),
            base_optimizer_state={
                "state": {0: {"step": 7, "exp_inf": torch.zeros(240)}},
                "param_groups": [{"params": [0]}],
            },
        ),
        r"of an optimizer that zplan has not: it keeps `exp_inf`",
    ),
    "other places": (
        lambda f: change(f / optim(0), param_slice_mappings=[{}]),
        r"puts `embed.weight` at None of its slice, and its parameters' sizes at \(0, 240\)",
    ),
    "no states": (
        lambda f: change(
            f / optim(0), base_optimizer_state={"state": {}, "param_groups": [{"params": [0], "betas": (0.9, 0.99)}]}
        ),
        "saved before the first step",
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_folder_that_can_not_be_imported_is_refused_by_name(tmp_path, what):
    damage, message = FAULTS[what]
    source = ds.write(tmp_path / "ds", content(), 2, 3)
    damage(source / "global_step7")
    with pytest.raises(ZplanError, match=message) as caught:
        import_deepspeed(source, tmp_path / "z")
    assert caught.value.hint and not (tmp_path / "z" / "global_step7").exists()


def test_files_of_two_saves_are_refused(tmp_path):
    source = ds.write(tmp_path / "ds", content(), 2, 2)
    other = ds.write(tmp_path / "other", content(step=8), 2, 2)
    (other / "global_step8" / optim(1)).rename(source / "global_step7" / optim(1))
    with pytest.raises(ZplanError, match="is of stage 2 and step 8, and rank 0's file of 2 and 7"):
        import_deepspeed(source, tmp_path / "z")


def test_layouts_that_do_not_add_up():
    with pytest.raises(ZplanError, match="hold 9 elements of group 0 and its parameters have 3"):
        whole_groups([{"a": (3,)}], None, [[5], [4]])
    with pytest.raises(ZplanError, match="which end in `b`"):
        sliced_parameters([{"a": (3,), "b": (4,)}], [[3], [3]])
    with pytest.raises(ZplanError, match="1 elements more"):
        sliced_parameters([{"a": (3,)}], [[3], [3]])
    with pytest.raises(ZplanError, match="unequal size"):
        sliced_parameters([{"a": (3,)}], [[3], [2]])


def test_the_command(tmp_path, capsys):
    source = ds.write(tmp_path / "ds", content(buffers={"seen": torch.ones(3)}), 2, 2)
    (tmp_path / "config.json").write_text('{"architectures": ["NetLM"], "model_type": "net"}')

    def zplan(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            cli.main(["checkpoint", *map(str, words)])
        return left.value.code or 0, *capsys.readouterr()

    out = tmp_path / "z"
    code, text, err = zplan("import", source, out, "--model", tmp_path / "config.json")
    assert (code, text) == (0, f"{out}/global_step7: step 7, 42 samples, 11 parameters of 2 ranks at stage 2, fp32\n")
    assert err == "note: 1 buffers of the module, such as `seen`, stay behind\n"
    assert zplan("verify", out)[0] == 0
    assert zplan("list", out)[1].splitlines()[1].split()[:7] == ["global_step7", "*", "7", "42", "2", "2", "fp32"]
    code, _, err = zplan("import", source, out)
    assert code == 2 and "global_step7` exists" in err
    code, _, err = zplan("import", tmp_path, out)
    assert code == 2 and "is no DeepSpeed checkpoint: it has neither `latest` nor" in err
    code, _, err = zplan("import", source, out, "--tag", "global_step9")
    assert code == 2 and "global_step9` is no DeepSpeed checkpoint" in err
    assert zplan("export", out, tmp_path / "model", "--dtype", "fp32")[0] == 0
