"""Questions about many choices at once: `--top`, `--max`, `--min`, `--sweep`, and no machine at all."""

import contextlib
import json
import re
from dataclasses import replace

import pytest

from zplan.planner.answer import open_search
from zplan.planner.batch import Batch
from zplan.planner.errors import ZplanError
from zplan.planner.front import front, ways
from zplan.planner.hardware import read_gpus
from zplan.planner.questions import ask, reply_json
from zplan.planner.remedies import remedies
from zplan.planner.request import make_request
from zplan.planner.search import TIE
from zplan.planner.units import GIB


def opened(**asked):
    return open_search(make_request(asked), remainder=True)


MACHINE = {"model": "llama-2-7b", "gpus": 8, "gpu": "RTX 4090", "global_batch": 64}


def test_the_front_is_what_nothing_beats():
    search = opened(**MACHINE)
    found = front(search, 10)
    rows = [search.row(c) for way in ways(search, search.batches(8)) for c in way]
    fitting = [(r.high_bytes, search.time(r.choice).total) for r in rows if r.fits]
    kept = [(r.row.high_bytes, r.time.total) for r in found.runs]
    assert kept == sorted(kept, key=lambda k: k[1]) == sorted(kept, reverse=True)
    for high, seconds in kept:
        assert not any(h <= high and t * (1 + TIE) < seconds for h, t in fitting if (h, t) != (high, seconds))
    for high, seconds in fitting:
        assert any(h <= high and t <= seconds * (1 + TIE) for h, t in kept)
    assert len(fitting) == len(kept) + found.beaten
    # The fastest that zplan can run is what a plain estimate picks, but for ties.
    plain = search.time(search.pick(search.rows()).choice).total
    assert min(r.time.total for r in found.runs if not r.estimate_only) == pytest.approx(plain, rel=TIE)


