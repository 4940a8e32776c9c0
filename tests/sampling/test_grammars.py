"""Hostile grammars: they are tried in another process, which may die of them; what is kept is bounded."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from engine_helpers import needs_late_threads
from server_helpers import serving

from jaxllm import LLM, SamplingParams, StructuredOutputsParams
from jaxllm.errors import SamplingParamsError, TryAgainError
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.sampling import grammar_child, grammar_processes, grammars
from jaxllm.sampling.grammars import Grammars
from jaxllm.sampling.structured_outputs import only_spaces
from jaxllm.text.tokenizer import load_tokenizer

VOCAB_SIZE = 4096


def chain(link, end, count):
    """Definitions of which each refers to the next."""
    names = [f"a{number}" for number in range(count + 1)]
    links = {name: link({"$ref": f"#/$defs/{after}"}) for name, after in itertools.pairwise(names)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, names[-1]: end}}


def rules(count):
    return "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(count)) + f'\nr{count}: "a"\n'


def terminals(count):
    return "start: T0\n" + "\n".join(f'T{i}: T{i + 1} "a"' for i in range(count)) + f'\nT{count}: "a"\n'


DEADLY = {
    "references": {"json": chain(lambda inner: inner, {"type": "string"}, 12_000)},
    "objects": {"json": chain(lambda inner: {"properties": {"x": inner}}, {"type": "string"}, 6_000)},
    "conjunctions": {"json": chain(lambda inner: {"allOf": [inner]}, {"type": "string"}, 10_000)},
    "arrays": {"json": chain(lambda inner: {"items": inner}, {"type": "string"}, 10_000)},
    "rules": {"grammar": rules(20_000)},
    "terminals": {"grammar": terminals(20_000)},
}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(demo_model_path())


@pytest.fixture
def compiled(tokenizer):
    return Grammars(tokenizer, VOCAB_SIZE, {tokenizer.eos_token_id})


def test_a_server_outlives_every_grammar():
    """Each is its own request's 400, whichever thread and process compile it."""
    with serving() as server:
        for options in DEADLY.values():
            body = {"prompt": "a", "max_tokens": 2, "structured_outputs": options}
            status, _, answer = server.post("/v1/completions", body)
            assert status == 400, answer
            assert "it nests too deep; make the grammar smaller" in answer["error"]["message"]
        status, _, answer = server.post(
            "/v1/completions", {"prompt": "a", "max_tokens": 9, "structured_outputs": {"choice": ["yes"]}}
        )
        assert (status, answer["choices"][0]["text"]) == (200, "yes")


@pytest.mark.parametrize("name", sorted(DEADLY))
def test_whoever_compiles_it_here_dies(name):
    """Without a process of its own the grammar ends the program, which is why it has one."""
    code = (
        "import json, sys\n"
        "from jaxllm.loading.checkpoints import demo_model_path\n"
        "from jaxllm.sampling.structured_outputs import StructuredOutputsParams, Vocabulary, compiled\n"
        "params = StructuredOutputsParams(**json.load(sys.stdin))\n"
        "text = (demo_model_path() / 'tokenizer.json').read_text()\n"
        f"compiled(Vocabulary(text, {VOCAB_SIZE}, [0]), params.grammar_text())\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(DEADLY[name]).encode(), capture_output=True
    )
    assert ran.returncode == -signal.SIGSEGV


@pytest.mark.parametrize(
    "options",
    [
        {"regex": "(((a{1000}){1000}){1000})"},
        {"regex": "(a*)*" * 3200},
        {"json": {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(3000)}}},
    ],
)
def test_a_grammar_that_nobody_can_follow_is_refused_once(compiled, options, monkeypatch):
    """It is tried a single time, and not in this process."""
    monkeypatch.setattr(grammars, "_begin", None)
    params = StructuredOutputsParams(**options)
    with pytest.raises(SamplingParamsError, match="it is too complex"):
        compiled.get(params)
    monkeypatch.setattr(compiled._made[1], "try_out", None)
    with pytest.raises(SamplingParamsError, match="it is too complex"):
        compiled.get(params)


