"""What whole steps run on a GPU that is not there: command buffers, loops, sorts, temporaries."""

import collections
import dataclasses
import re

import jax
import pytest
from published import LLAMA_3_8B

from jaxllm.executor.decode_steps import Lookup
from jaxllm.executor.programs import ProgramKey, step_program
from jaxllm.executor.sampling_programs import RowsKey, kind_of, rows_program
from jaxllm.executor.slot_params import Sampling
from jaxllm.models.config import config_from_dict
from jaxllm.research.plan.target import Compiler, get_target

MIB = 2**20
GREEDY, RANDOM = Sampling.GREEDY, Sampling.RANDOM
ONE_COMMAND_BUFFER = {"kCommandBuffer": 1}


@dataclasses.dataclass
class Found:
    """`thunks` counts what the host starts, by kind; `after_logits` names the kernels after the output head.

    `kernels` is what the device runs, `attention` what there is machine code of for attention; `loops`,
    `conditionals` and `sorts` are instructions of the program.
    """

    thunks: dict[str, int]
    kernels: int
    attention: list[str]
    after_logits: list[str]
    loops: int
    conditionals: int
    sorts: int
    temporary_bytes: int


@pytest.fixture
def compiled(tmp_path):
    def compile_step(key, num_layers=2):
        config = config_from_dict({**LLAMA_3_8B, "num_hidden_layers": num_layers})
        if isinstance(key, RowsKey):
            limits = {"max_num_seqs": 64, "max_model_len": 2048}
            jitted, arguments = rows_program(key, vocab_size=config.vocab_size, **limits)
        else:
            jitted, arguments = step_program(
                config,
                key,
                dtype="bfloat16",
                num_gpu_blocks=2048,
                block_size=16,
                max_model_len=2048,
                max_num_seqs=64 if key.max_chunks else max(64, key.rows),
                implementation="triton",
                lookup=Lookup(key.num_lookups, 2, 0 if key.takes_drafts else 4) if key.num_lookups else None,
            )
        folder = tmp_path / str(num_layers)
        with Compiler(get_target("h200")) as compiler:
            options = {"xla_dump_to": str(folder)}
            if jax.__version_info__ >= (0, 11):
                options["xla_dump_emitter_re"] = ".*"  # else it leaves the machine code out
            program = compiler.compile(jitted, *map(compiler.struct, arguments), options=options)
        *_, path = sorted(folder.glob("*thunk_sequence*.txt"))  # after passes, if they changed anything
        code = "".join(one.read_text() for one in folder.glob("*.ptx"))
        return found_in(path.read_text(), code, program)

    return compile_step


def found_in(thunks, code, program):
    text = program.as_text()
    thunk = re.compile(r"^( *)\d+: (k\w+) +\[.*?\] *(\w*)", re.MULTILINE)
    kinds = [kind for indent, kind, _ in thunk.findall(thunks) if not indent]
    kernels = [name for _, kind, name in thunk.findall(thunks) if kind != "kCommandBuffer"]
    products = [place for place, name in enumerate(kernels) if "gemm" in name] or [-1]
    return Found(
        thunks=dict(collections.Counter(kinds)),
        kernels=len(kernels),
        attention=sorted(re.findall(r"\.entry (paged_\w+)", code)),
        after_logits=kernels[products[-1] + 1 :],
        loops=text.count(" while("),
        conditionals=text.count(" conditional("),
        sorts=len(re.findall(r" sort\(|DeviceRadixSort", text)),
        temporary_bytes=program.memory_analysis().temp_size_in_bytes,
    )


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])
@pytest.mark.parametrize("rows", [64, 256])
def test_a_decode_is_one_command_buffer(compiled, rows, sampling):
    """Of all 32 layers, which share each kernel of attention, for one is traced, lowered and compiled.

    The largest score is found in two kernels, and a third one stores the token.
    """
    found = compiled(ProgramKey(rows, sampling=sampling), num_layers=32)
    assert found.thunks == ONE_COMMAND_BUFFER
    combining = ["paged_combine_chunks"] if rows == 64 else []
    assert found.attention == [*combining, "paged_decode_attention", "paged_rotate_and_write"]
    assert (found.loops, found.conditionals, found.sorts) == (0, 0, 0)
    assert len(found.after_logits) <= 3
    assert found.temporary_bytes < rows * LLAMA_3_8B["vocab_size"] * 4 + 32 * MIB


