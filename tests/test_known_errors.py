"""Lines of real logs, and what they mean."""

import pytest

from zplan.planner.known_errors import KNOWN, known_errors

LINES = [
    ("Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.", "loss-scale"),
    ("[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=412, OpType=_ALLGATHER_BASE)", "collect"),
    ("  exitcode  : -9 (pid: 4711)", "host-out-of-memory"),
    ("[launch.py:319:sigkill_handler] ['python', 'train.py'] exits with return code = -9", "host-out-of-memory"),
    (
        "AssertionError: Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * 1",
        "batch",
    ),
    ("ValueError: FSDP expects uniform original parameter dtype but got {torch.float32, torch.bfloat16}", "mixed"),
]


@pytest.mark.parametrize(("line", "cause"), LINES)
def test_each_line_has_its_cause(line, cause):
    assert [e.cause[: len(cause)] for e in known_errors(f"step 3\n{line}\nmore")] == [cause]


def test_every_row_is_met_and_quiet_logs_mean_nothing():
    met = {e.cause for line, _ in LINES for e in known_errors(line)}
    assert met == {e.cause for e in KNOWN}
    assert known_errors("step 10 loss 2.31 lr 1e-4 exitcode: 0") == ()