def test_where_the_library_panics_is_nobodys_business(compiled):
    properties = {f"p{i}": {"type": "object", "properties": {"x": {"enum": [i, i + 1]}}} for i in range(9000)}
    with pytest.raises(SamplingParamsError, match="cannot be compiled: it is too ") as found:
        compiled.get(StructuredOutputsParams(json={"anyOf": list(properties.values())}))
    assert "backtrace" not in str(found.value)
    panic = ValueError("panic: assertion failed: a < b\n<backtrace>\n   0: <unknown>")
    assert grammar_child.told(panic) == "it is too large (assertion failed: a < b)"


def test_a_process_that_takes_too_long_is_ended(compiled, monkeypatch):
    compiled.get(StructuredOutputsParams(regex="a"))
    (process,) = compiled._made[1]._idle
    os.kill(process.pid, signal.SIGSTOP)
    monkeypatch.setattr("jaxllm.sampling.grammar_processes._MAX_SECONDS", 0.2)
    monkeypatch.setattr(grammar_processes, "_TRIES", 0)
    with pytest.raises(TryAgainError, match="gave no answer in time"):
        compiled.get(StructuredOutputsParams(regex="b"))
    assert process.returncode == -signal.SIGKILL
    monkeypatch.undo()
    assert compiled.get(StructuredOutputsParams(regex="b"))


def test_a_process_that_was_ended_is_started_again(compiled):
    compiled.get(StructuredOutputsParams(regex="a"))
    (process,) = compiled._made[1]._idle
    process.kill()
    process.wait()
    assert compiled.get(StructuredOutputsParams(regex="b"))
    (other,) = compiled._made[1]._idle
    assert other.pid != process.pid


def test_a_process_that_is_killed_at_work_is_no_fault_of_the_grammar(compiled, monkeypatch):
    """As by a system without memory: the grammar is tried again, and not remembered as bad."""
    ask, killed = grammar_processes._ask, []

    def ask_the_dead(process, *what):
        if len(killed) < num_deaths:
            process.kill()
            killed.append(process.wait())
        return ask(process, *what)

    monkeypatch.setattr(grammar_processes, "_ask", ask_the_dead)
    num_deaths = 1
    assert compiled.get(StructuredOutputsParams(regex="a"))
    killed.clear()
    num_deaths = 2
    with pytest.raises(TryAgainError, match="was ended; try again"):
        compiled.get(StructuredOutputsParams(regex="b"))
    assert compiled.get(StructuredOutputsParams(regex="b"))


@pytest.mark.skipif(sys.platform != "linux", reason="tells a process' children by /proc")
def test_a_fork_that_is_killed_is_no_fault_of_the_grammar(compiled, monkeypatch):
    """As by a system without memory; who had it made goes on."""
    compiled.get(StructuredOutputsParams(regex="a"))
    (process,) = compiled._made[1]._idle
    monkeypatch.setattr(grammar_processes, "_TRIES", 0)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")

    def kill_its_child():
        while not (pids := children.read_text().split()):
            time.sleep(0.001)
        os.kill(int(pids[0]), signal.SIGKILL)

    killer = threading.Thread(target=kill_its_child)
    killer.start()
    with pytest.raises(TryAgainError, match=r"was ended \(-9\); try again"):
        compiled.get(StructuredOutputsParams(regex="(((a{1001}){1000}){1000})"))
    killer.join()
    assert compiled.get(StructuredOutputsParams(regex="b"))
    assert compiled._made[1]._idle == [process]