def test_every_way_is_on_the_front_or_rejected_with_phase_and_line():
    search = opened(**MACHINE)
    found = front(search, 10)
    assert len(found.rejected) > 8
    for r in found.rejected:
        assert not r.row.fits
        assert re.fullmatch(r"[\d.]+ GiB over in phase `[a-z.0-9]+`, where the most is `[a-z_.]+`, .*", r.reason)
        smaller = [d for d in (1, 2, 4, 8) if d < r.row.choice.micro_batch]
        assert all(search.row(replace(r.row.choice, micro_batch=d, accumulation=8 // d)).fits for d in smaller)


def test_one_rank_that_need_not_accumulate_is_looked_at_after_smaller_batches_that_do_not_fit():
    search = opened(params="6.2e9", gpus=1, gpu="H100 NVL 94GB", global_batch=4)
    picked, found = search.pick(search.rows()), front(search, 10)
    assert picked.fits and picked.choice.accumulation == 1
    assert not search.row(replace(picked.choice, micro_batch=2, accumulation=2)).fits
    assert any(run.row.choice.accumulation == 1 and not run.estimate_only for run in found.runs)
    assert {(r.row.choice.stage, r.row.choice.micro_batch) for r in found.rejected} == {(s, 1) for s in range(4)}


def test_what_host_memory_is_too_small_for_is_rejected_for_that():
    found = front(opened(model="llama-2-7b", gpus=4, gpu="RTX 4090", host_mem=16, global_batch=8), 10)
    host = [r for r in found.rejected if r.row.spare_bytes >= 0]
    assert host and not found.runs
    reason = r"[\d.]+ GiB of host memory over on a node, where the most is `[a-z_.]+`, [\d.]+ GiB a rank"
    assert all(re.fullmatch(reason, r.reason) for r in host)


@pytest.mark.parametrize("asked", [{"precision": "bf16"}, {"attention": "sdpa"}, {"seq": 8192}])
def test_the_smallest_card_is_not_hidden_by_an_older_larger_one(asked):
    """Cards before Ampere refuse bf16 and fused attention of grouped heads, or take more for eager attention."""
    asked = {"model": "llama-3.2-3b", "gpus": 8, **asked}
    found = ask(make_request(asked), {"min": "mem"})
    fits = []
    for card in read_gpus():
        if card.vendor == "NVIDIA" and card.mem_reported:
            with contextlib.suppress(ZplanError):
                s = opened(**asked, gpu=card.name)
                fits += [card.mem_bytes] if s.pick(s.rows()).fits else []
    assert found.value == min(fits)
    if "seq" in asked:
        s = opened(**asked, gpu="V100 SXM2 32GB")
        assert not s.pick(s.rows()).fits and found.value < s.hardware.mem_bytes


def test_top_in_text_and_json(run):
    args = ["estimate", "--model", "llama-2-7b", "--gpus", 8, "--gpu", "RTX 4090", "--global-batch", 64, "--top", 2]
    code, out, _ = run(*args)
    assert code == 0 and "the fastest ways that fit, each smaller than all above it" in out
    assert len(re.findall(r"^  [12]  3 ", out, flags=re.M)) == 2 and "more: --top" in out
    found = json.loads(run(*args, "--json")[1])
    assert found["fits"] and len(found["runs"]) == 2 and found["asked"]["gpu"] == "RTX 4090"
    assert found["runs"][0]["time"]["step_s"] <= found["runs"][1]["time"]["step_s"]
    assert all(r["reason"] for r in found["rejected"])


def test_top_needs_times():
    with pytest.raises(ZplanError, match="--top compares step times: no card is named"):
        ask(make_request({"params": "1e9", "gpus": 8, "mem": 24}), {"top": 3})
    with pytest.raises(ZplanError, match="--top compares step times: no peak of H200 SXM 141GB in fp32"):
        ask(make_request({"params": "1e9", "gpus": 8, "gpu": "H200", "precision": "fp32"}), {"top": 3})


def test_the_longest_sequence_over_all_ways():
    asked = {"params": "7e9", "gpus": 8, "mem": 24}
    found = ask(make_request(asked), {"max": "seq"})
    picked = [opened(**asked, seq=found.value + d) for d in (0, 128)]
    assert [s.pick(s.rows()).fits for s in picked] == [True, False]
    made = {"model": "llama-2-7b", "gpus": 8, "mem": 80}
    assert ask(make_request(made), {"max": "seq"}).value == 4096
    beyond = ask(make_request({**made, "beyond_limit": True}), {"max": "seq"})
    assert beyond.value > 4096 and beyond.row.fits and beyond.note == "the model is made for 4,096"
    limit = ask(make_request({"model": "gpt2", "gpus": 1, "mem": 24, "beyond_limit": True}), {"max": "seq"})
    assert limit.value == 1024 and "made for 1,024" in limit.text()
    fixed = ask(make_request({**asked, "checkpointing": "none"}), {"max": "seq"})
    assert 0 < fixed.value < found.value


def test_the_largest_micro_batch():
    asked = {"params": "7e9", "gpus": 8, "mem": 24}
    found = ask(make_request(asked), {"max": "micro-batch"})
    picked = [opened(**asked, micro_batch=found.value + d) for d in (0, 1)]
    assert [s.pick(s.rows()).fits for s in picked] == [True, False]
    assert found.json()["micro_batch"] == found.value


def test_the_largest_model():
    asked = {"gpus": 8, "mem": 24}
    found = ask(make_request(asked), {"max": "params"})
    digits = 10 ** (len(str(found.value)) - 2)
    assert found.value % digits == 0 and found.value > 7e9
    picked = [opened(**asked, params=found.value + d) for d in (0, digits)]
    assert [s.pick(s.rows()).fits for s in picked] == [True, False]
    assert f"{found.value // 10**9}" in found.text()


@pytest.mark.parametrize("batch", [None, 48])
def test_the_fewest_gpus(batch):
    asked = {"params": "7e9", "mem": 24} | ({"global_batch": batch} if batch else {})
    found = ask(make_request(asked), {"min": "gpus"})
    counts = [n for n in range(1, 9) if batch is None or batch % n == 0]
    fits = [n for n in counts if (s := opened(**asked, gpus=n)).pick(s.rows()).fits]
    assert found.value == fits[0]
    assert fits == counts[counts.index(fits[0]) :]


def test_the_fewest_gpus_of_a_batch_that_is_fixed_in_all_three():
    asked = {"model": "llama-2-7b", "gpu": "A100 SXM 80GB", "global_batch": 64, "micro_batch": 4}
    assert ask(make_request({**asked, "accumulation": 2}), {"min": "gpus"}).value == 8
    with pytest.raises(ZplanError, match="no number of GPUs makes 64 sequences a step of 12 on each") as caught:
        ask(make_request({**asked, "accumulation": 3}), {"min": "gpus"})
    assert caught.value.hint == "use --global-batch 60 or 72"


def test_the_smallest_card():
    found = ask(make_request({"params": "7e9", "gpus": 8}), {"min": "mem"})
    cards = {g.name: g.mem_bytes for g in read_gpus() if g.vendor == "NVIDIA" and g.mem_reported}
    assert found.value in cards.values() and found.row.fits
    near = max(size for size in cards.values() if size < found.value)
    s = opened(params="7e9", gpus=8, gpu=next(name for name, size in cards.items() if size == near))
    assert not s.pick(s.rows()).fits
    for name, size in list(cards.items())[::4]:
        s = opened(params="7e9", gpus=8, gpu=name)
        assert s.pick(s.rows()).fits == (size >= found.value), name
    nothing = ask(make_request({"params": "1e12", "gpus": 1}), {"min": "mem"})
    assert not nothing.fits and "short" in nothing.text() and nothing.json()["mem_bytes"] is None


@pytest.mark.parametrize(("what", "least"), [("seq", "Not even 128 tokens do"), ("micro-batch", "Not even 1 sequence")])
def test_nothing_that_fits_has_a_way_on(run, what, least):
    args = ("estimate", "--model", "llama-3-8b", "--gpus", "1", "--mem", "24", "--max", what)
    code, out, _ = run(*args)
    assert code == 0 and out.startswith(f"Nothing fits: llama-3-8b on 1 GPU, 24.00 GiB. {least}")
    assert out.endswith("; without --max the same options tell by how much, and what would\n")
    assert run(*args, "--check")[0] == 1


def test_a_sweep_of_two():
    request = make_request({"params": "7e9", "gpus": 8, "mem": 24})
    found = ask(request, {"sweep": "seq=1024:4096,micro-batch=1:4"})
    assert [p.at for p in found.points] == [(s, m) for s in (1024, 2048, 4096) for m in (1, 2, 4)]
    for p in found.points:
        s = opened(params="7e9", gpus=8, mem=24, seq=p.at[0], micro_batch=p.at[1])
        assert s.pick(s.rows()).peak_bytes == p.row.peak_bytes
        shown = f"{p.row.peak_bytes / GIB:.2f}"
        assert (shown if p.row.fits else f"({shown})") in found.text()
    peaks = {p.at: p.row.peak_bytes for p in found.points if p.row.choice.checkpointing == "full"}
    assert all(peaks[a] <= peaks[b] for a in peaks for b in peaks if a[0] <= b[0] and a[1] <= b[1])


def test_a_sweep_of_one(run):
    args = ["estimate", "--model", "llama-3.2-1b", "--gpu", "H200", "--global-batch", 48]
    code, out, _ = run(*args, "--sweep", "gpus=1:64")
    assert code == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["1", "2", "4", "8", "16", "32", "64"]
    assert lines[-1].endswith("no: `--global-batch 48` does not split over 64 GPUs: 48 / 64 = 0.75 sequences a GPU")
    assert "yes" in lines[-4]
    found = json.loads(run(*args, "--gpus", 8, "--sweep", "stage", "--json")[1])
    assert [p["at"] for p in found["points"]] == [{"stage": s} for s in range(4)]
    assert all(p["row"]["stage"] == p["at"]["stage"] and p["time"]["step_s"] > 0 for p in found["points"])


def test_reasons_that_a_table_leaves_out_are_counted(run):
    args = ("estimate", "--model", "gpt2", "--gpus", 1, "--mem", 24, "--sweep", "micro-batch=1:2,seq=512:16384")
    out = run(*args)[1].splitlines()
    assert [line[:5] for line in out[-4:]] == ["  -: "] * 4 and out[-1] == "  -: 1 more, told by --json"
    assert len({p["why"] for p in json.loads(run(*args, "--json")[1])["points"] if p["row"] is None}) == 4


def test_the_longest_sequence_says_what_ended_it():
    found = ask(make_request({"model": "mistral-7b-v0.1", "gpus": 8, "mem": 80}), {"max": "seq"})
    assert found.note == "the model is made for 32,768; attention beyond its window of 4,096 is not built yet"
    found = ask(make_request({"model": "smollm2-135m", "gpus": 1, "mem": 100000, "beyond_limit": True}), {"max": "seq"})
    assert found.note == "the model is made for 8,192; more than 1,048,576 are not looked at"


def test_a_sweep_over_the_stages_that_a_runtime_has(run):
    args = ["estimate", "--model", "llama-3.2-1b", "--gpus", 2, "--mem", 24, "--runtime", "fsdp2"]
    found = json.loads(run(*args, "--sweep", "stage", "--json")[1])
    assert [(p["at"]["stage"], p["row"]["stage"]) for p in found["points"]] == [(2, 2), (3, 3)]
    found = json.loads(run(*args, "--sweep", "stage=1:3,micro-batch=1:2", "--json")[1])
    assert [p["row"] is None for p in found["points"]] == [True, True, False, False, False, False]
    assert ["FSDP2" in p.get("why", "") for p in found["points"]] == [True, True, False, False, False, False]
    assert run(*args, "--sweep", "stage=1:3,micro-batch=1:2")[1].splitlines()[-1].startswith("  -: `--stage 1`: FSDP2")
    out = run(*args, "--sweep", "stage=1:2")[1].splitlines()
    assert out[1].split()[:2] == ["stage", "checkpt"]
    assert out[2].split(maxsplit=1) == ["1", "no: `--stage 1`: FSDP2 has stage 2 or 3 for what is asked"]
    assert out[3].split()[0] == "2"
    # What no point of the table can be asked is an error.
    code, _, err = run(*args, "--sweep", "stage=0:1")
    assert code == 2 and "`--stage 0`: FSDP2 has stage 2 or 3" in err
    args = ["estimate", "--model", "qwen3-8b", "--gpus", 4, "--mem", 80, "--precision", "fp32"]
    code, _, err = run(*args, "--sweep", "seq")
    assert code == 2 and "32 heads on 8 key-value heads in fp32 have no fused attention" in err


def test_a_sweep_over_gpus_names_the_card_and_no_number(run):
    args = ["estimate", "--model", "llama-3.2-1b", "--gpu", "RTX 4090", "--sweep", "gpus=1:2"]
    assert run(*args)[1].splitlines()[0] == "llama-3.2-1b on RTX 4090, 23.99 GiB each"
    assert "--sweep gpus changes what --gpus gives" in run(*args, "--gpus", 2)[2]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"max": "sequence"}, "`--max sequence` is unknown"),
        ({"min": "seq"}, "`--min seq` is unknown"),
        ({"max": "params"}, "--max params looks for what --model gives"),
        ({"min": "mem"}, "--min mem looks for what --gpu gives"),
        ({"min": "gpus"}, "--min gpus looks for what --gpus gives"),
        ({"sweep": "seq,layers"}, "`--sweep layers` is unknown"),
        ({"sweep": "seq,seq"}, "is not one thing or two different ones"),
        ({"sweep": "seq=8:2"}, "`--sweep seq=8:2` is no range"),
        ({"top": 0}, "`--top 0` shows nothing"),
        ({"top": 1, "max": "seq"}, "--top and --max are different questions"),
    ],
)
def test_questions_that_are_refused(asked, message):
    request = make_request({"model": "llama-3.2-1b", "gpus": 8, "gpu": "H200"})
    with pytest.raises(ZplanError) as caught:
        ask(request, asked)
    assert message in caught.value.message and caught.value.hint


