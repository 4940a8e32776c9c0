"""Numbers of 8 and 4 bits: what codes stand for, and how numbers become codes."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.pallas_kernels.numbers import largest

LEAST = 1e-10
"""Of what counts as the largest number of a row."""
CODES: dict[str, Any] = {
    "int8": jnp.int8,
    "e4m3": jnp.float8_e4m3fn,
    "e5m2": jnp.float8_e5m2,
    "int4": jnp.uint8,
    "fp4": jnp.uint8,
}
"""Kinds of codes, and the dtype of arrays of them; of those of four bits an array has two in each number.

"int4" is 0 to 15 for -8 to 7, "fp4" a sign, two bits of exponent and one of mantissa (OCP's e2m1).
"""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the codes of "fp4" without a sign stand for."""
LARGEST = {"int8": 127.0, "e4m3": 448.0, "e5m2": 57344.0, "fp4": 6.0}
"""That a code stands for."""


def per_byte(kind: str) -> int:
    """How many codes a number of an array has."""
    return 2 if CODES[kind] == jnp.uint8 else 1


def decoded(codes: jax.Array, kind: str) -> jax.Array:
    """What codes [n, width] stand for, float32; two for each of four bits."""
    if kind in ("int8", "e4m3", "e5m2"):
        return codes.astype(jnp.float32)
    halves = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(codes.shape[0], -1)
    if kind == "int4":
        return halves.astype(jnp.float32) - 8
    return jnp.where(halves & 8, -1, 1) * jnp.asarray(E2M1, jnp.float32)[halves & 7]


def encoded(numbers: jax.Array, kind: str) -> jax.Array:
    """The nearest codes of numbers [n, width] that a code may stand for, as arrays of `CODES` have them."""
    if kind in ("e4m3", "e5m2"):
        return numbers.astype(CODES[kind])
    if kind == "int8":
        return jnp.round(numbers).astype(jnp.int8)
    if kind == "int4":
        halves = jnp.clip(jnp.round(numbers) + 8, 0, 15)
    else:
        middles = jnp.asarray([(one + other) / 2 for one, other in itertools.pairwise(E2M1)])
        halves = jnp.searchsorted(middles, jnp.abs(numbers)) + 8 * (numbers < 0)
    halves = halves.astype(jnp.uint8)
    return halves[:, ::2] | (halves[:, 1::2] << 4)


def rounded(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows [n, in] as int8 codes, and what a code of 1 stands for, [n] float32."""
    exact = x.astype(jnp.float32)
    units = jnp.maximum(largest(exact, 1), LEAST) * (1 / 127)
    return jnp.round(exact / units[:, None]).astype(jnp.int8), units


ROUNDS = ("", "int8", "int8_static", "fp8", "fp8_128", "fp8_static")
"""How activations are rounded.

Not at all; to int8, each row by 1 / 127 of its largest (`Int8`), or by a given scale and zero point; to e4m3,
each row or each 128 numbers of it by 1 / 448 of their largest, or by a given scale.
"""


def in_codes(x: jax.Array, rounds: str, inputs: jax.Array | None) -> jax.Array:
    """Rows [n, in] rounded as `ROUNDS` says, in their dtype."""
    if not rounds:
        return x
    exact = x.astype(jnp.float32)
    if inputs is not None and rounds == "int8_static":
        codes = jnp.clip(jnp.round(exact / inputs[0]) + inputs[1], -128, 127)
        return ((codes - inputs[1]) * inputs[0]).astype(x.dtype)
    codes, units = float8_codes(x, rounds, inputs)
    return (codes.astype(jnp.float32) * units).reshape(x.shape).astype(x.dtype)


def float8_codes(x: jax.Array, rounds: str, inputs: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Rows [n, in] as e4m3 codes [n, parts, in / parts], and what a code of 1 stands for, [n, parts, 1]."""
    size = 128 if rounds == "fp8_128" else x.shape[1]
    parts = x.astype(jnp.float32).reshape(x.shape[0], x.shape[1] // size, size)
    most = jnp.maximum(largest(parts, 2, keepdims=True), LEAST)
    units = most / LARGEST["e4m3"] if inputs is None else jnp.full_like(most, inputs[0])
    codes = jnp.clip(parts / units, -LARGEST["e4m3"], LARGEST["e4m3"]).astype(jnp.float8_e4m3fn)
    return codes, units
