"""From an out-of-memory log to a change: the line it names, the rungs in order, and a config that fits."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zplan.planner.errors import ZplanError
from zplan.planner.ladder import DEFAULT_PACE, climb, step_seconds
from zplan.planner.lint import Subject, check_document, deepspeed_view
from zplan.planner.need import Setup, edit, need_of
from zplan.planner.oom_log import OutOfMemory, Size
from zplan.planner.oom_match import candidates, matches
from zplan.planner.oom_report import diagnose, diagnosis_json, diagnosis_text, fixed_file, room_of
from zplan.planner.oom_setup import make_setup
from zplan.planner.relaxed import Document
from zplan.planner.sources import model_from

GIB = 2**30
STAGE2 = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": True},
}


def setup(config=None, *, gpus=8, model="llama-2-7b", seq=2048, checkpointing="none", **subject):
    config = json.loads(json.dumps(STAGE2 if config is None else config))
    view = deepspeed_view(Document(config, "json"), Subject(gpus=gpus, **{**facts(model), **subject}))
    return Setup(view, model_from(model, None).spec, seq, checkpointing=checkpointing)


def facts(model):
    spec = model_from(model, None).spec
    return {"num_params": spec.num_params, "hidden": spec.arch.hidden, "model": model}


def message(tried, phase="", *, allocated=None, free=GIB, total=80 * GIB, unallocated=0, device="CUDA"):
    def size(n):
        return None if n is None else Size(n, 0)

    return OutOfMemory(
        device, size(tried), 0, None, size(total), size(free), None, size(allocated), size(unallocated), None, phase
    )


TOKENS = 8 * 2048
LOGITS = TOKENS * 32000
# bytes, phase -> the line and what of it
LINES = [
    (LOGITS * 4, "loss", "act.loss.saved", "logits in fp32"),
    (LOGITS * 2, "forward", "act.head.output", "logits in bf16"),
    (TOKENS * 11008 * 2, "forward", "act.block.saved", "gate"),
    (32000 * 4096 * 2, "backward", "grads", "gradient of"),
    (10**9, "backward", "grads.bucket", "reduce bucket"),
    (6738415616 * 2, "start", "params.flat", "flat buffer"),
    (-(-6738415616 // 8) * 4, "step", "optim.grad_fp32", "fp32 gradient of the shard"),
    (-(-6738415616 // 8) * 4, "start", "optim.master", "fp32 master weights"),
]


@pytest.mark.parametrize(("nbytes", "phase", "line", "what"), LINES)
def test_the_line_is_named_by_size_and_phase(nbytes, phase, line, what):
    found = matches(message(-(-nbytes // 2**21) * 2**21, phase), setup())
    assert line in [c.line for c in found] and any(what in c.what for c in found if c.line == line)
    assert all(phase in c.phases for c in found), "a line of another phase was named beside one of this phase"


def test_sizes_that_name_nothing():
    for tried in (2 * 2**20, 20 * 2**20):
        assert matches(message(tried), setup()) == (), "a block of the small pools stands for any tensor"
    assert matches(message(None), setup()) == ()
    assert matches(message(123457 * 2**21), setup()) == ()


def test_on_the_cpu_sizes_are_exact():
    exact = TOKENS * 11008 * 2
    assert matches(message(exact, device="CPU"), setup()) != () == matches(message(exact + 1, device="CPU"), setup())


def test_checkpointed_blocks_are_named_in_backward():
    found = matches(message(-(-TOKENS * 11008 * 2 // 2**21) * 2**21, "backward"), setup(checkpointing="full"))
    assert {c.line for c in found} == {"act.block.backward"}


def test_the_rungs_come_in_order_and_save_what_they_say():
    s = setup()
    ladder = climb(s, None, 78 * GIB)
    names = list(dict.fromkeys(r.name for r in ladder.rungs))
    assert names == ["micro-batch", "loss", "buckets", "stage", "checkpointing", "offload"]
    for r in ladder.rungs:
        assert r.peak_bytes == need_of(r.apply(s)).peak_bytes == ladder.peak_bytes - r.saved_bytes
        assert r.fits == (r.peak_bytes <= 78 * GIB) and r.time_share >= 0
    by_name = {r.name: r for r in ladder.rungs}
    assert by_name["buckets"].saved_bytes == 2 * 10**9 - 131_072_000 * 2, (
        "two buckets of 5e8, one of the largest tensor"
    )
    assert 0.3 < by_name["checkpointing"].time_share < 1 / 3, "one more forward of three"


def test_stage_3_saves_the_shards_it_says():
    config = edit(STAGE2, {("zero_optimization", "overlap_comm"): False, ("zero_optimization", "stage"): 0})
    ladder = climb(setup(config), None, 60 * GIB)
    saved = {r.what: r.saved_bytes for r in ladder.rungs if r.name == "stage"}
    p = 6738415616
    assert list(saved) == ["stage 1", "stage 2", "stage 3"]
    assert saved["stage 1"] == 12 * p - 12 * p // 8 - 10**9, "12P becomes 12P/N, and a bucket of 1 GB appears"
    assert saved["stage 2"] - saved["stage 1"] == 2 * p - 2 * p // 8


def test_the_log_corrects_the_estimate_upwards_only():
    s = setup()
    at_loss = need_of(s).at("loss")
    more = climb(s, message(GIB, "loss", allocated=at_loss + 5 * GIB), 78 * GIB)
    assert more.unexplained_bytes == 6 * GIB and more.peak_bytes == need_of(s).peak_bytes + 6 * GIB
    assert climb(s, message(GIB, "loss", allocated=at_loss - 5 * GIB), 78 * GIB).unexplained_bytes == 0


@pytest.mark.parametrize(
    ("capacity", "chosen"),
    [(78, ["micro-batch"]), (22, ["micro-batch", "stage"]), (9, ["micro-batch", "stage", "offload"]), (2, [])],
)
def test_the_config_that_is_written_fits(capacity, chosen):
    s = setup()
    ladder = climb(s, None, capacity * GIB)
    assert [r.name for r in ladder.chosen if r.name in ("micro-batch", "stage", "offload")] == chosen
    if not chosen:
        assert ladder.fixed is None
        return
    again = replace(s, view=replace(s.view, config=ladder.fixed.view.config), checkpointing=ladder.fixed.checkpointing)
    again = replace(again, chunked_loss=ladder.fixed.chunked_loss)
    assert need_of(again).peak_bytes == ladder.fixed_peak_bytes <= capacity * GIB
    assert again.micro * again.accumulation * 8 == 64, "the global batch changed"
    report = check_document(Document(ladder.fixed.view.config, "json"), "fixed", Subject(gpus=8))
    assert not report.count("error")


def test_a_launchers_micro_batch_is_changed_there():
    config = edit(STAGE2, {("train_batch_size",): "auto", ("train_micro_batch_size_per_gpu",): "auto"})
    rung = climb(setup(config, micro_batch=8), None, 78 * GIB).rungs[0]
    assert (rung.name, rung.elsewhere) == (
        "micro-batch",
        "--per_device_train_batch_size 4 --gradient_accumulation_steps 2",
    )
    assert rung.saved_bytes > 0


def test_time_grows_with_what_is_moved():
    s = setup()
    for edits in ({("zero_optimization", "stage"): 3}, {("zero_optimization", "offload_optimizer"): {"device": "cpu"}}):
        assert step_seconds(s.edited(edits), DEFAULT_PACE) > step_seconds(s, DEFAULT_PACE)
    full = replace(s, checkpointing="full")
    tokens = 8 * 2048
    products = step_seconds(full, DEFAULT_PACE) - step_seconds(s, DEFAULT_PACE)
    assert products == pytest.approx(2 * s.spec.num_params * tokens / DEFAULT_PACE.flops)


LOG = """Traceback (most recent call last):
  File "/env/torch/nn/functional.py", line 3053, in cross_entropy
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of 79.10 GiB of \
which 1.10 GiB is free. Including non-PyTorch memory, this process has 78.00 GiB memory in use. Of the allocated \
memory 74.40 GiB is allocated by PyTorch, and {idle} is reserved by PyTorch but unallocated.
"""


def test_the_answer_says_what_happened_and_what_to_do():
    text = diagnosis_text(diagnose(LOG.format(tried="1.95 GiB", idle="2.30 GiB"), "log", setup(), None))
    for words in (
        "out of CUDA memory in the loss (cross_entropy of functional.py), GPU 0",
        "tried to allocate      1.95 GiB",
        "expandable_segments:True",
        "act.loss.saved  logits in fp32, 2,097,152,000 B",
        "change: micro-batch 4, accumulation 2",
        "train_micro_batch_size_per_gpu: 4",
    ):
        assert words in text, text
    small = diagnosis_text(diagnose(LOG.format(tried="20.00 MiB", idle="8.00 MiB"), "log", setup(), None))
    assert "any small tensor" in small and "expandable" not in small
    assert "give --model" in diagnosis_text(diagnose(LOG.format(tried="1.95 GiB", idle="1.00 MiB"), "log", None, None))


def test_logs_of_other_errors_and_of_none():
    known = diagnosis_text(diagnose("[launch.py] exits with return code = -9\n", "log", setup(), None))
    assert "the node's memory ran out" in known
    with pytest.raises(ZplanError, match="holds no out-of-memory message"):
        diagnose("step 1 loss 2.0\n", "log", setup(), None)
    with pytest.raises(ZplanError, match="does not say how much memory the card has"):
        diagnose("RuntimeError: CUDA error: out of memory\n", "log", setup(), None)


def test_saving_has_no_ladder():
    text = LOG.format(tried="1.95 GiB", idle="1.00 MiB").replace("cross_entropy", "save_16bit_model")
    found = diagnose(text, "log", setup(), None)
    assert found.ladder is None and "save sharded" in diagnosis_text(found)
    with pytest.raises(ZplanError, match="no change to write"):
        fixed_file(found, Document(STAGE2, "json"))


def test_a_model_without_activations_has_no_ladder():
    s = setup(gpus=64)
    spec = model_from("deepseek-v3", None).spec
    assert spec.arch is not None
    s = replace(s, spec=replace(spec, arch=replace(spec.arch, dense_layers=(1, 3))))
    found = diagnose(LOG.format(tried="1.95 GiB", idle="1.00 MiB"), "log", s, None)
    assert found.ladder is None and "are not counted, so no change can be weighed" in diagnosis_text(found)


def test_a_log_of_another_model_is_doubted():
    text = LOG.format(tried="1.95 GiB", idle="1.00 MiB")
    assert "far more than this model" in diagnosis_text(diagnose(text, "log", setup(model="smollm2-135m"), None))
    assert "far more than this model" not in diagnosis_text(diagnose(text, "log", setup(), None))


def test_the_room_is_what_torch_can_have():
    m = message(GIB, allocated=70 * GIB, free=2 * GIB, unallocated=4 * GIB, total=80 * GIB)
    assert room_of(m, None) == 76 * GIB, "4 GiB are outside torch"
    assert room_of(m, 24 * GIB) == 20 * GIB
    assert room_of(replace(m, allowed=Size(40 * GIB, 0)), None) == 36 * GIB


def test_the_command(tmp_path, capsys):
    from zplan.cli import main

    inside = {"lr": 1, "deepspeed": STAGE2}
    (tmp_path / "ds.json").write_text(json.dumps(inside), encoding="utf-8")
    (tmp_path / "log").write_text(LOG.format(tried="1.95 GiB", idle="2.30 GiB"), encoding="utf-8")
    asked = ["check", str(tmp_path / "ds.json"), "--model", "llama-2-7b", "--gpus", "8", "--oom", str(tmp_path / "log")]
    with pytest.raises(SystemExit) as stopped:
        main([*asked, "--fix", str(tmp_path / "fixed.json"), "--json", "--gpu", "A100 SXM 80GB"])
    assert stopped.value.code == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["lines"][0]["line"] == "act.loss.saved" and answer["ladder"]["changes"][0]["name"] == "micro-batch"
    written = json.loads((tmp_path / "fixed.json").read_text(encoding="utf-8"))
    assert written == {"lr": 1, "deepspeed": answer["ladder"]["config"]}
    assert written["deepspeed"]["train_micro_batch_size_per_gpu"] == 4
    for wrong, words in (
        (["--checkpointing", "ful"], "did you mean `full`"),
        (["--gpus", "0"], "below 1"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main([*asked, *wrong])
        assert stopped.value.code == 2 and words in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["check", str(tmp_path / "ds.json"), "--fix", "x"])
    assert "--fix is for --oom" in capsys.readouterr().err


def test_accelerates_own_file_is_refused():
    with pytest.raises(ZplanError, match="is accelerate's"):
        make_setup(Document({"distributed_type": "DEEPSPEED"}, "json"), "x.yaml", Subject(), {})


odd = st.sampled_from([None, True, "auto", "cpu", 0, 1, 3, 1.5, 2e8, 1e30, {"device": "cpu"}, {"device": "nvme"}, [1]])
blocks = st.dictionaries(
    st.sampled_from(
        ["stage", "overlap_comm", "reduce_bucket_size", "offload_optimizer", "offload_param", "sub_group_size"]
        + ["stage3_max_live_parameters", "max_live_parameters", "contiguous_gradients", "cpu_offload"]
    ),
    odd,
    max_size=5,
)
tops = st.dictionaries(st.sampled_from(["train_batch_size", "train_micro_batch_size_per_gpu", "bf16"]), odd, max_size=3)


@settings(max_examples=60)
@given(tops, blocks | odd, st.sampled_from([None, 1, 3]), st.sampled_from(["", "start", "loss", "backward", "step"]))
def test_no_config_causes_a_traceback(top, zero, gpus, phase):
    config = json.loads(json.dumps({**top, "zero_optimization": zero}))
    s = setup(config, gpus=gpus, model="smollm2-135m", seq=128)
    m = message(2**26, phase, allocated=2**30)
    found = climb(s, m, 2 * GIB)
    assert list(candidates(s)) and found.peak_bytes > 0
    if found.fixed is not None:
        assert found.fixed_peak_bytes <= 2 * GIB
    text = LOG.format(tried="64.00 MiB", idle="1.00 MiB")
    assert json.loads(diagnosis_json(diagnose(text, "log", s, None)))["messages"] == 1


def test_candidates_of_two_stacks_and_of_images():
    of_stacks = list(candidates(setup(model="t5-base", seq=512, checkpointing="full")))
    again = {c.line for c in of_stacks if c.what.endswith("of the block that is run again")}
    assert again == {"act.encoder.backward", "act.decoder.backward"}
    logits = [c.nbytes for c in candidates(setup(model="vit-base", seq=197)) if c.what == "logits in fp32"]
    assert logits == [8 * 1000 * 4]


@pytest.mark.parametrize(
    ("gpu", "flash", "cudnn"), [("V100 SXM2 32GB", False, 0), ("H200", True, 256), (None, True, 0)]
)
def test_the_card_says_which_attention_kernel_is_counted(gpu, flash, cudnn):
    config = {"train_micro_batch_size_per_gpu": 2, "fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    document, subject = Document(config, "json"), Subject(gpus=8)
    made = {
        model: make_setup(document, "ds.json", subject, {"model": model, "gpu": gpu})
        for model in ("llama-2-7b", "qwen2-1.5b", "llama-3.2-1b")
    }
    assert {s.choice.flash for s in made.values()} == {flash}
    assert [made[m].choice.cudnn_width for m in ("llama-2-7b", "qwen2-1.5b")] == [0, cudnn]
    # No kernel before flash attention shares keys and values among heads.
    assert [s.attention for s in made.values()] == ["sdpa", *["sdpa" if flash else "eager"] * 2]
    assert all(need_of(s).peak_bytes > 0 for s in made.values())