def test_what_is_fixed_is_not_swept():
    with pytest.raises(ZplanError, match="--max params looks for what --params gives"):
        ask(make_request({"params": "1e9", "gpus": 8, "mem": 24}), {"max": "params"})
    with pytest.raises(ZplanError, match="--sweep seq changes what --seq gives"):
        ask(make_request({"params": "1e9", "gpus": 8, "mem": 24, "seq": 512}), {"sweep": "seq"})
    offloaded = {"params": "1e9", "gpus": 8, "mem": 24, "offload": "cpu", "offload_params": "cpu"}
    with pytest.raises(ZplanError, match="--sweep stage changes what --offload-params gives"):
        ask(make_request(offloaded), {"sweep": "stage"})
    with pytest.raises(ZplanError, match="--max seq looks for what --seq gives"):
        ask(make_request({"params": "1e9", "gpus": 8, "mem": 24, "seq": 512}), {"max": "seq"})


def test_a_check_of_a_question(run):
    args = ["estimate", "--params", "1e12", "--gpus", 1, "--mem", 24, "--max", "seq", "--check"]
    assert run(*args)[0] == 1
    assert run(*args[:2], "1e8", *args[3:])[0] == 0


def test_replies_are_json_documents():
    request = make_request({"params": "1e9", "gpus": 8, "mem": 24})
    found = json.loads(reply_json(ask(request, {"max": "seq"}), request))
    assert (
        found["schema_version"] and found["asked"] == {"params": "1e9", "gpus": 8, "mem": 24} and found["row"]["fits"]
    )


