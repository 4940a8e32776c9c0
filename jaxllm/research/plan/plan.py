"""What a model will need on a GPU: programs compiled for it, and the pool that fits beside them."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable

import jax

from jaxllm.errors import CapacityError
from jaxllm.executor import memory
from jaxllm.executor.buckets import Buckets
from jaxllm.executor.kv.swapper import MAX_STAGED_BLOCKS, BlockSwapper
from jaxllm.executor.placement import ANYWHERE
from jaxllm.executor.programs import ProgramKey, state_shapes, step_program
from jaxllm.executor.sampling_programs import RowsKey, row_sizes, rows_program
from jaxllm.executor.slot_params import Sampling
from jaxllm.models import registry
from jaxllm.models.architecture import ModelConfig
from jaxllm.models.linear_formats import LinearFormats
from jaxllm.models.registry import PLAIN
from jaxllm.research.plan.target import Compiler, GPUTarget
from jaxllm.types import MAX_DECODE_STEPS


@dataclasses.dataclass(frozen=True)
class ProgramNeeds:
    """One compiled program. Bytes of arguments that are not updated in place, of those that are, and beside.

    `pool_copies` counts instructions of the optimised program that write an array of the pool's size without
    updating it in place.
    """

    name: str
    compile_seconds: float
    argument_bytes: int
    aliased_bytes: int
    temporary_bytes: int
    output_bytes: int
    pool_copies: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """What fits. `headroom_bytes` is left free of the memory that `utilization` allows.

    `weights` names the formats of those that are held as codes. `utilization` is a share of what JAX's
    allocator takes, which is `mem_fraction` of the device's memory.
    """

    device: str
    dtype: str
    weights: str
    kv_dtype: str
    implementation: str
    memory_bytes: int
    mem_fraction: float
    utilization: float
    weight_bytes: int
    block_bytes: int
    num_blocks: int
    staged_bytes: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    programs: tuple[ProgramNeeds, ...]

    @property
    def pool_bytes(self) -> int:
        """The KV pool."""
        return self.num_blocks * self.block_bytes

    @property
    def temporary_bytes(self) -> int:
        """The most any program needs beside its arguments; they run one after another."""
        return max(program.temporary_bytes + program.output_bytes for program in self.programs)

    @property
    def headroom_bytes(self) -> int:
        """What is left."""
        used = self.weight_bytes + self.pool_bytes + self.staged_bytes + self.temporary_bytes
        return int(self.memory_bytes * self.mem_fraction * self.utilization) - used

    @property
    def longest_requests(self) -> int:
        """Requests of `max_model_len` tokens that the pool holds at once."""
        return self.num_blocks // -(-self.max_model_len // self.block_size)


def make_plan(
    config: ModelConfig,
    target: GPUTarget,
    *,
    dtype: str,
    formats: LinearFormats = PLAIN,
    kv_dtype: str | None = None,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    block_size: int,
    num_gpu_blocks: int | None = None,
    utilization: float = 0.95,
    mem_fraction: float = 0.95,
    implementation: str = "triton",
    buckets: Buckets | None = None,
    every_bucket: bool = False,
    tensor_parallel: int = 1,
    tell: Callable[[str], None] = lambda message: None,
) -> Plan:
    """Compile a model's programs for `target`, and size the pool by what they need.

    Args:
        config: of the model.
        target: the GPU; it need not be there.
        dtype: of activations, of weights that are no codes, and of KV unless that is said.
        formats: of the weights of linear layers.
        kv_dtype: one of `jaxllm.system.dtypes.KV_DTYPES`; None is `dtype`.
        max_model_len: longest sequence, in tokens.
        max_num_seqs: most requests running at once.
        max_num_batched_tokens: most tokens of a step.
        block_size: tokens per KV block.
        num_gpu_blocks: blocks of the pool; None takes as many as fit.
        utilization: share of the allocator's memory to use, as `LLM(gpu_memory_utilization=...)`.
        mem_fraction: share of the device's memory that JAX's allocator takes
            (XLA_PYTHON_CLIENT_MEM_FRACTION, which an engine sets to 0.95 unless it is set).
        implementation: of attention; by default the one an engine takes.
        buckets: sizes to compile for; the default ladders if None.
        every_bucket: compile every size, not only the largest of each kind, for random requests.
        tensor_parallel: GPUs that share each layer; bytes are those of each.
        tell: is given a line for each program.

    Raises:
        ConfigError: JAX's CUDA plugin is missing, or so many GPUs cannot share the model.
        CapacityError: the weights, or the pool asked for, do not fit.
    """
    buckets = buckets or Buckets.make(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
    )
    kv_dtype = kv_dtype or dtype
    compiler = Compiler(target, tensor_parallel)
    placement = compiler.placement if tensor_parallel > 1 else ANYWHERE
    placement.check(config, formats)
    own = placement.share(config)
    weight_bytes = registry.weight_bytes(own, dtype, formats)
    block_bytes = memory.block_bytes(own, block_size, kv_dtype)
    allowed = int(target.memory_size * mem_fraction * utilization)
    needed = max_num_seqs * -(-max_model_len // block_size)
    guess = num_gpu_blocks or max(1, min(needed, (allowed - weight_bytes) * 3 // 4 // block_bytes))
    if weight_bytes + block_bytes > allowed:
        raise CapacityError(
            f"weights of {weight_bytes / 2**30:.1f} GiB and one KV block do not fit "
            f"{allowed / 2**30:.1f} GiB ({utilization:g} of {mem_fraction:g} of {target.description}); use a "
            "smaller model or dtype, a larger device, or raise XLA_PYTHON_CLIENT_MEM_FRACTION"
        )
    max_steps = min(MAX_DECODE_STEPS, block_size)
    loops = buckets.multi_step_sizes() if max_steps > 1 else ()
    shapes = [ProgramKey(rows) for rows in (buckets.decode if every_bucket else buckets.decode[-1:])]
    shapes += [ProgramKey(rows, 0, max_steps) for rows in (loops if every_bucket else loops[-1:])]
    sizes = buckets.sizes if every_bucket else buckets.sizes[-1:]
    shapes += [ProgramKey(size, buckets.max_chunks(size)) for size in sizes]
    keys = [shape._replace(sampling=Sampling.RANDOM) for shape in shapes]
    programs = []
    with compiler:

        def compiled(name: str, jitted: jax.stages.Wrapped, arguments: tuple[object, ...]) -> None:
            started = time.perf_counter()
            if not placement.is_shared:
                arguments = tuple(map(compiler.struct, arguments))
            program = compiler.compile(jitted, *arguments)
            needs = _needs(name, program, time.perf_counter() - started, guess * block_bytes, pool_shape)
            tell(
                f"{name}: {needs.compile_seconds:.1f} s, {needs.temporary_bytes / 2**20:.1f} MiB temporaries"
            )
            programs.append(needs)

        pool_shape: tuple[int, ...] = ()
        for key in keys:
            jitted, arguments = step_program(
                config,
                key,
                dtype=dtype,
                formats=formats,
                kv_dtype=kv_dtype,
                num_gpu_blocks=guess,
                block_size=block_size,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                implementation=implementation,
                placement=placement,
            )
            pool = state_shapes(
                own,
                dtype=dtype,
                kv_dtype=kv_dtype,
                num_gpu_blocks=guess,
                block_size=block_size,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
            ).pool
            pool_shape = pool.shape
            compiled(key.name, jitted, arguments)
        # Compiled only once a request asks for it, when the pool is there already.
        apart = RowsKey(row_sizes(max_num_seqs)[-1], Sampling.COMPLETE)
        jitted, arguments = rows_program(
            apart, vocab_size=config.vocab_size, max_num_seqs=max_num_seqs, max_model_len=max_model_len
        )
        compiled(apart.name, jitted, tuple(map(compiler.struct, arguments)))
        for name, jitted, swap_arguments in BlockSwapper.programs(
            pool, min(guess, max(1, needed // max_num_seqs)), placement
        ):
            compiled(name, jitted, swap_arguments)
    staged = 2 * MAX_STAGED_BLOCKS * block_bytes
    temporaries = max(program.temporary_bytes + program.output_bytes for program in programs)
    temporaries += max_num_seqs * config.vocab_size * 4  # logits of the step before, to be sampled apart
    fitting = (allowed - weight_bytes - staged - temporaries) // block_bytes
    if num_gpu_blocks is not None and num_gpu_blocks > fitting:
        raise CapacityError(
            f"a pool of {num_gpu_blocks} blocks takes {num_gpu_blocks * block_bytes / 2**30:.2f} GiB; beside "
            f"weights and temporaries {max(0, fitting)} blocks fit {utilization:g} of {target.description}"
        )
    if fitting < 1:
        raise CapacityError(
            f"no KV block fits beside weights of {weight_bytes / 2**30:.1f} GiB and temporaries of "
            f"{temporaries / 2**30:.1f} GiB; lower max_num_batched_tokens, or use a smaller model or dtype"
        )
    return Plan(
        device=f"{tensor_parallel} x {target.description}" if placement.is_shared else target.description,
        dtype=dtype,
        weights=formats.suffix.removeprefix("-"),
        kv_dtype=kv_dtype,
        implementation=implementation,
        memory_bytes=target.memory_size,
        mem_fraction=mem_fraction,
        utilization=utilization,
        weight_bytes=weight_bytes,
        block_bytes=block_bytes,
        num_blocks=num_gpu_blocks or min(fitting, needed),
        staged_bytes=staged,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        programs=tuple(programs),
    )


def _needs(
    name: str, program: jax.stages.Compiled, seconds: float, pool_bytes: int, pool_shape: tuple[int, ...]
) -> ProgramNeeds:
    analysis = program.memory_analysis()
    assert analysis is not None  # of every GPU program
    aliased = int(analysis.alias_size_in_bytes)
    return ProgramNeeds(
        name=name,
        compile_seconds=seconds,
        argument_bytes=int(analysis.argument_size_in_bytes) - aliased,
        aliased_bytes=aliased,
        temporary_bytes=int(analysis.temp_size_in_bytes),
        output_bytes=int(analysis.output_size_in_bytes) - aliased,
        pool_copies=count_pool_copies(program.as_text() or "", pool_shape),
    )


def count_pool_copies(hlo: str, pool_shape: tuple[int, ...]) -> int:
    """Copies of an array of the pool's shape in the text of an optimised program."""
    shape = re.escape("[" + ",".join(map(str, pool_shape)) + "]")
    return len(re.findall(rf"= \w+{shape}\S* copy(?:-start)?\(", hlo))
