"""`stage3_max_live_parameters` sets the ring that an engine makes."""

import pytest
import torch
from torch import nn

import zplan


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize(("live", "slots"), [(0, 2), (3 * 72 + 5, 3), (4 * 72, 4), (10**9, 0)])
def test_slots_follow_the_cap(live, slots):
    """As rank 0 of 2; with room for all five blocks there is no ring, they are resident."""
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 3, "stage3_max_live_parameters": live}}
    engine, *_ = zplan.initialize(model=Tower(), config=config, world=2)
    try:
        rings = {id(u.slot): u.slot.buffer for u in engine.units if u.slot is not None}
        assert len(rings) == slots
        assert all(buffer.numel() == 128 and buffer.dtype == torch.float32 for buffer in rings.values())
    finally:
        engine.close()