def test_remedies_say_what_they_save_and_what_they_cost():
    search = opened(model="llama-2-7b", gpus=8, gpu="RTX 4090", stage=2, checkpointing="none", micro_batch=2)
    row = search.pick(search.rows())
    assert not row.fits
    found = remedies(search, row)
    assert all(r.saved_bytes == row.peak_bytes - r.peak_bytes for r in found)
    run_by_zplan = [r.longer for r in found if r.longer is not None and not r.estimate_only]
    assert run_by_zplan and run_by_zplan == sorted(run_by_zplan)
    by_option = {r.option: r for r in found}
    both = by_option["--stage 3 --checkpointing full"]
    c = replace(row.choice, stage=3, checkpointing="full")
    assert both.longer == pytest.approx(search.time(c).total / search.time(row.choice).total - 1)
    assert both.peak_bytes == search.row(c).peak_bytes
    untimed = opened(params="7e9", gpus=4, mem=24)
    assert all(r.longer is None for r in remedies(untimed, untimed.pick(untimed.rows())))


def test_a_choice_with_another_offload_is_what_a_request_would_give():
    from zplan.planner.config import Offload

    plain, asked = opened(**MACHINE), opened(**MACHINE, offload="cpu")
    batch = Batch(1, 8, 8)
    assert plain.choice(2, batch, "full", offload=Offload("cpu")) == asked.choice(2, batch, "full")


