"""One training step of `Gemma3ForConditionalGeneration` (transformers 5.24) of text alone, on a tape.

Called with ids and labels, and neither pixels nor token types, the image tower is not run: its parameters have states
and no gradient. The decoder is that of `Gemma3ForCausalLM`; only its masks are made before the positions are, which are
not searched for packed sequences, and for kinds of layers that there are; and its logits are never capped.
"""

from __future__ import annotations

from zplan.planner.graph import Value
from zplan.planner.hftape import ClassTape


class Gemma3Tape(ClassTape):
    """The text decoder behind an image tower that is left out."""

    @property
    def num_masks(self) -> int:
        return 1 if self.other_layer is None else self.style.masks

    def features(self, ids: Value) -> Value:
        embedded, seq = self.embed(ids), ids.shape[1]
        masks = self._masks(ids)
        positions = self._positions(seq)
        tables = self.tables(seq)
        out = self.layers([embedded], positions, tables, masks)
        del embedded
        return out
