"""The kernels' own sources on the CPU, block by block and thread by thread, within the bounds of a GPU."""

import kernel_checks
import model_kernel_checks
import pytest
import torch

CASES = {**kernel_checks.CASES, **{f"model: {name}": check for name, check in model_kernel_checks.CASES.items()}}
WITHOUT_LAUNCH = {"copy strided", "model: rms norm, no row"}


@pytest.mark.parametrize("backwards", [False, True], ids=["", "backwards"])
@pytest.mark.parametrize("case", CASES)
def test_kernels_against_float64(case, backwards, host_kernels):
    host_kernels.backwards = backwards
    torch.manual_seed(sum(case.encode()))
    assert CASES[case](torch.device("cpu")) <= 1.0
    assert bool(host_kernels.launched) == (case not in WITHOUT_LAUNCH)