def test_a_process_that_does_not_start_is_no_fault_of_the_grammar(compiled, monkeypatch):
    popen, failures = subprocess.Popen, []

    def fail(*args, **options):
        if len(failures) < num_failures:
            failures.append(OSError(11, "Resource temporarily unavailable"))
            raise failures[-1]
        return popen(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", fail)
    num_failures = 1
    assert compiled.get(StructuredOutputsParams(regex="a"))
    (process,) = compiled._made[1]._idle
    process.kill()
    process.wait()
    failures.clear()
    num_failures = 2
    with pytest.raises(TryAgainError, match="does not start"):
        compiled.get(StructuredOutputsParams(regex="b"))
    assert compiled.get(StructuredOutputsParams(regex="b"))


@pytest.mark.parametrize(("work", "code"), [("bytearray(2**31)", signal.SIGABRT), ("spin()", signal.SIGPROF)])
def test_memory_and_time_of_a_fork_are_bounded(work, code):
    """Where the system bounds them: it dies, and what had it made says how."""
    code_of_child = (
        "import jaxllm.sampling.grammar_child as child\n"
        "def spin():\n    while True: pass\n"
        f"child.try_out = lambda *_: {work}\n"
        "print(child._answer(None, {'regex': 'a'}, 0.3))"
    )
    ran = subprocess.run([sys.executable, "-c", code_of_child], capture_output=True, text=True)
    assert ran.stdout == f"{{'died': {-code}}}\n"


def test_a_slow_grammar_begins_again_behind_other_slow_ones(compiled, monkeypatch):
    """It has little time at first, and then as much as one may have."""
    slow = (
        "import time\n"
        "quick = c.try_out\n"
        "def slow(*args):\n"
        "    end = time.process_time() + 1\n"
        "    while time.process_time() < end: pass\n"
        "    return quick(*args)\n"
        "c.try_out = slow\n"
        "c.main()\n"
    )
    monkeypatch.setattr(
        grammar_processes, "_MAIN", grammar_processes._MAIN.replace("c.main()", f"exec({slow!r})")
    )
    asked, ask = [], grammar_processes._ask

    def note(process, params, cpu_seconds):
        asked.append(cpu_seconds)
        return ask(process, params, cpu_seconds)

    monkeypatch.setattr(grammar_processes, "_ask", note)
    assert compiled.get(StructuredOutputsParams(regex="slow")).num_bytes > 0
    assert asked == [grammar_child.QUICK_CPU_SECONDS, grammar_child.MAX_CPU_SECONDS]
    monkeypatch.setattr(grammar_processes, "MAX_CPU_SECONDS", 0.5)
    monkeypatch.setattr(compiled._made[1], "_rooms", dict.fromkeys((0.1, 0.5), contextlib.nullcontext()))
    with pytest.raises(SamplingParamsError, match="takes more than 5 seconds of processor time"):
        compiled.get(StructuredOutputsParams(regex="slower"))


def test_slow_grammars_hold_up_no_ordinary_one_at_the_server(monkeypatch):
    """More of them than the processor has cores, and a request with a new one of its own ends."""
    may_go, try_out = threading.Event(), grammar_processes.GrammarProcesses.try_out
    waiting = []

    def wait(self, params, cpu_seconds):
        if params.regex is None:
            return try_out(self, params, cpu_seconds)
        if cpu_seconds == grammar_child.QUICK_CPU_SECONDS:
            waiting.append(params)
            return None
        assert may_go.wait(60)
        return try_out(self, params, cpu_seconds)

    monkeypatch.setattr(grammar_processes.GrammarProcesses, "try_out", wait)
    with serving() as server:
        answers = []

        def ask(number):
            options = {"regex": f"[a-z]{{{number}}}"}
            body = {"prompt": "a", "max_tokens": 3, "structured_outputs": options}
            answers.append(server.post("/v1/completions", body)[0])

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(5, 25)]
        for thread in threads:
            thread.start()
        while len(waiting) < len(threads):
            time.sleep(0.01)
        schema = {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}
        body = {"prompt": "a", "max_tokens": 3, "structured_outputs": schema}
        assert server.post("/v1/completions", body)[0] == 200
        assert not answers
        may_go.set()
        for thread in threads:
            thread.join()
        assert answers == [200] * len(threads)


