"""What native kernels are compiled for."""

from __future__ import annotations

from typing import NamedTuple

PANEL = 32
"""Output features that lie side by side in a packed weight."""


class AttentionShape(NamedTuple):
    """Query heads of a KV head, size of heads, and the pool's dtype."""

    group: int
    head_dim: int
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the pool."""
        return 4 if self.dtype == "float32" else 2

    @property
    def name(self) -> str:
        """Of the handler, to XLA."""
        return f"jaxllm_attend_{self.group}_{self.head_dim}_{self.dtype}"


class LinearShape(NamedTuple):
    """Rows and vectors whose sums are kept in registers at once."""

    rows: int
    vectors: int

    @property
    def name(self) -> str:
        """Of the handler, to XLA."""
        return f"jaxllm_linear_{self.rows}_{self.vectors}"

    @classmethod
    def for_registers(cls, are_wide: bool) -> LinearShape:
        """For 32 registers of 16 lanes, or 16 of 8."""
        return cls(13, 2) if are_wide else cls(6, 1)


class RowsShape(NamedTuple):
    """An operation on rows of any length: "gate", "rms_norm", "layer_norm" or "argmax"."""

    operation: str

    @property
    def name(self) -> str:
        """Of the handler, to XLA."""
        return f"jaxllm_{self.operation}"


Shape = AttentionShape | LinearShape | RowsShape


def items_symbol(shape: Shape) -> str:
    """What the handler of a shape calls the address of the function that computes its items."""
    return f"{shape.name}_items"
