"""With another runtime no key of a config passes in silence: it is counted, told by name, or refused."""

import pytest

import zplan
from zplan.planner.config import ZeroSizes
from zplan.planner.errors import ZplanError

ASKED = {"model": "llama-3.2-1b", "gpus": 4, "mem": 80}


def estimate(runtime, zero=None, own=None, **top):
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, **top}
    config |= {"zero_optimization": {"stage": 0 if runtime == "ddp" else 3, **(zero or {})}, "zplan": own or {}}
    return zplan.estimate(**ASKED, runtime=runtime, config=config)


@pytest.mark.parametrize("runtime", ["deepspeed", "fsdp2", "ddp"])
@pytest.mark.parametrize("own", [{"ring_slots": 4}, {"transport": "copies"}, {"reduce": "scatter"}], ids=list)
def test_keys_of_zplans_runtime_alone_are_told(runtime, own):
    plain, e = estimate(runtime), estimate(runtime, own=own)
    (key,) = own
    assert e.notes == (
        f"`{key}` of `zplan` of `config` changes nothing with --runtime {runtime}: only zplan's runtime has that",
    )
    assert e.row.ledger == plain.row.ledger and e.row.choice == plain.row.choice
    assert key not in {d.name for d in e.decisions}
    assert plain.notes == ()


@pytest.mark.parametrize(
    ("own", "word"),
    [
        ({"kernels": "fused"}, "kernels fused"),
        ({"cross_entropy": "fused"}, "--loss fused"),
        ({"compile": True}, "--compile"),
        ({"checkpoint_every": 2, "checkpointing": "full"}, "--checkpoint-every 2"),
        ({"saving": "background"}, "--saving background"),
        ({"padded": True}, "--padded"),
        ({"optimizer": "lion"}, "--optimizer lion"),
    ],
    ids=lambda x: None if isinstance(x, dict) else x,
)
def test_keys_that_would_change_the_answer_are_refused(own, word):
    with pytest.raises(ZplanError) as caught:
        estimate("fsdp2", own=own)
    assert caught.value.message == f"`{word}` is not counted with --runtime fsdp2"


def test_every_key_of_zplan_is_counted_told_or_refused():
    """A key more is a decision more: counted for other runtimes (here), told or refused (the tests above)."""
    from zplan.planner.dsblocks import EXTRAS
    from zplan.planner.peer_keys import ZPLAN_ONLY
    from zplan.planner.peer_rules import UNCOUNTED

    assert set(EXTRAS) == {*ZPLAN_ONLY, *UNCOUNTED, "seq", "checkpointing", "attention"}


@pytest.mark.parametrize("runtime", ["fsdp2", "ddp"])
def test_deepspeeds_sizes_are_no_others(runtime):
    sizes = {"reduce_bucket_size": 1000, "max_live_parameters": 5, "overlap_comm": False}
    plain, e = estimate(runtime), estimate(runtime, sizes)
    name = {"fsdp2": "FSDP2", "ddp": "DDP"}[runtime]
    assert e.notes == (
        "`reduce_bucket_size`, `stage3_max_live_parameters`, `overlap_comm` of `zero_optimization` of `config` change "
        f"nothing with --runtime {runtime}: {name} knows no such key",
    )
    assert e.row.choice == plain.row.choice


def test_deepspeed_follows_its_sizes_and_tells_of_the_rest():
    zero = {"sub_group_size": 10**8, "allgather_bucket_size": 5, "round_robin_gradients": True, "reduce_scatter": True}
    e = estimate("deepspeed", zero, prescale_gradients=True)
    assert e.row.choice.zero == ZeroSizes(sub_group_size=10**8)
    assert e.row.ledger.lines != estimate("deepspeed").row.ledger.lines
    end = "nothing in the ledger, which is DeepSpeed's with its defaults for that"
    assert e.notes == (
        f"`prescale_gradients` of `config` changes {end}",
        f"`allgather_bucket_size`, `round_robin_gradients` of `zero_optimization` of `config` change {end}",
    )


@pytest.mark.parametrize(
    ("zero", "message", "hint"),
    [
        (
            {"model_persistence_threshold": 10},
            "`stage3_model_persistence_threshold` 10 of `zero_optimization` of `config` is not counted with --runtime "
            "deepspeed",
            "leave it out",
        ),
    ],
    ids=["model_persistence_threshold"],
)
def test_what_would_move_deepspeeds_bytes_is_refused(zero, message, hint):
    with pytest.raises(ZplanError) as caught:
        estimate("deepspeed", zero)
    assert (caught.value.message, caught.value.hint) == (message, hint)


def test_what_has_no_effect_at_the_stage_is_told():
    (note,) = estimate("deepspeed", {"stage": 2, "stage3_model_persistence_threshold": 10}).notes
    assert note.startswith("`stage3_model_persistence_threshold` of `zero_optimization`")


def test_an_offload_block_in_memory_tells_of_nvmes_buffers():
    block = {"device": "cpu", "pin_memory": False, "buffer_count": 8, "fast_init": True}
    e = estimate("deepspeed", {"offload_optimizer": block})
    assert e.row.choice.zero.pin_memory is False
    assert [n.partition(" of ")[0] for n in e.notes] == ["`buffer_count`, `fast_init`"]
