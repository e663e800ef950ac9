"""What is alive, phase by phase: every storage, and every level of live bytes that a phase saw."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zplan.planner.graph import Frame, Storage, Value
from zplan.planner.monomials import BASIS, SORT, SORT_POSITIONS, SORT_TYPES, TOKENS, WIDTH, Level, RowSum, factor, split
from zplan.planner.strides import row_major

OF_PRODUCTS = frozenset(
    (
        "mm",
        "addmm",
        "bmm",
        "grouped_mm",
        "mm.input",
        "mm.weight",
        "attention output",
        "logsumexp",
        "q.grad",
        "k.grad",
        "v.grad",
    )
)
"""Labels of what matrix products and attention kernels write."""


class Levels:
    """Live bytes of the storages of a tape.

    Attributes
    ----------
    row_sums
        Shapes of sums of rows that kernels take memory for, in the order of their places in a level.
    phases
        Names in the order entered.
    levels
        For each phase the distinct levels at its moments, entry included. The last level before every free is
        enough: between two of them the level only grows.
    storages
        Every storage that ever was.
    """

    def __init__(self) -> None:
        self.row_sums: dict[RowSum, int] = {}
        self.phases: list[str] = ["idle"]
        self.levels: list[set[Level]] = [{(0,) * (2 * WIDTH)}]
        self.storages: list[Storage] = []
        self.flops: list[list[int]] = [[0] * len(BASIS)]
        self.attention: list[list[int]] = [[0] * len(BASIS)]
        self.written: list[list[int]] = [[0] * len(BASIS)]
        self._live = [0] * (2 * WIDTH)
        self._grew = False
        self._frame: Frame | None = None

    def new(self, shape: Sequence[int], itemsize: int, label: str, *, strides: tuple[int, ...] | None = None) -> Value:
        """A value with a fresh storage."""
        shape = tuple(shape)
        at, coefficient = split(math.prod(shape) * itemsize)
        if label not in OF_PRODUCTS:
            self.written[-1][at] += coefficient
        return self._value(shape, itemsize, strides or row_major(shape), self._allocate(at, coefficient, label))

    def extend(self, value: Value, shape: Sequence[int]) -> None:
        """Let a value's storage be larger by so many elements, or smaller: two monomials together."""
        value.storage.beside = self.new(shape, value.itemsize, value.storage.label)

    def multiply(self, *extents: int, times: int = 1) -> None:
        """Count matrix products of these extents, once their node is there: two operations for each combination."""
        at, count = split(math.prod(extents))
        self.flops[-1][at] += 2 * times * count

    def attend(self, *extents: int, times: int, causal: bool) -> None:
        """Count products of fused attention, likewise; where it is causal, half of them are left out."""
        at, count = split(math.prod(extents))
        self.attention[-1][at] += 2 * times * count // (1 + causal)

    def buffer(self, shape: Sequence[int], itemsize: int) -> Value:
        """A buffer of the model, whose bytes are not activations."""
        return self._value(tuple(shape), itemsize, row_major(shape), Storage(0, 0, "buffer", 0))

    def padded(self, nbytes: int, tile: int, label: str, *, kernel: bool = False) -> Value:
        """`nbytes` per sequence and per token of a sequence rounded up to a tile; or (`CHUNK`) per token of a chunk."""
        return self.tiles(nbytes * TOKENS.get(tile, 1), tile, label, kernel=kernel)

    def tiles(self, nbytes: int, tile: int, label: str, *, kernel: bool = False) -> Value:
        """`nbytes` for each tile of a sequence."""
        return self._value((nbytes,), 1, (1,), self._allocate(tile + WIDTH * kernel, nbytes, label))

    def workspace(self, nbytes: int, label: str) -> Value:
        """Bytes that a kernel holds for itself."""
        at, coefficient = split(nbytes)
        return self._value((nbytes,), 1, (1,), self._allocate(WIDTH + at, coefficient, label))

    def sort_workspace(self, table: str, label: str) -> Value:
        """What sorting the ids of an embedding of tokens or positions takes: no monomial, so a term of its own."""
        at = {"tokens": SORT, "positions": SORT_POSITIONS, "types": SORT_TYPES}[table]
        return self._value((1,), 1, (1,), self._allocate(WIDTH + at, 1, label))

    def row_sum_workspace(self, value: Value, columns: int) -> Value:
        """What summing the rows of a value takes: no monomial, so a term of its own."""
        key = RowSum(factor(value.numel // columns), factor(columns), value.itemsize)
        if key not in self.row_sums:
            self.row_sums[key] = len(self._live)
            self._live.append(0)
        return self._value((1,), 1, (1,), self._allocate(self.row_sums[key], 1, "sum.staging"))

    def _value(self, shape: tuple[int, ...], itemsize: int, strides: tuple[int, ...], storage: Storage) -> Value:
        return Value(self, storage, shape, strides, itemsize)

    def _allocate(self, at: int, coefficient: int, label: str) -> Storage:
        storage = Storage(at, coefficient, label, len(self.phases) - 1)
        storage.again = self.recomputing
        self.storages.append(storage)
        self._live[at] += coefficient
        self._grew = True
        return storage

    def _free(self, storage: Storage) -> None:
        if storage.coefficient:
            if self._grew:
                self._note()
            self._live[storage.at] -= storage.coefficient
        storage.died = len(self.phases) - 1
        storage.beside = None

    def _note(self) -> None:
        self.levels[-1].add(tuple(self._live))
        self._grew = False

    def start(self, phase: str) -> None:
        """Start a phase; its first moment is the level it starts from."""
        self._note()
        self.phases.append(phase)
        self.levels.append(set())
        self.flops.append([0] * len(BASIS))
        self.attention.append([0] * len(BASIS))
        self.written.append([0] * len(BASIS))
        self._note()

    @property
    def recomputing(self) -> bool:
        """Whether a checkpointed call is run again."""
        return self._frame is not None and self._frame.recomputed is not None

    def close(self) -> None:
        """Note the last level, and give those before a row sum was met a place for it."""
        self._note()
        if self.row_sums:
            width = len(self._live)
            self.levels = [{(*v, *(0,) * (width - len(v))) for v in levels} for levels in self.levels]
