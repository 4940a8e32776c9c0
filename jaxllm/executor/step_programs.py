"""The programs of an engine's steps, compiled in the order in which they are needed, beside all else."""

from __future__ import annotations

import collections
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxllm import pallas_kernels
from jaxllm.errors import is_outside
from jaxllm.executor import compile_stats
from jaxllm.executor.config import ExecutorConfig
from jaxllm.executor.fastest import FASTEST
from jaxllm.executor.placement import ON_EACH, Placement
from jaxllm.executor.programs import CompiledProgram, ProgramKey, step_program
from jaxllm.executor.sampling_programs import RowsKey, TakeKey, rows_program, take_program
from jaxllm.executor.shared_programs import SHARED
from jaxllm.executor.slot_params import Sampling
from jaxllm.executor.stages import LoweredStages, StagedProgram, lower_stages
from jaxllm.models.architecture import ARCHITECTURES, ModelConfig
from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.settings import under_jax_defaults
from jaxllm.system.threads import WorkingThread, is_interpreter_exiting

_logger = logging.getLogger(__name__)
_MOST_TRIES = 2
_MOST_THREADS = 4  # XLA compiles outside the interpreter lock, and takes memory for each program


class CompileProgress(NamedTuple):
    """Programs that are compiled, all that are known to be needed, and seconds since the first was begun."""

    num_compiled: int
    num_programs: int
    seconds: float


Key = ProgramKey | RowsKey | TakeKey
Program = jax.stages.Compiled | StagedProgram


