"""The handlers that XLA calls, compiled for a shape, and the functions that compute their items of work."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit

from jaxllm.pallas_kernels.native import attention as items
from jaxllm.pallas_kernels.native import ffi, gates, largest, norms, products, threads, writes
from jaxllm.pallas_kernels.native.memory import free, int32s, int64s, malloc, memset
from jaxllm.pallas_kernels.native.shape import (
    CODES,
    PANEL,
    STORED,
    AttentionShape,
    LinearShape,
    RowsShape,
    items_symbol,
)

# Arguments of a call.
(
    _Q, _COS, _SIN, _POOL, _SLOTS, _DECODE_TABLES, _DECODE_LENGTHS, _PROMPT_TABLES, _QUERY_STARTS,
    _PROMPT_LENGTHS, _NUM_SEQS, _NUMBERS, _FACTORS,
) = range(13)  # fmt: skip
_ATTEND, _WRITE = 0, 1
_ITEMS_PER_THREAD, _MOST_PANELS = 4, 8
_MOST_ROUNDED_ALONE = 4  # items of rows that are rounded by one thread: others would come too late


def attention_worker(shape: AttentionShape) -> Any:
    """The C function that computes items of attention, and stores keys and values."""
    decode, prompt, write = items.decode_item(shape), items.prompt_item(shape), writes.write_item(shape)

    def run_item(job, scratch, index):  # type: ignore[no-untyped-def]
        words = int64s(job)
        if words[items.KIND] == _WRITE:
            write(job, index)
        elif index < words[items.NUM_DECODE_ITEMS]:
            decode(job, scratch, index)
        else:  # the last tiles first: they see the most keys
            prompt(job, scratch, words[threads.COUNT] - 1 - index)

    return threads.worker(run_item)


def attention_handler(shape: AttentionShape) -> Any:
    """A handler whose items the C function called `items_symbol(shape)` computes.

    With two results its first argument is a projection, whose queries it rotates and puts in the second
    result, and whose keys and values it stores in the pool, the first result and an argument at once. With
    one its first argument are the queries, and the pool is only read.
    """
    group, head_dim, _ = shape
    per_tile, scratch_of_head, least_scratch = items.tile_rows(group), *items.scratch_sizes(shape)
    task = ffi.c_address(items_symbol(shape))

    @njit(error_model="numpy")
    def new_job(frame, num_items, num_threads):  # type: ignore[no-untyped-def]
        last = ffi.num_results(frame) - 1
        num_heads = ffi.result_dimension(frame, last, 1)
        job = threads.new_job(num_items, num_threads, max(num_heads * scratch_of_head, least_scratch))
        if job == 0:
            return job
        words = int64s(job)
        words[items.POOL] = ffi.argument(frame, _POOL)
        words[items.OUT] = ffi.result(frame, last)
        words[items.Q] = words[items.OUT] if last == 1 else ffi.argument(frame, _Q)
        words[items.LAYER] = int32s(ffi.argument(frame, _NUMBERS))[0]
        words[items.WINDOW] = int32s(ffi.argument(frame, _NUMBERS))[1]
        words[items.NUM_BLOCKS] = ffi.dimension(frame, _POOL, 0)
        words[items.NUM_LAYERS] = ffi.dimension(frame, _POOL, 1)
        words[items.NUM_KV_HEADS] = ffi.dimension(frame, _POOL, 3)
        words[items.BLOCK_SIZE] = ffi.dimension(frame, _POOL, 4)
        words[items.DECODE_TABLES] = ffi.argument(frame, _DECODE_TABLES)
        words[items.DECODE_LENGTHS] = ffi.argument(frame, _DECODE_LENGTHS)
        words[items.DECODE_WIDTH] = ffi.dimension(frame, _DECODE_TABLES, 1)
        words[items.PROMPT_TABLES] = ffi.argument(frame, _PROMPT_TABLES)
        words[items.PROMPT_LENGTHS] = ffi.argument(frame, _PROMPT_LENGTHS)
        words[items.PROMPT_WIDTH] = ffi.dimension(frame, _PROMPT_TABLES, 1)
        words[items.QUERY_STARTS] = ffi.argument(frame, _QUERY_STARTS)
        words[items.SCALE_AND_CAP] = ffi.argument(frame, _FACTORS)
        return job

    @njit(error_model="numpy")
    def stored(frame, num_rows, num_threads):  # type: ignore[no-untyped-def]
        num_items = (num_rows + writes.WRITTEN_AT_ONCE - 1) // writes.WRITTEN_AT_ONCE
        job = new_job(frame, num_items, num_threads)
        if job == 0:
            return False
        words = int64s(job)
        words[items.KIND] = _WRITE
        words[items.QKV] = ffi.argument(frame, _Q)
        if 2 * ffi.dimension(frame, _COS, 1) == head_dim:
            words[items.COS], words[items.SIN] = ffi.argument(frame, _COS), ffi.argument(frame, _SIN)
        words[items.SLOTS], words[items.NUM_ROWS] = ffi.argument(frame, _SLOTS), num_rows
        threads.run(frame, job, task(), num_threads)
        return True

    @cfunc(ffi.HANDLER)
    def attend(frame):  # type: ignore[no-untyped-def]
        if ffi.asks_for_metadata(frame):
            return 0
        num_threads = threads.num_threads(frame)
        num_rows = ffi.dimension(frame, _Q, 0)
        if ffi.num_results(frame) == 2 and not stored(frame, num_rows, num_threads):
            return ffi.out_of_memory(frame)
        starts = int32s(ffi.argument(frame, _QUERY_STARTS))
        num_seqs = np.int64(int32s(ffi.argument(frame, _NUM_SEQS))[0])
        num_decodes, num_tiles, end = ffi.dimension(frame, _DECODE_LENGTHS, 0), np.int64(0), np.int64(0)
        if num_seqs > 0:
            num_decodes = min(num_decodes, np.int64(starts[0]))
            end = np.int64(starts[num_seqs])
        for seq in range(num_seqs):
            num_tiles += (np.int64(starts[seq + 1]) - np.int64(starts[seq]) + per_tile - 1) // per_tile
        num_decodes = min(num_decodes, num_rows)
        num_kv_heads = ffi.dimension(frame, _POOL, 3)
        heads = num_kv_heads if num_decodes >= 4 * num_threads else np.int64(1)
        num_items = num_decodes * (num_kv_heads // heads)
        last = ffi.num_results(frame) - 1
        row_bytes = 4 * ffi.result_dimension(frame, last, 1) * head_dim
        out = ffi.result(frame, last)
        covered = max(num_decodes, end)
        first = np.int64(starts[0]) if num_seqs > 0 else covered
        if first > num_decodes:
            memset(out + num_decodes * row_bytes, 0, (first - num_decodes) * row_bytes)
        memset(out + covered * row_bytes, 0, (num_rows - covered) * row_bytes)
        if num_items + num_tiles > 0:
            job = new_job(frame, num_items + num_tiles * num_kv_heads, num_threads)
            if job == 0:
                return ffi.out_of_memory(frame)
            words = int64s(job)
            words[items.NUM_DECODE_ITEMS], words[items.HEADS_PER_ITEM] = num_items, heads
            threads.run(frame, job, task(), num_threads)
        return 0

    return attend


def rows_worker(shape: RowsShape) -> Any:
    """The C function that computes items of an operation on rows."""
    item = _ROWS[shape.operation].item(shape)

    def run_item(job, scratch, index):  # type: ignore[no-untyped-def]
        item(job, scratch, index)

    return threads.worker(run_item)


def rows_handler(shape: RowsShape) -> Any:
    """A handler of how many rows count, and what the operation takes, of which the first is `[rows, ...]`."""
    task, operation = ffi.c_address(items_symbol(shape)), _ROWS[shape.operation]
    rows_at_once, describe = operation.ROWS_AT_ONCE, operation.describe

    @cfunc(ffi.HANDLER)
    def handle(frame):  # type: ignore[no-untyped-def]
        if ffi.asks_for_metadata(frame):
            return 0
        num_threads = threads.num_threads(frame)
        num_rows = min(ffi.dimension(frame, 1, 0), np.int64(int32s(ffi.argument(frame, 0))[0]))
        if num_rows <= 0:
            return 0
        num_items = (num_rows + rows_at_once - 1) // rows_at_once
        job = threads.new_job(num_items, num_threads, 64)
        if job == 0:
            return ffi.out_of_memory(frame)
        words = int64s(job)
        words[threads.NUM_ROWS] = num_rows
        describe(frame, words)
        threads.run(frame, job, task(), num_threads)
        return 0

    return handle


_ROWS: dict[str, Any] = {"gate": gates, "rms_norm": norms, "layer_norm": norms, "argmax": largest}


def linear_worker(shape: LinearShape) -> Any:
    """The C function that computes items of a product, or rounds rows before one."""
    item, rounding = products.linear_item(shape), products.rounding_item()
    is_float = shape.numbers != "int8"

    def run_item(job, scratch, index):  # type: ignore[no-untyped-def]
        if is_float or int64s(job)[products.ROUNDED_FROM] == 0:
            item(job, scratch, index)
        else:
            rounding(job, scratch, index)

    return threads.worker(run_item)


def linear_handler(shape: LinearShape) -> Any:
    """A handler of `x [rows, in]`, `panels [out / 32, steps, 32]`, how many rows count, and `bias [out]`.

    It makes `[rows, out]`. The bias may be empty; one more argument says whether the results are raised to 0.
    Of int8 two more are the scales and sums of the weights, `[out / 32, 32]`; of codes their scales and
    offsets, `[out / 32, in / group, 32]`, of which the latter may be empty.
    """
    task, rows_of_tile = ffi.c_address(items_symbol(shape)), shape.rows
    is_float, is_coded, rows_at_once = shape.numbers != "int8", shape.numbers in CODES, products.ROWS_AT_ONCE
    is_stored = shape.numbers in STORED

    @njit(error_model="numpy")
    def new_job(frame, num_rows, num_items, num_threads, scratch, x):  # type: ignore[no-untyped-def]
        job = threads.new_job(num_items, num_threads, scratch)
        if job == 0:
            return job
        words = int64s(job)
        words[products.X], words[products.NUM_ROWS] = x, num_rows
        words[products.PANELS], words[products.STEPS] = ffi.argument(frame, 1), ffi.dimension(frame, 1, 1)
        words[products.IN_FEATURES] = ffi.dimension(frame, 0, 1)
        words[products.ROW_SCALES] = x + 4 * num_rows * words[products.STEPS]
        return job

    @njit(error_model="numpy")
    def rounded(frame, num_rows, num_threads):  # type: ignore[no-untyped-def]
        """Address of the rows rounded to int8, and their scales."""
        memory = malloc(4 * num_rows * (ffi.dimension(frame, 1, 1) + 1))
        if memory == 0:
            return memory
        num_items = (num_rows + rows_at_once - 1) // rows_at_once
        job = new_job(frame, num_rows, num_items, num_threads, 64, memory)
        if job == 0:
            free(memory)
            return job
        words = int64s(job)
        words[products.ROUNDED_FROM] = ffi.argument(frame, 0)
        threads.run(frame, job, task(), num_threads if num_items >= _MOST_ROUNDED_ALONE else np.int64(1))
        return memory

    @cfunc(ffi.HANDLER)
    def multiply(frame):  # type: ignore[no-untyped-def]
        if ffi.asks_for_metadata(frame):
            return 0
        num_threads = threads.num_threads(frame)
        num_rows, num_panels = ffi.dimension(frame, 0, 0), ffi.dimension(frame, 1, 0)
        num_rows = min(num_rows, np.int64(int32s(ffi.argument(frame, 2))[0]))
        if num_rows <= 0:
            return 0
        num_items = _ITEMS_PER_THREAD * num_threads
        panels_per_item = min(max(num_panels // num_items, 1), _MOST_PANELS)
        num_groups = (num_panels + panels_per_item - 1) // panels_per_item
        num_parts = (num_items + num_groups - 1) // num_groups
        num_parts = min(num_parts, (num_rows + rows_of_tile - 1) // rows_of_tile)
        rows_per_item = (num_rows + num_parts - 1) // num_parts
        num_parts = (num_rows + rows_per_item - 1) // rows_per_item
        x = ffi.argument(frame, 0) if is_float else rounded(frame, num_rows, num_threads)
        if x == 0:
            return ffi.out_of_memory(frame)
        scratch = (rows_per_item + 1) * 4 * PANEL
        if is_stored:
            scratch += (products.DECODED_AT_ONCE + 1) * 4 * PANEL
        job = new_job(frame, num_rows, num_groups * num_parts, num_threads, scratch, x)
        if job == 0:
            if not is_float:
                free(x)
            return ffi.out_of_memory(frame)
        words = int64s(job)
        words[products.OUT], words[products.OUT_FEATURES] = (
            ffi.result(frame, 0),
            ffi.result_dimension(frame, 0, 1),
        )
        words[products.NUM_PANELS], words[products.PANELS_PER_ITEM] = num_panels, panels_per_item
        words[products.NUM_PARTS], words[products.ROWS_PER_ITEM] = num_parts, rows_per_item
        if ffi.dimension(frame, 3, 0) > 0:
            words[products.BIAS] = ffi.argument(frame, 3)
        words[products.IS_RELU] = np.int64(int32s(ffi.argument(frame, 4))[0])
        if not is_float:
            words[products.SCALES], words[products.SUMS] = ffi.argument(frame, 5), ffi.argument(frame, 6)
        if is_coded:
            words[products.SCALES] = ffi.argument(frame, 5)
            words[products.GROUP] = ffi.dimension(frame, 0, 1) // ffi.dimension(frame, 5, 1)
            if ffi.dimension(frame, 6, 0) > 0:
                words[products.OFFSETS] = ffi.argument(frame, 6)
        threads.run(frame, job, task(), num_threads)
        if not is_float:
            free(x)
        return 0

    return multiply
