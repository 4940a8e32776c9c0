"""The PTX that stands in for conversions: each line is emulated, and gives what JAX gives, for every code."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxllm.pallas_kernels import ptx

MASK = np.uint32(0xFFFF)
FLOATS = {"f16x2": np.float16, "bf16x2": ml_dtypes.bfloat16}
OF_NAMES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def lanes(bits, dtype):
    """Both halves of registers as numbers."""
    return [(half & MASK).astype(np.uint16).view(dtype).astype(np.float64) for half in (bits, bits >> 16)]


def packed(numbers, dtype):
    first, second = (np.asarray(one).astype(dtype).view(np.uint16).astype(np.uint32) for one in numbers)
    return first | second << 16


def permuted(low, high, selector):
    of_bytes = [(source >> np.uint32(8 * i)) & np.uint32(255) for source in (low, high) for i in range(4)]
    found = np.zeros_like(low)
    for place in range(4):
        nibble = (int(selector) >> (4 * place)) & 15
        assert nibble < 8, "copies of signs are not emulated"
        found |= of_bytes[nibble] << np.uint32(8 * place)
    return found


def looked_up(a, b, c, table):
    found = np.zeros_like(a)
    for bit in range(8):
        if int(table) >> bit & 1:
            sides = [side if bit >> place & 1 else ~side for side, place in ((a, 2), (b, 1), (c, 0))]
            found |= sides[0] & sides[1] & sides[2]
    return found


def run(code, register):
    """What registers hold after a block of PTX whose input is the last operand, by name."""
    inputs = max(map(int, re.findall(r"\$(\d)", code)))
    held = {f"${inputs}": register}

    def value(name):
        return held[name] if name in held else np.full_like(register, int(name, 0))

    for line in filter(None, (line.strip() for line in code.strip().strip("{}").split(";"))):
        if line.startswith(".reg"):
            continue
        operation, operands = line.split(maxsplit=1)
        if operands.startswith("{"):  # mov.b32 {first, second}, register
            names, source = (
                re.fullmatch(r"\{(\w+), (\w+)\}, (\S+)", operands).groups()[:2],
                operands.split()[-1],
            )
            held[names[0]], held[names[1]] = value(source) & MASK, value(source) >> 16
            continue
        target, *sources = operands.replace(" ", "").split(",")
        arguments = [value(source) for source in sources]
        kind = operation.rpartition(".")[2]
        match operation.split(".")[0]:
            case "mov":
                found = arguments[0]
            case "and":
                found = arguments[0] & arguments[1]
            case "shr":
                found = arguments[0] >> arguments[1]
            case "shl":
                found = arguments[0] << arguments[1]
            case "prmt":
                found = permuted(arguments[0], arguments[1], arguments[2].flat[0])
            case "lop3":
                found = looked_up(*arguments[:3], arguments[3].flat[0])
            case "sub":
                first, second = (lanes(one, FLOATS[kind]) for one in arguments)
                found = packed([x - y for x, y in zip(first, second, strict=True)], FLOATS[kind])
            case "fma":
                parts = zip(*(lanes(one, FLOATS[kind]) for one in arguments), strict=True)
                found = packed([x * y + z for x, y, z in parts], FLOATS[kind])
            case "cvt":
                assert operation == "cvt.rn.f16x2.e4m3x2"
                codes = [(half & 255).astype(np.uint8) for half in (arguments[0], arguments[0] >> 8)]
                found = packed([code.view(ml_dtypes.float8_e4m3fn) for code in codes], np.float16)
            case other:
                raise AssertionError(f"{other} is not emulated")
        held[target] = found
    return held


@pytest.mark.parametrize("kv_dtype", sorted(ptx.PTX_OF_HALVES))
def test_words_of_two_codes(kv_dtype):
    words = np.arange(2**16, dtype=np.uint32)
    others = np.roll(words, 12345)
    expected = ptx.halves(jnp.asarray(words.astype(np.uint16).view(np.int16)), kv_dtype)
    for code, numbers in zip(ptx.PTX_OF_HALVES[kv_dtype], expected, strict=True):
        found = run(code, words | others << 16)["$0"]
        for half, wanted in ((found & MASK, numbers), (found >> 16, np.roll(np.asarray(numbers), 12345))):
            np.testing.assert_array_equal(half.astype(np.uint16).view(np.float16), np.asarray(wanted))


@pytest.mark.parametrize(("kind", "dtype"), sorted(ptx.PTX_OF_NUMBERS))
def test_bytes_of_codes(kind, dtype):
    bytes_ = np.random.default_rng(0).permuted(np.tile(np.arange(256, dtype=np.uint8), (4, 1)), axis=1)
    register = sum(row.astype(np.uint32) << np.uint32(8 * place) for place, row in enumerate(bytes_))
    for place, code in enumerate(ptx.PTX_OF_NUMBERS[kind, dtype]):
        held = run(code, register)
        found = [part for name in ("$0", "$1") for part in lanes(held[name], OF_NAMES[dtype])]
        for row, numbers in zip(bytes_, found, strict=True):
            wanted = ptx.number(jnp.asarray(row.view(np.int8)), kind, place)
            np.testing.assert_array_equal(numbers, np.asarray(wanted, np.float64))


def test_powers_are_of_what_they_say():
    x, less = jnp.asarray([[3.0, -1e30], [0.5, 2.0]]), jnp.asarray([[1.0], [-2.0]])
    found = jax.jit(lambda x, less: ptx.exp2_of(x, 2.0, less))(x, less)
    np.testing.assert_allclose(found, [[32.0, 0.0], [8.0, 64.0]], rtol=1e-6)
