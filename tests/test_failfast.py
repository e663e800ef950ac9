"""A rank that dies, raises or runs apart in training ends the others within 30 s, and is named with unit and phase."""

import failfast
import pytest

WHERE = "in step 4, phase `backward.blocks.1`"


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("kill", f"rank 1 was ended by SIGKILL {WHERE}"),
        ("raise", f"rank 1 failed {WHERE}: ValueError: seven"),
        ("diverge", "ranks run different collectives: rank 0: exchange of head; rank 1: all_gather of embed; rank "),
    ],
)
def test_one_rank_ends_all_in_time(tmp_path, how, said):
    end = failfast.fail(tmp_path, how, world_size=2, cpu=True)
    assert end.message.startswith(said)
    assert end.seconds < failfast.LIMIT_S
    assert (end.ranks, end.left) == (2, ())
