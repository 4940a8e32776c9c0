"""Large arrays in huge pages: reading a pool of KV in scattered blocks misses the cache of addresses less."""

from __future__ import annotations

import ctypes
import sys

import jax

_PAGE = 2 * 2**20
_DONT_NEED, _HUGE_PAGES, _COLLAPSE = 4, 14, 25  # advice of Linux's `madvise`


def use_huge_pages(array: jax.Array, *, is_zero: bool = False) -> None:
    """Back an array of a CPU by huge pages, where Linux has any to give; what it holds stays.

    Args:
        array: which lives on a CPU, and which nothing writes meanwhile.
        is_zero: it holds zeros only. Then its pages are given back, and come, as huge ones and zero again,
            when they are first used; else they are copied now.
    """
    if sys.platform != "linux":
        return
    start = array.unsafe_buffer_pointer()
    first, end = -(-start // _PAGE) * _PAGE, (start + array.nbytes) // _PAGE * _PAGE
    if end <= first:
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    if madvise(first, end - first, _HUGE_PAGES) == 0:
        madvise(first, end - first, _DONT_NEED if is_zero else _COLLAPSE)