@pytest.mark.parametrize(
    ("key", "most"),
    [
        (ProgramKey(64, sampling=GREEDY), 10),
        (ProgramKey(256, sampling=GREEDY), 9),
        (ProgramKey(64, 8, sampling=GREEDY), 11),
        (ProgramKey(2048, 64, sampling=GREEDY), 11),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_layer_is_few_kernels(compiled, key, most):
    """Of a decode of 64 rows:

    1  product of q, k and v           6  sum and norm, which adds up the parts of 5
    2  rotation, KV write, which       7  product of gate and up
       adds up the parts of 1          8  silu and multiplication
    3  attention of chunks of rows     9  product of down
    4  the chunks combined            10  as 6
    5  product of o

    With 256 a row is one chunk; beside prompts there is their attention, in the same rows.
    """
    two, four = (compiled(key, num_layers) for num_layers in (2, 4))
    assert (four.kernels - two.kernels) / 2 <= most
    assert four.thunks == ONE_COMMAND_BUFFER
    assert four.conditionals == 0


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])
@pytest.mark.parametrize("rows", [64, 2048])
def test_a_step_with_prompts_is_one_command_buffer(compiled, rows, sampling):
    found = compiled(ProgramKey(rows, min(64, rows // 8), sampling=sampling))
    assert found.thunks == ONE_COMMAND_BUFFER
    assert (found.loops, found.conditionals, found.sorts) == (0, 0, 0)


@pytest.mark.parametrize(
    ("kind", "loops", "sorts", "arrays"),
    [(kind_of(Sampling.FILTERED), 2, 0, 3), (Sampling.COMPLETE, 2, 1, 5)],
    ids=["filtered", "complete"],
)
def test_sampling_apart_costs_what_it_needs(compiled, kind, loops, sorts, arrays):
    """A loop for each of top_k and top_p, a sort for the most likely tokens; `arrays` of the logits' size."""
    found = compiled(RowsKey(64, kind))
    assert (found.loops, found.conditionals, found.sorts) == (loops, 0, sorts)
    assert found.temporary_bytes < arrays * 64 * LLAMA_3_8B["vocab_size"] * 4 + 32 * MIB


def test_masks_are_applied_on_the_way(compiled):
    """Nothing but the masks themselves is read, or written, for them."""
    found = compiled(RowsKey(64, RANDOM | Sampling.MASKED))
    assert (found.loops, found.conditionals, found.sorts) == (0, 0, 0)
    assert found.temporary_bytes < 64 * LLAMA_3_8B["vocab_size"] * 4 + 32 * MIB


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_several_decodes_are_one_loop(compiled, sampling):
    found = compiled(ProgramKey(16, 0, 8, sampling))
    assert (found.loops, found.conditionals, found.sorts) == (1, 0, 0)
    assert found.temporary_bytes < 16 * LLAMA_3_8B["vocab_size"] * 4 + 32 * MIB


def test_several_decodes_with_drafts_are_one_loop(compiled):
    """Nor does the host decide in between how many rows an iteration has."""
    found = compiled(ProgramKey(16, 0, 8, num_lookups=4))
    assert (found.loops, found.conditionals, found.sorts) == (1, 0, 0)
    assert found.temporary_bytes < 80 * LLAMA_3_8B["vocab_size"] * 4 + 64 * MIB


def test_a_verification_of_drafts_that_are_given_has_no_loop(compiled):
    """So that the host can send the next one before: it waits for no condition."""
    found = compiled(ProgramKey(16, num_lookups=4))
    assert (found.loops, found.conditionals, found.sorts) == (0, 0, 0)
    assert found.temporary_bytes < 80 * LLAMA_3_8B["vocab_size"] * 4 + 64 * MIB
