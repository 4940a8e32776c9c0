"""What native kernels are compiled for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

PANEL = 32
"""Output features that lie side by side in a packed weight."""
CODES = {"code_int8": 8, "code_e4m3": 8, "code_e5m2": 8, "code_int4": 4, "code_fp4": 4}
"""Kinds of codes of weights, and their bits."""
STORED = {**CODES, "bfloat16": 16, "float16": 16}
"""What becomes float32 before it is multiplied, and its bits: codes, and numbers of 16 bits."""


class AttentionShape(NamedTuple):
    """Query heads of a KV head, size of heads, and the pool's dtype."""

    group: int
    head_dim: int
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the pool."""
        return {"float32": 4, "bfloat16": 2, "float16": 2}.get(self.dtype, 1)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's head in the pool, but for its scale."""
        return self.head_dim * self.itemsize

    @property
    def scale_bytes(self) -> int:
        """Bytes of a head's scale, which lie behind those of all heads of a block."""
        return 4 if self.dtype == "int8" else 0

    @property
    def name(self) -> str:
        """Of the handler, to XLA."""
        return f"jaxllm_attend_{self.group}_{self.head_dim}_{self.dtype}"


class LinearShape(NamedTuple):
    """Rows and vectors whose sums are kept in registers at once, and what is multiplied how.

    Attributes:
        rows: of a tile.
        vectors: of a tile's rows.
        numbers: "float32", or "int8" on both sides; or float32 with weights of others: one of `STORED`.
        dot: of int8, what adds four products to a sum: "vnni512" and "vnni256" (one instruction, of so many
            bits), "pairs" (two of AVX2), or "" (whatever the compiler finds).
    """

    rows: int
    vectors: int
    numbers: str = "float32"
    dot: str = ""

    @property
    def name(self) -> str:
        """Of the handler, to XLA."""
        return "_".join(("jaxllm_linear", *(str(part) for part in self if part)))

    @classmethod
    def for_processor(cls, features: Mapping[str, bool], numbers: str = "float32") -> LinearShape:
        """For 32 registers of 16 lanes, or 16 of 8, and the instructions there are, by LLVM's names."""
        known = {"vnni512": "avx512vnni", "vnni256": "avxvnni", "pairs": "avx2"}
        dots = (dot for dot, feature in known.items() if numbers == "int8" and features.get(feature, False))
        dot = next(dots, "")
        return cls(*((13, 2) if features.get("avx512f", False) else (6, 1)), numbers, dot)


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
