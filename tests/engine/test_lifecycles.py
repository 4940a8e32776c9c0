"""How engines begin and end: interrupted, forked, dropped, closed, and beside an interpreter that exits."""

import _thread
import contextlib
import dis
import gc
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import weakref

import jax
import pytest
from engine_helpers import make_llm, needs_late_threads
from variants import golden_checkpoint, golden_data

import jaxllm
from jaxllm import SamplingParams
from jaxllm.engine import assembly
from jaxllm.engine import owner as engine_owner
from jaxllm.engine import thread as engine_thread
from jaxllm.errors import EngineError
from jaxllm.system import forks

NAME = "llama_gqa"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    return make_llm(golden_checkpoint(NAME))


@pytest.fixture(scope="module")
def prompt():
    return golden_data(NAME)["prompts"][0]


@pytest.fixture(scope="module")
def expected():
    return golden_data(NAME)["greedy"][0][:12]


def engine_threads():
    return [one for one in threading.enumerate() if one.name == "jaxllm-engine" and one.is_alive()]


def run_python(code, *arguments, timeout=300):
    """A process of its own; its `make_llm` and `golden_checkpoint` are the tests'."""
    here = os.path.dirname(os.path.dirname(__file__))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([here, *sys.path])}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


# Ctrl-C while the thread starts


def test_threads_whose_start_was_interrupted_end_when_they_begin(llm, prompt, expected, monkeypatch):
    gate, begun = threading.Event(), []
    while engine_threads():
        time.sleep(0.01)  # that of an earlier test would do the work

    def start_late(bootstrap, arguments):
        def wait_and_begin():
            gate.wait(60)
            begun.append(threading.get_ident())
            bootstrap(*arguments)

        _thread.start_new_thread(wait_and_begin, ())
        raise KeyboardInterrupt  # the thread exists, and does not know itself yet

    with monkeypatch.context() as patch:
        patch.setattr(threading, "_start_new_thread", start_late)
        for _ in range(8):
            with pytest.raises(KeyboardInterrupt):
                llm.generate([prompt], GREEDY, use_tqdm=False)
    stream = llm.stream([prompt], GREEDY)
    next(stream)
    gate.set()
    while len(begun) < 8 or len(engine_threads()) > 1:
        time.sleep(0.01)  # those that were interrupted end by themselves
    assert list(stream)[-1].token_ids == expected
    llm.engine.add_request("mine", prompt, GREEDY)  # the engine is nobody's
    while llm.engine.has_unfinished_requests:
        llm.engine.step()


def interrupter(number):
    """A trace function that raises KeyboardInterrupt at a place of starting a thread, and if it has.

    The interpreter looks for signals where calls return, functions begin and loops go round.
    """
    files = {module.__file__ for module in (engine_owner, engine_thread)}
    last, seen = {}, []
    sys._getframe().f_trace_opcodes = True  # Python 3.12 traces them if anybody asked before tracing began

    def trace(frame, event, argument):
        if frame.f_code.co_filename not in files and frame.f_code is not threading.Thread.start.__code__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            earlier = last.get(frame, "")
            last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if earlier.startswith("CALL") or earlier in ("RESUME", "JUMP_BACKWARD"):
                seen.append(earlier)
                if len(seen) == number:
                    sys.settrace(None)
                    raise KeyboardInterrupt
        return trace

    return trace, lambda: len(seen) >= number


def test_ctrl_c_wherever_it_may_come_in_a_start_leaves_the_engine_usable(llm, prompt, expected):
    llm.engine.add_request("mine", prompt, GREEDY)  # lent with the engine, and given back with it
    for number in itertools.count(1):
        states, _ = llm._thread.prepare(
            [(f"interrupted/{number}", {"prompt": prompt, "sampling_params": GREEDY})],
            stream=False,
            put=lambda item: None,
        )
        before, (trace, has_interrupted) = sys.gettrace(), interrupter(number)
        with contextlib.suppress(KeyboardInterrupt):
            try:
                sys.settrace(trace)
                llm._thread.queue(states)
            finally:
                sys.settrace(before)
        llm._thread.abort([f"interrupted/{number}"])
        if number % 8 == 0 or not has_interrupted():
            assert llm.generate([prompt], GREEDY, use_tqdm=False)[0].token_ids == expected
        for thread in engine_threads():
            thread.join(60)
            assert not thread.is_alive()
        if not has_interrupted():
            break
    assert number > 15
    while llm.engine.has_unfinished_requests:
        llm.engine.step()