def test_a_process_gives_way_to_the_engine_and_is_not_interrupted_with_it(compiled):
    """In a session of its own it would have as much of the processors as the engine, however nice it is."""
    compiled.get(StructuredOutputsParams(regex="give way"))
    (process,) = compiled._made[1]._idle
    assert os.getsid(process.pid) == os.getsid(0)
    assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
    assert os.getpriority(os.PRIO_PROCESS, process.pid) > os.getpriority(os.PRIO_PROCESS, 0)


def test_processes_end_with_what_they_serve(tokenizer):
    several = Grammars(tokenizer, VOCAB_SIZE, {tokenizer.eos_token_id})
    several.get(StructuredOutputsParams(regex="a"))
    (process,) = several._made[1]._idle
    del several
    assert process.wait(timeout=30) is not None


def test_a_closed_llm_keeps_no_grammar_nor_what_tries_them():
    llm = LLM(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=32)
    llm.generate("a", SamplingParams(max_tokens=4, structured_outputs={"regex": "[ab]+"}), use_tqdm=False)
    kept = llm.engine.inputs._masks._grammars
    (process,) = kept._made[1]._idle
    assert kept.num_bytes > 0
    llm.close()
    assert process.wait(timeout=30) is not None
    assert kept.num_bytes == 0
    assert llm.get_tokenizer().encode("a")


