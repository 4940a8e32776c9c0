"""Makes machine code known to XLA, if XLA calls it as that code expects."""

from __future__ import annotations

import ctypes
import functools
import pathlib
import re

import jax

MAJOR, MINOR = 0, 3
"""Version of XLA's foreign functions that the kernels were written for."""


@functools.cache
def why_not_callable() -> str | None:
    """What keeps this jaxlib from calling the kernels; None if it can."""
    header = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    try:
        found = re.findall(r"define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)", header.read_text())
    except OSError as error:
        return f"cannot read {header.name} of this jaxlib: {error.strerror}"
    if len(found) != 2 or int(found[0]) != MAJOR or int(found[1]) < MINOR:
        return f"this jaxlib's foreign functions have version {'.'.join(found)}, not {MAJOR}.{MINOR} or later"
    return None


def register(name: str, address: int) -> None:
    """Let XLA's CPU programs call the handler at an address by a name."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    jax.ffi.register_ffi_target(name, new(address, None, None), platform="cpu")