HOURS = ["estimate", "--model", "llama-3.2-1b", "--gpus", 8, "--global-batch", 16, "--tokens", "1e9", "--price", "2.5"]


@pytest.mark.parametrize("asked", [["--top", 9], ["--sweep", "seq=512:1024"], ["--max", "seq"], ["--min", "mem"]])
def test_every_answer_has_hours_and_cost(run, asked):
    args = [*HOURS, *(["--gpu", "H200"] if asked[0] != "--min" else []), *asked]
    code, out, err = run(*args)
    assert code == 0 and err == ""
    document = json.loads(run(*args, "--json")[1])
    if "row" in document:
        found, (hours, gpu_hours, price) = document["cost"], re.findall(r"[\d,.]*\d", out.splitlines()[-1])
    else:
        rows = document.get("runs") or document["points"]
        found, first = rows[0]["time"], out.splitlines()[2].removesuffix("estimate only").removesuffix("yes").split()
        hours, gpu_hours, price = first[-3:]
        assert all(r["time"]["steps"] == -(-(10**9) // (16 * (r.get("seq") or r["at"]["seq"]))) for r in rows)
    assert found["gpu_hours"] == pytest.approx(8 * found["hours"]) and found["price"] == 2.5 * found["gpu_hours"]
    shown = (f"{found['hours']:,.1f}", f"{found['gpu_hours']:,.0f}", f"{found['price']:,.0f}")
    assert (hours, gpu_hours, price) == shown


@pytest.mark.parametrize("asked", [["--sweep", "seq"], ["--max", "seq"], ["--top", 3]])
def test_hours_are_refused_where_no_card_is_named(run, asked):
    code, out, err = run(*HOURS, "--mem", 80, *asked)
    assert code == 2 and out == "" and "no card is named (--gpu)" in err
