"""The programs that swap blocks, compiled for a GPU that is not there."""

import re

import jax
import pytest

from jaxllm.executor.kv.swapper import BlockSwapper
from jaxllm.research.plan.target import Compiler, get_target

LLAMA_13B_BLOCK = (40, 2, 40, 16, 128)
OPT_2_7B_BLOCK = (32, 2, 32, 16, 80)


@pytest.mark.parametrize(
    ("block", "dtype"),
    [(LLAMA_13B_BLOCK, "bfloat16"), (LLAMA_13B_BLOCK, "float32"), (OPT_2_7B_BLOCK, "float16")],
    ids=str,
)
def test_swaps_move_whole_blocks_in_wide_words(block, dtype, tmp_path):
    """One kernel reads each byte once and writes it once, in words of 8 bytes at least."""
    pool = jax.ShapeDtypeStruct((64, *block), dtype)
    with Compiler(get_target("h100")) as compiler:
        for name, jitted, arguments in BlockSwapper.programs(pool, 16):
            folder = tmp_path / name.replace(" ", "-")
            options = {"xla_dump_to": str(folder), "xla_backend_optimization_level": 3}
            if jax.__version_info__ >= (0, 11):
                options["xla_dump_emitter_re"] = ".*"  # else it leaves the machine code out
            compiled = compiler.compile(jitted, *map(compiler.struct, arguments), options=options)
            assert compiled.memory_analysis().temp_size_in_bytes == 0
            code = "\n".join(path.read_text() for path in folder.glob("*.ptx"))
            assert code.count(".entry") == 1, f"{name} takes several kernels"
            # Block ids are the only things read that are not moved.
            reads, writes = accesses("ld", code), accesses("st", code)
            assert len(writes) == 1, f"{name} writes words of {writes} bits"
            assert writes[0] >= 64, f"{name} writes words of {writes} bits"
            assert reads == [32, *writes], f"{name} reads words of {reads} bits"


def accesses(what, code):
    """Bits of each access to the device's memory."""
    found = re.findall(rf"{what}\.global(?:\.nc)?(?:\.v(\d))?\.b(\d+)", code)
    return [int(count or 1) * int(bits) for count, bits in found]