# Forks


_FORKED = """
import os, sys
from engine_helpers import make_llm
from variants import golden_checkpoint
from jaxllm import LLM, SamplingParams

llm = make_llm(golden_checkpoint("llama_gqa"))
stream = llm.stream([[3, 5, 7]], SamplingParams(max_tokens=90, ignore_eos=True))
next(stream)
calls = [
    lambda: llm.generate([[3, 5, 7]], use_tqdm=False),
    lambda: llm.stream([[3, 5, 7]]),
    lambda: next(stream),
    lambda: llm.engine.add_request("0", [3, 5, 7]),
    lambda: llm.engine.step(),
    lambda: llm.reset_prefix_cache(),
    lambda: llm.close(),
    lambda: make_llm(golden_checkpoint("llama_gqa")),
]
for call in calls:
    child = os.fork()
    if not child:
        try:
            while True:
                call()
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
print(len(list(stream)[-1].token_ids))
"""


def test_a_forked_process_is_told_to_spawn():
    ran = run_python(_FORKED)
    *told, last = ran.stdout.splitlines()
    assert ran.returncode == 0, ran.stderr
    assert len(told) == 8
    assert all(line.startswith("EngineError") and "get_context('spawn')" in line for line in told), told
    assert last == "90"


def test_a_process_forked_before_jax_was_used_is_as_good_as_any(monkeypatch):
    monkeypatch.setattr(forks, "number", 1)
    monkeypatch.setattr(forks, "_of_jax", None)
    forks.note_jax()
    monkeypatch.setattr(forks, "number", 2)
    with pytest.raises(EngineError, match="spawn"):
        forks.note_jax()


# The interpreter exits


_OUTLIVED = """
import sys, threading
from engine_helpers import make_llm
from variants import golden_checkpoint
from jaxllm import SamplingParams
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.text.tokenizer import load_tokenizer

def work():
    threading.main_thread().join()
    load_tokenizer(demo_model_path())
    settings = {"warm_up": "background", "enable_prefix_caching": True, "prefix_cache_dir": sys.argv[2]}
    llm = made[0] if made else make_llm(golden_checkpoint("llama_gqa"), **settings)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for _ in range(2):
        print(llm.generate([[3, 5, 7]], params, use_tqdm=False)[0].token_ids, flush=True)

made = [make_llm(golden_checkpoint("llama_gqa"))] if sys.argv[1] == "made before" else []
threading.Thread(target=work).start()
"""


@needs_late_threads
@pytest.mark.parametrize("how", ["made before", "made after"])
def test_a_thread_that_outlives_the_main_one_gets_its_answers(llm, how, tmp_path):
    ran = run_python(_OUTLIVED, how, tmp_path)
    assert ran.returncode == 0, ran.stderr
    tokens = llm.generate([[3, 5, 7]], GREEDY, use_tqdm=False)[0].token_ids
    assert ran.stdout.splitlines() == [str(tokens)] * 2
    assert "Traceback" not in ran.stderr


_LEFT = """
import atexit, threading
from engine_helpers import make_llm
from variants import golden_checkpoint
from jaxllm import SamplingParams
from jaxllm.errors import EngineError

llm = make_llm(golden_checkpoint("llama_gqa"))
params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
streams, has_begun = [], threading.Event()

def read():
    try:
        for _ in llm.stream([[3, 5, 7]] * 30, params):
            has_begun.set()
    except EngineError:
        pass

def leave():
    threading.main_thread().join()
    streams.append(llm.stream([[3, 5, 7]] * 300, params))

threading.Thread(target=leave).start()
threading.Thread(target=read, daemon=True).start()
has_begun.wait()
atexit.register(lambda: print(llm.engine.num_live))
"""


def test_requests_that_nobody_is_left_to_read_end_with_the_interpreter():
    ran = run_python(_LEFT)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "0\n"


# Dropped and closed


