"""A rank that dies, raises or runs apart in training ends the others within 30 s, and is named with unit and phase."""

import failfast
import pytest

WHERE = "in step 4, phase `backward.blocks.1`"


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("kill", f"rank 1 was ended by SIGKILL {WHERE}"),
        # A rank that raises: a script that fails in tests/test_cli_run.py, and ranks without torch in test_launch.py.
        pytest.param("raise", f"rank 1 failed {WHERE}: ValueError: seven", marks=pytest.mark.slow),
        ("diverge", "ranks run different collectives: rank 0: exchange of head; rank 1: all_gather of embed; rank "),
    ],
)
def test_one_rank_ends_all_in_time(tmp_path, how, said):
    end = failfast.fail(tmp_path, how, world_size=2, cpu=True)
    assert end.message.startswith(said)
    assert end.seconds < failfast.LIMIT_S
    assert (end.ranks, end.left) == (2, ())
