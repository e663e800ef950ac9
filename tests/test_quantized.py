"""A 4-bit base under trained adapters: integers and constants whole on every rank, trained beside them as ever."""

from __future__ import annotations

from typing import Any

import any_model as m
import pytest
import torch
from test_models_frozen import ledger
from torch import Tensor, nn

from zplan.planner.adapters import nf4_bytes
from zplan.planner.errors import ZplanError
from zplan.runtime.detect import find_units
from zplan.runtime.initialize import initialize
from zplan.runtime.verify import Meter

WIDTH, BLOCK, HERE = 32, 64, "test_quantized"


class State:
    """Scales of blocks of 64 elements, themselves scaled, and the table of 16 values."""

    def __init__(self, absmax: Tensor, code: Tensor, shape: torch.Size, inner: State | None = None) -> None:
        self.absmax, self.code, self.shape, self.inner = absmax, code, shape, inner


class FourBit(nn.Parameter):
    """Two codes a byte, as bitsandbytes lays them out: shape (numel / 2, 1), the state as an attribute."""

    quant_state: State

    @staticmethod
    def quantize(values: Tensor) -> FourBit:
        code = torch.linspace(-1, 1, 16)
        blocks = values.reshape(-1, BLOCK)
        absmax = blocks.abs().amax(dim=1)
        index = ((blocks / absmax[:, None] + 1) * 7.5).round().to(torch.uint8).flatten()
        found = FourBit((index[::2] << 4 | index[1::2]).reshape(-1, 1), requires_grad=False)
        found.quant_state = State(absmax, code, values.shape, State(absmax.max()[None].clone(), code, absmax.shape))
        return found


class Linear4bit(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = FourBit.quantize(torch.randn(width, width) / width**0.5)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.weight, FourBit) and self.weight.shape[1] == 1
        s, packed = self.weight.quant_state, self.weight.data.flatten()
        index = torch.stack([packed >> 4, packed & 15], dim=1).flatten().long()
        weight = (s.code[index].reshape(-1, BLOCK) * s.absmax[:, None]).reshape(s.shape).to(x.dtype)
        return torch.tanh(nn.functional.linear(x, weight)) + self.up(self.down(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(m.VOCAB, WIDTH).requires_grad_(requires_grad=False)
        self.layers = nn.ModuleList(Linear4bit(WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, m.VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Packed(nn.Module):
    """bitsandbytes' own linear map under an adapter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        import bitsandbytes

        base = bitsandbytes.nn.Linear4bit(width, width, bias=False, quant_type="nf4")
        values = torch.randn(width, width) / width**0.5
        base.weight = bitsandbytes.nn.Params4bit(values, requires_grad=False, quant_type="nf4", module=base).to("cpu")
        self.base = base
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    @property
    def weight(self) -> nn.Parameter:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x)) + self.up(self.down(x))


class PackedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Packed(WIDTH) for _ in range(4))


def train(rank: int, world_size: int, precision: str, build: type[Net] = Net) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for stage in range(4):
        with Meter(torch.device("cpu")) as meter:
            model = build()
            before = [layer.weight.detach().clone() for layer in model.layers]
            classes = [type(layer.weight) for layer in model.layers]
            engine, *_ = initialize(model=model, config=m.config(stage, precision=precision))
            meter.attach(engine)
            predicted = ledger(engine, model)
            losses, norms = [], []
            for step in range(5):
                batch = m.tokens(step, rank, 0)
                loss = engine(**batch)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
                norms.append(engine.grad_norm.item())
                del batch, loss
            rows = meter.compare(predicted).lines
        assert all(torch.equal(a, b.weight.detach()) for a, b in zip(before, model.layers, strict=True))
        assert classes == [type(layer.weight) for layer in model.layers] and nn.Parameter not in classes
        with pytest.raises(ZplanError, match="is quantized, and a 16-bit folder"):
            engine.save_16bit_model("nowhere")
        off = [r for r in rows if r.name.startswith(("params", "optim", "grads.shard")) and r.difference]
        lines = {line.id: line for line in predicted.lines}
        out[str(stage)] = {"losses": losses, "norms": norms, "params": m.whole(engine), "off": off, "lines": lines}
        engine.close()
    return out


@pytest.mark.gloo
def test_a_quantized_base_trains_like_one_process_with_its_bytes_in_the_ledger(run_ranks):
    want = m.reference(f"{HERE}:Net", (), steps=5, world_size=2)
    results = run_ranks(2, train, "fp32")
    for stage in range(4):
        m.equal([r[str(stage)] for r in results], want)
        for r in results:
            lines = r[str(stage)]["lines"]
            assert not r[str(stage)]["off"], stage
            # Per layer 16 scales and 16 codes in fp32, and one scale of the scales; the integers are half a byte.
            assert lines["params.frozen.constants"].nbytes == 4 * 4 * (WIDTH * WIDTH // BLOCK + 16 + 1)
            assert lines["params.frozen.whole.frozen"].nbytes == WIDTH * WIDTH // 2
            assert lines["params.frozen.whole.frozen"].instances == 4
            assert "replicated on 2 ranks" in lines["params.frozen.constants"].note


@pytest.mark.gloo
def test_bitsandbytes_itself_trains_like_one_process_with_its_bytes_in_the_ledger(run_ranks):
    pytest.importorskip("bitsandbytes")
    want = m.reference(f"{HERE}:PackedNet", (), steps=5, world_size=2)
    results = run_ranks(2, train, "fp32", PackedNet)
    for stage in range(4):
        m.equal([r[str(stage)] for r in results], want)
        for r in results:
            lines = r[str(stage)]["lines"]
            assert not r[str(stage)]["off"], stage
            kept = lines["params.frozen.whole.frozen"].total_bytes + lines["params.frozen.constants"].nbytes
            # What the planner says of `--qlora`.
            assert kept == 4 * nf4_bytes(WIDTH * WIDTH)


def trained_integers() -> nn.Module:
    class Odd(nn.Parameter):
        pass

    model = nn.Linear(2, 2)
    model.weight = Odd(torch.ones(2, 2))
    return model


@pytest.mark.parametrize(
    ("model", "said"), [(trained_integers, "is a `Odd` .torch.float32, trained."), (lambda: nn.LazyLinear(3), "Uninit")]
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_other_parameters_of_a_class_of_their_own_are_refused(model, said):
    with pytest.raises(ZplanError, match=said):
        find_units(nn.ModuleDict({"part": model()}))