@pytest.mark.parametrize("settings", [{}, {"num_host_blocks": 32, "enable_prefix_caching": True}])
def test_an_llm_that_is_dropped_frees_its_pool_without_the_collector(prompt, settings, tmp_path):
    if settings:
        settings = {**settings, "prefix_cache_dir": tmp_path}
    gc.collect()
    gc.disable()
    try:
        llm = make_llm(golden_checkpoint(NAME), **settings)
        llm.generate([prompt], GREEDY, use_tqdm=False)
        for thread in engine_threads():
            thread.join()
        pool, executor = weakref.ref(llm.executor._state.pool), weakref.ref(llm.executor)
        del llm
        assert pool() is None
        assert executor() is None
    finally:
        gc.enable()


def test_an_llm_that_is_closed_keeps_no_program(prompt):
    def num_programs():
        gc.collect()
        return len(jax.devices()[0].client.live_executables())

    kept, counts = [], []
    for _ in range(3):
        llm = make_llm(golden_checkpoint(NAME), num_host_blocks=16)
        llm.generate([prompt] * 6, GREEDY, use_tqdm=False)
        llm.close()
        kept.append(llm)
        counts.append(num_programs())
    assert counts[0] == counts[1] == counts[2]


# Files of the prefix cache


_UNCLOSED = """
import sys
from engine_helpers import make_llm
from variants import golden_checkpoint
from jaxllm import SamplingParams
from jaxllm.sched.presets import make_preset

llm = make_llm(
    golden_checkpoint("llama_gqa"),
    enable_prefix_caching=True,
    num_host_blocks=64,
    prefix_cache_dir=sys.argv[1],
    scheduler_policy="cached_attention",
)
prompts = [[1 + (7 * place + step) % 90 for step in range(40)] for place in range(6)]
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
llm.generate(prompts, params, use_tqdm=False)
if sys.argv[2] == "again":
    print([output.num_cached_tokens for output in llm.generate(prompts, params, use_tqdm=False)])
    llm.close()
"""


def test_an_interpreter_that_exits_without_closing_has_written_all(tmp_path):
    ran = run_python(_UNCLOSED, tmp_path, "unclosed")
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr
    assert "Error" not in ran.stderr
    blocks = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "about.json"]
    assert not [path.name for path in blocks if path.name.endswith(".tmp")]
    assert len(blocks) >= 6 * 10  # 40 tokens in blocks of 4


def fingerprints(folder):
    return {json.loads(path.read_text())["fingerprint"] for path in folder.rglob("about.json")}


def test_files_tell_versions_and_precision_apart(tmp_path, monkeypatch):
    def make():
        settings = {"enable_prefix_caching": True, "num_host_blocks": 16, "prefix_cache_dir": tmp_path}
        make_llm(golden_checkpoint(NAME), warm_up="background", **settings).close()

    make()
    make()
    assert len(fingerprints(tmp_path)) == 1
    for module, name in ((jaxllm, "__version__"), (jax, "__version__"), (assembly, "_NUMERICS_VERSION")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, "0.0.0")
            make()
    with jax.default_matmul_precision("highest"):
        make()
    assert len(fingerprints(tmp_path)) == 5


# Priorities


def test_a_priority_may_be_set_while_another_thread_reads_the_last_output(llm, prompt):
    stream = llm.stream([prompt] * 3, GREEDY)

    class Ending:
        """A builder that ends while somebody looks at it."""

        @property
        def request_id(self):
            stream._builders.pop(next(iter(stream._builders)), None)
            return "none"

    stream._builders = {name: Ending() for name in stream._builders}
    stream.set_priority(0, 1)
    assert not stream._builders
    stream._builders = {str(place): Ending() for place in range(3)}
    assert stream.num_unfinished == 1
    stream.close()


@pytest.mark.parametrize("is_on", [True, False])
def test_the_first_import_leaves_the_garbage_collector_as_it_was(is_on):
    code = f"""
import gc
{"" if is_on else "gc.disable()"}
calls = []
gc.callbacks.append(lambda phase, about: calls.append(about["generation"]))
import jaxllm
jaxllm.LLM
assert gc.isenabled() is {is_on}
assert 2 not in calls, calls
try:
    jaxllm.Nothing
except AttributeError:
    pass
assert gc.isenabled() is {is_on}
"""
    subprocess.run([sys.executable, "-c", code], check=True)