class StepPrograms:
    """Compiles the programs of steps, and of what is sampled apart, in threads; others when they are needed.

    Shapes are all it takes, so that this may begin before the weights are loaded. A step waits for its own
    program only. Those that an engine of this process had before, made from the same, are taken as they are;
    but not with a user's own processors, attention or architecture, which may have changed. All have the
    precision of products that JAX is set to where this is made, whatever thread compiles them.

    Args:
        model_config: the model.
        config: sizes of its arrays and programs.
        placement: where to compile for, and to run.
        elsewhere: has other processes compile a program, too; what it returns waits until they have.

    Attributes:
        default: the attention's implementation unless another is asked for or chosen.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        config: ExecutorConfig,
        placement: Placement,
        elsewhere: Callable[[Key], Callable[[], None]] | None = None,
    ) -> None:
        self._elsewhere = elsewhere
        compile_stats.start()
        self._model_config, self._config, self._placement = model_config, config, placement
        self._precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
        self._platform, self._own = placement.devices[0].platform, placement.share(model_config)
        shapes = config.program_keys(self._platform)
        self.keys: list[Key] = [*shapes, *(config.sampling_keys() if config.warms_sampling else ())]
        self.shapes = frozenset(shape_of(key) for key in shapes)
        self.chosen: dict[ProgramKey, str] = {}
        self._is_ours = (
            elsewhere is None
            and not config.logits_processors
            and ":" not in (config.implementation or "")
            and not is_outside(model_config)
            and ARCHITECTURES[model_config.architecture].model.__module__.startswith("jaxllm.")
        )
        self.default, self._why_default = pallas_kernels.settle_implementation(
            self._own.num_heads,
            self._own.num_kv_heads,
            self._own.head_dim,
            config.block_size,
            kv_dtype=config.kv_dtype or config.dtype,
        )
        self._changed = threading.Condition()
        self._waiting: collections.deque[Key] = collections.deque()
        self._under_way: set[Key] = set()
        self._urgent: set[Key] = set()  # of those under way or waiting, what somebody waits for
        self._failed: dict[Key, list[Exception]] = {}
        self._compiled: dict[Key, Program] = {}
        self._seconds: dict[Key, float] = {}
        self._num_threads = 0
        self._is_closed = False
        self._began, self._ended = 0.0, 0.0

    @property
    def compiled(self) -> Mapping[Key, Program]:
        """Those that are compiled; `memory_analysis()` of each tells what it needs."""
        with self._changed:
            return dict(self._compiled)

    @property
    def is_settled(self) -> bool:
        """Whether nothing is being compiled, nor waits for it."""
        return not (self._waiting or self._under_way)

    def has(self, key: Key) -> bool:
        """Whether a program is compiled."""
        return key in self._compiled

    def expects(self, key: Key) -> bool:
        """Whether a program is compiled, or will be as soon as those that somebody waits for."""
        with self._changed:
            return key in self._compiled or key in self._urgent

    def fitting(self, key: ProgramKey) -> ProgramKey:
        """The program itself, or the smallest one that can do as much and is there, or comes, before it."""
        if self.has(key):
            return key
        with self._changed:
            is_begun, coming = key in self._under_way, self._under_way - self._failed.keys()
        if fitting := _covering(self.compiled, key):
            self.prepare([key], is_urgent=False)
        elif not is_begun:
            fitting = _covering(coming, key)
        return min(fitting, default=key)

    def prepare(self, keys: Sequence[Key], *, is_urgent: bool = True) -> bool:
        """Whether programs are compiled; what is missing is compiled next, beside all else.

        If it is not urgent it is compiled once nobody waits for any other.

        Raises:
            Exception: what XLA raised, if one could not be compiled when it was tried, and tried again.
        """
        if all(self.has(key) for key in keys):
            return True
        with self._changed:
            known = {*self._compiled, *self._under_way, *self._waiting}
            missing = [key for key in keys if key not in known]
            for key in missing:
                if len(errors := self._failed.get(key, [])) >= _MOST_TRIES:
                    raise errors[-1]
            self._waiting.extend(missing)
            if is_urgent:
                self._urgent.update(key for key in keys if key not in self._compiled)
                self._put_off_special()
            if missing:
                self._start_threads(min(self._num_threads + 1, os.cpu_count() or 1))
            self._changed.notify_all()
        return False

    def wait_for_any(self, seconds: float) -> None:
        """Until one of those under way is compiled, or cannot be; at most so long."""
        with self._changed:
            self._changed.wait(seconds)

    def progress(self) -> CompileProgress:
        """How far it is."""
        with self._changed:
            return self._progress()

    def begin(self, num_threads: int | None = None) -> None:
        """Compile what greedy and random steps need, in so many threads.

        By default half the processor's cores do it, at most four, beside an engine that already serves.
        """
        if num_threads is None:
            num_threads = (os.cpu_count() or 1) // 2
        if (self._config.implementation or self.default) == "native":
            model = self._own
            native.prepare(
                model.num_heads // model.num_kv_heads,
                model.head_dim,
                self._config.kv_dtype or self._config.dtype,
                is_gated=ARCHITECTURES[model.architecture].has_gated_mlp,
                products=self._config.formats.products,
            )
        with self._changed:
            if not self._is_closed:
                self._share()
            known = {*self._compiled, *self._under_way, *self._waiting}
            self._waiting.extend(key for key in self.keys if key not in known)
            self._start_threads(num_threads)

    def wait(self, on_progress: Callable[[CompileProgress], None] | None = None) -> None:
        """Until all that was begun is compiled, by as many threads as there are cores, at most four.

        Raises:
            Exception: what XLA raised, if a program cannot be compiled.
        """
        self.begin(os.cpu_count() or 1)
        with self._changed:
            while not self.is_settled:
                self._changed.wait()
                if on_progress is not None:
                    on_progress(self._progress())
        for key in self.keys:
            self.get(key)

    def get(self, key: Key, then: Sequence[Key] = ()) -> Program:
        """A program, compiled at once if it is not yet; `then` those that are likely to be needed next.

        Raises:
            Exception: what XLA raised, if it cannot be compiled.
        """
        program = self._compiled.get(key)
        if program is not None:
            return program
        with self._changed:
            while True:
                program = self._compiled.get(key)
                if program is not None:
                    return program
                self._urgent.update((key, *(one for one in then if one in self._waiting)))
                if key not in self._under_way:
                    break
                self._changed.wait()
            if key in self._waiting:
                self._waiting.remove(key)
            self._under_way.add(key)
        return self._compile(key)

    def close(self) -> None:
        """Compile nothing more that nobody waits for, and forget the programs."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._compiled.clear()
            self._changed.notify_all()

    def implementation(self, key: ProgramKey) -> str:
        """Of the attention in a program."""
        if self._config.implementation == FASTEST:
            return self.chosen.get(shape_of(key), self.default)
        return self._config.implementation or self.default

    def report(self) -> list[CompiledProgram]:
        """Every compiled program, with seconds and memory. Threads work side by side, so seconds overlap."""
        report = []
        for key, program in self.compiled.items():
            if not isinstance(key, ProgramKey):
                continue
            analysis = program.memory_analysis()
            sizes = [
                None if analysis is None else int(getattr(analysis, f"{name}_size_in_bytes"))
                for name in ("argument", "alias", "temp", "output")
            ]
            reason = None if self._config.implementation else self._why_default
            seconds = self._seconds[key]
            report.append(CompiledProgram(key, self.implementation(key), reason, seconds, *sizes))
        return report

    def _start_threads(self, num_threads: int) -> None:
        while self._num_threads < min(num_threads, _MOST_THREADS, len(self._waiting)) or (
            self._waiting and not self._num_threads
        ):
            self._num_threads += 1
            WorkingThread(target=self._work, name="jaxllm-compile").start()

    def _work(self) -> None:
        while True:
            with self._changed:
                if self._is_closed or is_interpreter_exiting():
                    self._waiting.clear()
                if not self._waiting:
                    self._num_threads -= 1
                    self._changed.notify_all()
                    return
                key = self._next()
                if key is None:
                    self._changed.wait()
                    continue
                self._waiting.remove(key)
                self._under_way.add(key)
            try:
                self._compile(key)
            except Exception as error:
                _logger.warning("%s: %s; to be tried again by the step that needs it", key.name, error)

    def _next(self) -> Key | None:
        """Of those that wait what to compile next: nothing, while others compile what somebody waits for.

        What is sampled apart comes first: the kernels of steps may not be there yet.
        """
        urgent = [key for key in self._waiting if key in self._urgent]
        if urgent:
            return min(urgent, key=lambda key: isinstance(key, ProgramKey))
        return self._waiting[0] if self._urgent.isdisjoint(self._under_way) else None

    def _put_off_special(self) -> None:
        """Let nobody wait for a program of which one that can do more comes as soon."""
        for key in self._urgent - self._under_way:
            if isinstance(key, RowsKey) and key.sampling != Sampling.COMPLETE:
                complete = RowsKey(key.rows, Sampling.COMPLETE)
                if key.sampling in Sampling.COMPLETE and complete in self._urgent:
                    self._urgent.discard(key)

    @under_jax_defaults
    def _share(self) -> None:
        """Take what another engine had of those that are needed, but for what is begun."""
        with jax.default_matmul_precision(self._precision):
            found = {key: SHARED.find(self._made_from(key)) for key in self.keys}
        for key, program in found.items():
            if program is not None and key not in self._under_way and key not in self._waiting:
                self._compiled.setdefault(key, program)
                self._seconds.setdefault(key, 0.0)

    def _made_from(self, key: Key) -> Hashable:
        make, options = self._recipe(key)
        if not self._is_ours:
            return None
        return make, key, self._placement, tuple(options.items()), repr(options), SHARED.settings()

    @under_jax_defaults
    def _compile(self, key: Key) -> Program:
        started = time.perf_counter()
        self._began = self._began or started
        program = None
        try:
            wait = None if self._elsewhere is None else self._elsewhere(key)
            compiled = self._shared_or_made(key)
            if wait is not None:
                wait()
            program = compiled
            return program
        except Exception as error:
            with self._changed:
                self._failed.setdefault(key, []).append(error)
            raise
        finally:
            with self._changed:
                self._ended = time.perf_counter()
                self._under_way.discard(key)
                self._urgent.discard(key)
                if program is not None and not self._is_closed:
                    self._compiled[key], self._seconds[key] = program, self._ended - started
                    progress = self._progress()
                    _logger.info(
                        "program %d of %d, %.0f s: %s",
                        progress.num_compiled,
                        progress.num_programs,
                        progress.seconds,
                        key.name,
                    )
                self._changed.notify_all()

    def _shared_or_made(self, key: Key) -> Program:
        """What was kept, or else is compiled and kept, unless what it was made from has changed meanwhile."""
        with jax.default_matmul_precision(self._precision):
            made_from = self._made_from(key)
            program: Program = SHARED.find(made_from) or self._lower(key).compile()
            if made_from == self._made_from(key):
                SHARED.keep(made_from, program)
        return program

    def _lower(self, key: Key) -> jax.stages.Lowered | LoweredStages:
        make, options = self._recipe(key)
        made = make(key=key, **options)
        if isinstance(made, LoweredStages):
            return made
        jitted, arguments = made
        if make is not step_program:
            stage = self._placement.stages[0]
            specs: Any = (stage.logits_spec(self._model_config), ON_EACH) if make is take_program else ON_EACH
            arguments = stage.structs(arguments, specs)
        return jitted.lower(*arguments)

    def _recipe(self, key: Key) -> tuple[Callable[..., Any], dict[str, Any]]:
        """What makes a program, and all that it is given beside the key."""
        config, vocab_size = self._config, self._model_config.vocab_size
        if isinstance(key, TakeKey):
            sharding = self._placement.stages[0].sharding()
            return take_program, {"num_tokens": self._own.num_head_rows, "sharding": sharding}
        sizes: dict[str, Any] = {
            "max_model_len": config.max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "processors": config.logits_processors,
        }
        if isinstance(key, RowsKey):
            is_lazy = self._platform == "cpu"  # elsewhere the host would wait for each condition
            sizes |= {"vocab_size": vocab_size, "is_native": config.formats.is_native, "is_lazy": is_lazy}
            return rows_program, sizes
        sizes |= {
            "model_config": self._model_config,
            "dtype": config.dtype,
            "num_gpu_blocks": config.num_gpu_blocks,
            "block_size": config.block_size,
            "kv_dtype": config.kv_dtype,
            "implementation": self.implementation(key),
            "formats": config.formats,
            "placement": self._placement,
        }
        if self._placement.num_stages > 1:
            return lower_stages, sizes
        of_drafts = {
            "num_hidden": config.num_hidden,
            "kept_layers": config.kept_layers,
            "lookup": config.lookup,
        }
        return step_program, sizes | of_drafts

    def _progress(self) -> CompileProgress:
        num_left = len(self._waiting) + len(self._under_way)
        seconds = (time.perf_counter() if num_left else self._ended) - self._began if self._began else 0.0
        return CompileProgress(len(self._compiled), len(self._compiled) + num_left, seconds)


def _covering(keys: Iterable[Key], key: ProgramKey) -> list[ProgramKey]:
    """Of some programs those that can do as much as another."""
    return [one for one in keys if isinstance(one, ProgramKey) and one.covers(key)]


def shape_of(key: ProgramKey) -> ProgramKey:
    """A program's key apart from `sampling`."""
    return key._replace(sampling=Sampling.GREEDY)