@pytest.mark.parametrize("how", ["script by stdin", "-c"])
def test_processes_end_with_a_parent_that_is_killed(tmp_path, how):
    """In programs that have no file, too, started anywhere."""
    code = (
        "import os, signal\n"
        "from jaxllm.loading.checkpoints import demo_model_path\n"
        "from jaxllm.sampling.grammars import Grammars\n"
        "from jaxllm.sampling.structured_outputs import StructuredOutputsParams\n"
        "from jaxllm.text.tokenizer import load_tokenizer\n"
        "found = Grammars(load_tokenizer(demo_model_path()), 4096, {0})\n"
        "found.get(StructuredOutputsParams(regex='a'))\n"
        "print(found._made[1]._idle[0].pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (tmp_path / "json.py").write_text("raise RuntimeError('this is no module of anybody')")
    root = str(Path(grammars.__file__).resolve().parents[2])
    ran = subprocess.run(
        [sys.executable, "-P", *(["-"] if how == "script by stdin" else ["-c", code])],
        input=code if how == "script by stdin" else None,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    pid, deadline = int(ran.stdout), time.monotonic() + 60
    while _is_running(pid):
        assert time.monotonic() < deadline, "it outlives its parent"
        time.sleep(0.05)


def _is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@needs_late_threads
def test_threads_outlive_the_main_one():
    """A thread that is not the main one goes on with structured output, and then the program ends."""
    code = (
        "import threading\n"
        "from jaxllm.loading.checkpoints import demo_model_path\n"
        "from jaxllm.sampling.grammars import Grammars\n"
        "from jaxllm.sampling.structured_outputs import StructuredOutputsParams\n"
        "from jaxllm.sampling.token_masks import GrammarState, mask_threads\n"
        "from jaxllm.text.tokenizer import load_tokenizer\n"
        "found = Grammars(load_tokenizer(demo_model_path()), 4096, {0})\n"
        "def run():\n"
        "    threading.main_thread().join()\n"
        "    state = GrammarState(found.get(StructuredOutputsParams(choice=['aaaa'])))\n"
        "    state.append(65)\n"
        "    mask_threads().begin([state]).result()\n"
        "    print(state.is_ready, state.problem)\n"
        "threading.Thread(target=run).start()\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "True None\n"), ran.stderr


def test_several_threads_compile_what_they_ask_for_once(compiled, monkeypatch):
    """Those who want the same wait for it; whoever wants a list of choices is not held up."""
    may_go, begin, begun = threading.Event(), grammars._begin, []

    def slow(vocabulary, text):
        begun.append(text)
        if "zzz" in text:
            assert may_go.wait(60)
        return begin(vocabulary, text)

    monkeypatch.setattr(grammars, "_begin", slow)
    found = []
    params = StructuredOutputsParams(regex="zzz")
    threads = [threading.Thread(target=lambda: found.append(compiled.get(params))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert compiled.get(StructuredOutputsParams(choice=["other"]))
    assert not found
    may_go.set()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert sum("zzz" in text for text in begun) == 1


def test_what_is_kept_is_bounded_in_bytes(compiled, monkeypatch):
    monkeypatch.setattr(grammars, "MAX_BYTES", 2**20)
    for number in range(12):
        compiled.get(StructuredOutputsParams(choice=[f"{number} {one}" for one in range(500)]))
        assert compiled.num_bytes == sum(one.result().num_bytes for one in compiled._kept.values())
        assert compiled.num_bytes <= 2**20
    assert 0 < len(compiled._kept) < 12
    compiled.get(StructuredOutputsParams(choice=[f"one {number} of many" for number in range(9000)]))
    assert len(compiled._kept) == 1  # the newest is kept, however large it is


def test_a_grammar_that_compiles_holds_up_nobody_at_the_server(monkeypatch):
    """More new grammars than there are threads for inputs, and an ordinary request ends."""
    may_go, begin = threading.Event(), grammars._begin

    def wait(vocabulary, text):
        assert may_go.wait(60)
        return begin(vocabulary, text)

    monkeypatch.setattr(grammars, "_begin", wait)
    with serving() as server:
        bodies = [
            {"prompt": "a", "max_tokens": 3, "structured_outputs": {"regex": f"[a-z]{{{number}}}"}}
            for number in (5, 6, 7)
        ]
        answers = []

        def ask(body):
            answers.append(server.post("/v1/completions", body)[0])

        threads = [threading.Thread(target=ask, args=(body,)) for body in bodies]
        for thread in threads:
            thread.start()
        while len(server.service.made.engine.inputs._masks._grammars._kept) < 3:
            time.sleep(0.01)
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 3})[0] == 200
        assert not answers
        may_go.set()
        for thread in threads:
            thread.join()
        assert answers == [200] * 3


# What grammars let follow


def allows(compiled, tokenizer, params, text):
    """Whether a text, and nothing more, is what a grammar lets come."""
    matcher = compiled.get(StructuredOutputsParams(**params)).matcher()
    vocabulary = compiled._made[0].tokens
    ids = vocabulary.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.consume_token(tokenizer.eos_token_id)


def test_choices_of_any_characters_and_number(compiled, tokenizer):
    odd = ["a\x7fb", '"', "\\x", "a|b", "(", "é\n", "😀", " ", "/", "[a]", "a", "ab", "-^$.*+?{2}"]
    for choice in odd:
        assert allows(compiled, tokenizer, {"choice": odd}, choice), choice
    for other in ("a\x7f", "x", "", "abb", "aa"):
        assert not allows(compiled, tokenizer, {"choice": odd}, other), other
    for count in (2_001, 10_000):
        many = [f"{number} sheep" for number in range(count)]
        assert allows(compiled, tokenizer, {"choice": many}, many[-1])
        assert not allows(compiled, tokenizer, {"choice": many}, "sheep")


@pytest.mark.parametrize("schema", [True, "true", {}])
def test_a_schema_of_any_json(compiled, tokenizer, schema):
    for text in ("null", "-1.5", '"a"', '[true, {"a": []}]'):
        assert allows(compiled, tokenizer, {"json": schema}, text), text
    for text in ("", "a", "[", "1 2"):
        assert not allows(compiled, tokenizer, {"json": schema}, text), text


def test_whitespace_in_json_is_bounded(compiled, tokenizer):
    schema = {"json": {"type": "object"}}
    for text in ('{"a": 1}', '{"a":1}', '{\n    "a": [\n        1,\n        2\n    ]\n}', '{\r\n\t"a":1}'):
        assert allows(compiled, tokenizer, schema, text), text
        assert allows(compiled, tokenizer, {"json_object": True}, text), text
    for text in ('{"a":  1}', '{\n\n"a":1}', "{" + " " * 40 + "}", "{\n" + " " * 40 + "}"):
        assert not allows(compiled, tokenizer, schema, text), text
        unbounded = {**schema, "whitespace_pattern": r"[ \t\n\r]+"}
        assert allows(compiled, tokenizer, unbounded, text), text
        assert allows(compiled, tokenizer, {"json_object": True, "whitespace_pattern": r"\s*"}, text), text


@pytest.mark.parametrize(
    ("pattern", "allowed", "refused"),
    [
        (r"[ab ]{0,3}", ["", " ", "   "], ["a", " b ", "    "]),
        (r"\s?", ["", " ", "\t", "\n"], ["\x0b", "\x0c", "\xa0", "\u2003"]),
        (r"(?:x|\n )", ["\n "], ["x", "\n"]),
        (r"(?P<one>\x20)|.", [" ", "\t"], [".", "\n", "a"]),
        (r"[^\n]*", ["", " \t"], ["\n", "a"]),
        (r"[[:space:]&&[^ ]]+|_", ["\t\n"], [" ", "_", "\x0b"]),
        (r"\p{White_Space}{2}", [" \n"], ["\u2003\u2003", " "]),
        (r"#? ?", ["", " "], ["#"]),
    ],
)
def test_a_whitespace_pattern_gives_json(compiled, tokenizer, pattern, allowed, refused):
    """Whatever it matches beside JSON's own four characters."""
    params = {"json": {"type": "object"}, "whitespace_pattern": pattern}
    for space in allowed:
        text = f'{{"a":{space}1}}'
        assert allows(compiled, tokenizer, params, text) or not space, text
        json.loads(text)
    for space in refused:
        assert not allows(compiled, tokenizer, params, f'{{"a":{space}1}}'), space
    assert only_spaces(only_spaces(pattern))


def test_json_ends_though_the_model_likes_whitespace():
    """A model that would rather have spaces than anything else, within 60 tokens."""
    schema = {"properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["a"]}
    schema |= {"type": "object", "additionalProperties": False}
    with LLM(max_num_seqs=8, max_model_len=160) as llm:
        tokenizer = llm.get_tokenizer()
        texts = [tokenizer.decode([number]) for number in range(VOCAB_SIZE)]
        spaces = {number: 20.0 for number, text in enumerate(texts) if text and not text.strip(" \t\n\r")}
        assert len(spaces) > 3
        params = [
            SamplingParams(seed=seed, max_tokens=120, logit_bias=spaces, structured_outputs={"json": schema})
            for seed in range(8)
        ]
        outputs = llm.generate(["Answer: "] * 8, params, use_tqdm=False)
        assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}
        for output in outputs:
            assert json.loads(output.outputs[0].text).keys() == {"a"}


def test_a_tokenizer_with_more_tokens_than_the_model(tokenizer, tmp_path):
    """The others are never sampled, though the grammar would take them."""
    larger = load_tokenizer(demo_model_path())
    larger.add_tokens(["<one more>", "<and another>"])
    assert len(larger) > VOCAB_SIZE
    found = Grammars(larger, VOCAB_SIZE, {larger.eos_token_id}).get(
        StructuredOutputsParams(regex="[a-z<> ]+")
    )
    same = Grammars(tokenizer, VOCAB_SIZE, {tokenizer.eos_token_id}).get(
        StructuredOutputsParams(regex="[a-z<> ]+")
    )
    width = VOCAB_SIZE // 32
    assert np.array_equal(found.first_row[:width], same.first_row[:width])
    assert found.first_row[:width].any()
    larger.save_pretrained(tmp_path)
    with LLM(tokenizer=tmp_path, max_num_seqs=2, max_model_len=64) as llm:
        params = SamplingParams(seed=0, max_tokens=30, structured_outputs={"regex": "[a-z<> ]{12}"})
        (output,) = llm.generate("The cat", params, use_tqdm=False)
        assert output.outputs[0].finish_reason == "stop"
        assert len(output.outputs[0].text) == 12
        assert max(output.outputs[0].token_ids) < VOCAB_SIZE
