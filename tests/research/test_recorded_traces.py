"""`load_trace`: each form is recognised, prompts share what hashes say, and a cache finds that."""

import collections
import itertools
import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_datasets import WordTokenizer
from test_trace_csv import AZURE, BURSTGPT

from jaxllm.cli.main import main
from jaxllm.errors import ConfigError, RequestError, RequestTooLargeError
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.research import simulate
from jaxllm.research.workloads import Trace, fit_trace, load_trace, make_conversations
from jaxllm.research.workloads.lengths import UniformLengths

VOCAB = 2**31 - 1


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_json(path, value):
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def lengths(trace):
    return trace.arrival_times.tolist(), trace.prompt_lens.tolist(), trace.output_lens.tolist()


# Forms

MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [46, 47, 48]},
    {"timestamp": 3052, "input_length": 700, "output_length": 6, "hash_ids": [46, 49]},
    {"timestamp": 3052, "input_length": 30, "output_length": 7, "hash_ids": [50]},
]


def test_mooncakes_lines_are_recognised(tmp_path):
    trace = load_trace(write_lines(tmp_path / "mooncake.jsonl", MOONCAKE), seed=3)
    assert lengths(trace) == ([0, 3.052, 3.052], [1100, 700, 30], [5, 6, 7])
    assert (trace.name, trace.seed, trace.notes) == ("mooncake", 3, ("from mooncake.jsonl",))
    first, second, third = (trace.token_ids(index, VOCAB) for index in range(3))
    assert [len(ids) for ids in (first, second, third)] == [1100, 700, 30]
    assert first[:512] == second[:512]
    assert not set(first[512:]) & set(second[512:])
    assert not set(third) & set(first)
    assert trace.shares_prefixes
    trace.save(tmp_path / "saved.json")
    assert load_trace(tmp_path / "saved.json") == trace
    assert Trace.load(tmp_path / "saved.json").token_ids(1, VOCAB) == second


def test_names_of_blocks_may_be_strings_and_blocks_of_any_size(tmp_path):
    rows = [{**row, "hash_ids": [f"x{name}" for name in row["hash_ids"]]} for row in MOONCAKE]
    assert load_trace(write_lines(tmp_path / "a.jsonl", rows)).hash_ids == ((0, 1, 2), (0, 3), (4,))
    row = {"input_length": 40, "output_length": 1, "hash_ids": [1, 2, 3]}
    trace = load_trace(write_lines(tmp_path / "b.jsonl", [row]), hash_block_len=16)
    assert (trace.hash_block_len, len(trace.token_ids(0, 50))) == (16, 40)


def test_plain_lines_are_in_seconds(tmp_path):
    rows = [
        {"timestamp": 7.5, "input_length": 9, "output_length": 2},
        {"timestamp": 7.0, "input_length": 8, "output_length": 3},
        {"timestamp": 7.0, "input_length": 0, "output_length": 3},
    ]
    path = write_lines(tmp_path / "plain.jsonl", rows)
    trace = load_trace(path)
    assert lengths(trace) == ([0, 0.5], [8, 9], [3, 2])
    assert trace.notes[1:] == (
        "skipped 1 rows without input or output tokens",
        "sorted by arrival: 2 rows changed place",
    )
    assert not trace.shares_prefixes
    assert load_trace(path, time_unit="ms").arrival_times == pytest.approx([0, 0.0005])
    assert lengths(load_trace(path, limit=1)) == ([0], [9], [2])
    without = [{"input_length": 4, "output_length": 2}] * 2
    for name, write in (("lines.json", write_lines), ("array.json", write_json), ("a.ndjson", write_lines)):
        assert lengths(load_trace(write(tmp_path / name, without))) == ([0, 0], [4, 4], [2, 2])


def test_a_row_without_the_time_that_others_have_is_bad(tmp_path):
    rows = [
        {"timestamp": 100, "input_length": 4, "output_length": 2},
        {"input_length": 4, "output_length": 2},
    ]
    path = write_lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(RequestError, match=r"line 2: has input, output, and rows before it .*timestamp"):
        load_trace(path)
    assert lengths(load_trace(path, on_bad="skip")) == ([0], [4], [2])
    broken = write_lines(tmp_path / "b.jsonl", [{"input_length": "x", "output_length": 2}, *rows[:1] * 2])
    assert lengths(load_trace(broken, on_bad="skip")) == ([0, 0], [4, 4], [2, 2]), "a bad row is no measure"


def test_packed_traces_are_refused(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(b"")
    with pytest.raises(ConfigError, match="packed by gzip, which is not read here: unpack it"):
        load_trace(tmp_path / "a.jsonl.gz")


def test_prompts_are_text_or_token_ids(tmp_path):
    rows = [{"prompt": "one two three", "output_length": 2}, {"prompt": "four", "output_length": 1}]
    path = write_lines(tmp_path / "text.jsonl", rows)
    trace = load_trace(path, tokenizer=WordTokenizer())
    assert trace.prompt_token_ids == ((3, 3, 5), (4,))
    with pytest.raises(RequestError, match=r"line 1: has a prompt and no input_length: pass tokenizer="):
        load_trace(path)
    known = [{**row, "input_length": length} for row, length in zip(rows, (7, 2), strict=True)]
    trace = load_trace(write_lines(tmp_path / "known.jsonl", known))
    assert (trace.prompt_texts, trace.prompt_lens.tolist()) == (("one two three", "four"), [7, 2])
    ids = [{"prompt": [1, 2], "output_length": 2}]
    assert load_trace(write_lines(tmp_path / "ids.jsonl", ids)).prompt_token_ids == ((1, 2),)


def test_public_csv(tmp_path):
    for name, text, prompts in (("a", AZURE, [374, 396, 879]), ("b", BURSTGPT, [472, 1087, 417])):
        path = tmp_path / f"{name}.csv"
        path.write_text(text, encoding="utf-8")
        assert load_trace(path).prompt_lens.tolist() == prompts
    path.write_text(BURSTGPT + "200,GPT-4,9,0,9,API log\n", encoding="utf-8")
    assert len(load_trace(path)) == 3  # a failure is left out


VLLM = {
    "request_throughput": 3.0,
    "input_lens": [12, 7, 5],
    "output_lens": [4, 0, 3],
    "start_times": [100.25, 100.5, 101.0],
    "errors": ["", "refused", ""],
}


def test_vllms_results(tmp_path):
    trace = load_trace(write_json(tmp_path / "vllm.json", VLLM))
    assert lengths(trace) == ([0, 0.75], [12, 5], [4, 3])
    older = {key: value for key, value in VLLM.items() if key != "start_times"}
    assert load_trace(write_json(tmp_path / "older.json", older)).arrival_times.tolist() == [0, 0]
    brief = {"request_throughput": 3.0}
    with pytest.raises(ConfigError, match="run the benchmark with --save-detailed"):
        load_trace(write_json(tmp_path / "brief.json", brief))
    with pytest.raises(ConfigError, match="one run of a benchmark"):
        load_trace(write_json(tmp_path / "sweep.json", {"rows": [], "runs": [VLLM]}))
    with pytest.raises(ConfigError, match="start_times must be one a request, 3"):
        load_trace(write_json(tmp_path / "short.json", VLLM | {"start_times": [1.0]}))


def guidellm(*counts):
    benchmarks = []
    for count in counts:
        rows = [
            {"request_start_time": 1e9 + number / 4, "prompt_tokens": 8 + number, "output_tokens": 2}
            for number in range(count)
        ]
        benchmarks.append({"requests": {"successful": rows, "incomplete": [{}], "errored": []}})
    return {"metadata": {}, "benchmarks": benchmarks}


def test_guidellms_results(tmp_path):
    trace = load_trace(write_json(tmp_path / "benchmarks.json", guidellm(3)))
    assert lengths(trace) == ([0, 0.25, 0.5], [8, 9, 10], [2, 2, 2])
    path = write_json(tmp_path / "two.json", guidellm(3, 1))
    assert len(load_trace(path, benchmark=1)) == 1
    with pytest.raises(ConfigError, match=r"has 2 benchmarks, .*: pass benchmark= \(--benchmark\)"):
        load_trace(path)
    with pytest.raises(ConfigError, match=r"benchmark=2: .* has 2 of them; name one from 0 to 1"):
        load_trace(path, benchmark=2)
    with pytest.raises(
        ConfigError, match=r"benchmark=1 is for a trace of form guidellm, and .* is of form vllm: leave it"
    ):
        load_trace(write_json(tmp_path / "vllm.json", VLLM), benchmark=1)
    broken = {"benchmarks": [{"requests": {"successful": [3, {"prompt_tokens": 4}]}}]}
    with pytest.raises(RequestError, match="benchmark 0, request 0: must be a JSON object"):
        load_trace(write_json(tmp_path / "broken.json", broken))
    with pytest.raises(ConfigError, match=r"benchmark 0 has no list of requests\.successful"):
        load_trace(write_json(tmp_path / "none.json", {"benchmarks": [{}]}))


def test_conversations_need_a_tokenizer(tmp_path):
    turns = [("human", "a b"), ("gpt", "c"), ("human", "d"), ("gpt", "e f")]
    rows = [{"conversations": [{"from": who, "value": text} for who, text in turns]}]
    path = write_json(tmp_path / "sharegpt.json", rows)
    trace = load_trace(path, tokenizer=WordTokenizer(), max_len=6)
    assert lengths(trace)[1:] == ([2, 4], [1, 2])
    assert trace.follows.tolist() == [-1, 0]
    with pytest.raises(ConfigError, match=r"pass tokenizer= \(--tokenizer\)"):
        load_trace(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no row|no valid JSON"),
        ("3", "holds int, which is no trace"),
        ("{", "no valid JSON"),
        ('{"a": 1}', "holds an object with 'a', which is no trace: .*vLLM"),
        ('[{"text": "a"}]', "holds rows of 'text', which is no trace"),
        ("[]", "holds no row"),
    ],
)
def test_other_files_are_refused(tmp_path, text, message):
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_trace(path)
    with pytest.raises(ConfigError, match="cannot read"):
        load_trace(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match="path=3 must be a path"):
        load_trace(3)
    with pytest.raises(ConfigError, match="form='nothing' is unknown"):
        load_trace(path, form="nothing")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hash_ids": [1]}, r"line 3: has 1 hash_ids, and input_length=700 is 2 blocks .*--hash-block-len"),
        ({"hash_ids": 3}, "hash_ids must be a list, got 3"),
        ({"hash_ids": [1, None]}, "holds None: names are integers or strings"),
        ({"input_length": "7"}, "input_length must be an integer, got '7'"),
        ({"output_length": -1}, r"output_length must lie in \[0,"),
        ({"timestamp": "now"}, "timestamp must be a number, got 'now'"),
    ],
)
def test_bad_rows_are_named_or_left_out(tmp_path, change, message):
    rows = [*MOONCAKE[:2], MOONCAKE[1] | change]
    path = write_lines(tmp_path / "bad.jsonl", rows)
    with pytest.raises((RequestError, ConfigError), match=message):
        load_trace(path)
    trace = load_trace(path, on_bad="skip")
    assert len(trace) == 2
    assert "skipped 1 bad rows" in trace.notes


def test_rows_are_of_one_kind(tmp_path):
    rows = [{"prompt": [1, 2], "output_length": 1}, {"input_length": 3, "output_length": 1}]
    path = write_lines(tmp_path / "mixed.jsonl", rows)
    with pytest.raises(RequestError, match="line 2: has input, output, and rows before it ids"):
        load_trace(path)
    assert load_trace(path, on_bad="skip").prompt_token_ids == ((1, 2),)


def test_a_row_without_lengths_says_what_it_has(tmp_path):
    rows = [{"input_length": 3, "output_length": 1}, {"input_length": 3, "tokens": 1}]
    with pytest.raises(
        RequestError, match="line 2: there is no 'output_length'; the row has 'input_length', 'tokens'"
    ):
        load_trace(write_lines(tmp_path / "t.jsonl", rows))


def test_a_row_with_hashes_that_others_lack_is_bad(tmp_path):
    plain = {"timestamp": 1, "input_length": 30, "output_length": 7}
    path = write_lines(tmp_path / "t.jsonl", [plain, MOONCAKE[0]])
    with pytest.raises(
        RequestError, match=r"line 2: has hash_ids, .*, and rows before it input, output, time"
    ):
        load_trace(path)
    assert len(load_trace(write_lines(tmp_path / "m.jsonl", MOONCAKE), form="jsonl")) == 3


@pytest.mark.parametrize("ids", [[1, "a"], [-1], [2**31], [[1]]])
def test_a_prompt_of_no_token_ids_is_named_or_left_out(tmp_path, ids):
    rows = [{"prompt": [1, 2], "output_length": 1}, {"prompt": ids, "output_length": 1}]
    path = write_lines(tmp_path / "t.jsonl", rows)
    with pytest.raises(RequestError, match=r"line 2: prompt holds .*: ids are integers in"):
        load_trace(path)
    assert load_trace(path, on_bad="skip").prompt_token_ids == ((1, 2),)


def test_a_bad_first_row_is_named_or_left_out(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\n" + json.dumps(MOONCAKE[2]) + "\n")
    with pytest.raises(RequestError, match="line 1: the line is empty"):
        load_trace(path)
    assert len(load_trace(path, on_bad="skip")) == 1
    path.write_text("[1]\n")
    with pytest.raises(ConfigError, match=r"holds no row that can be read .must be a JSON object, not list"):
        load_trace(path)


def test_one_line_is_recognised_whatever_the_files_name(tmp_path):
    for name in ("t.json", "t.txt", "t.jsonl"):
        assert load_trace(write_lines(tmp_path / name, MOONCAKE[2:])).hash_ids == ((0,),)


def test_times_of_another_unit_are_told(tmp_path):
    rows = [{"timestamp": 1.7e12 + 500 * n, "input_length": 4, "output_length": 2} for n in range(2)]
    path = write_lines(tmp_path / "t.jsonl", rows)
    with pytest.raises(RequestError, match=r"timestamp=1700000000000.0 is of no date in s: pass time_unit="):
        load_trace(path)
    assert load_trace(path, time_unit="ms").arrival_times == pytest.approx([0, 0.5])


@pytest.mark.parametrize("option", [{"time_unit": "ms"}, {"hash_block_len": 16}, {"benchmark": 0}])
def test_options_of_another_form_are_refused(tmp_path, option):
    path = tmp_path / "a.csv"
    path.write_text(AZURE, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{next(iter(option))}=.* is of form csv: leave it out"):
        load_trace(path, **option)


def test_names_of_tokenizers_and_lone_surrogates_are_refused(tmp_path):
    messages = [{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "b"}]
    path = write_json(tmp_path / "t.json", [{"messages": messages}])
    with pytest.raises(ConfigError, match="tokenizer='gpt2' must be a tokenizer"):
        load_trace(path, tokenizer="gpt2")

    class Utf8(WordTokenizer):
        def encode(self, text, **options):
            return list(text.encode())

    with pytest.raises(RequestError, match=r"t\.json, row 1: .* a lone surrogate"):
        load_trace(path, tokenizer=Utf8())


# Limits


def test_requests_that_are_too_long(tmp_path):
    path = write_lines(tmp_path / "m.jsonl", MOONCAKE)
    with pytest.raises(RequestTooLargeError, match=r"request 0 .* 1100 prompt and 5 output .* \(2 of 3 "):
        load_trace(path, max_len=600)
    clipped = load_trace(path, max_len=600, too_long="clip")
    assert lengths(clipped)[1:] == ([595, 594, 30], [5, 6, 7])
    assert clipped.hash_ids == ((0, 1), (0, 3), (4,))
    assert clipped.token_ids(0, VOCAB) == load_trace(path).token_ids(0, VOCAB)[:595]
    assert clipped.notes[-1] == "clipped 2 requests to 600 tokens"
    skipped = load_trace(path, max_len=600, too_long="skip")
    assert lengths(skipped) == ([3.052], [30], [7])
    assert skipped.hash_ids == ((4,),)
    with pytest.raises(ConfigError, match="no request of trace 'm' has at most 10 tokens"):
        load_trace(path, max_len=10, too_long="skip")


def test_outputs_leave_a_token_of_the_prompt():
    trace = Trace(
        name="t",
        seed=0,
        arrival_times=[0.0, 0.0],
        prompt_lens=[4, 4],
        output_lens=[50, 2],
        prompt_texts=["a b c d", "e f g h"],
    )
    clipped = fit_trace(trace, 6, "clip")
    assert lengths(clipped)[1:] == ([1, 4], [5, 2])
    assert clipped.prompt_texts is None
    assert fit_trace(trace, 54) is trace
    given = Trace(
        name="t",
        seed=0,
        arrival_times=[0.0],
        prompt_lens=[4],
        output_lens=[2],
        prompt_token_ids=[[1, 2, 3, 4]],
    )
    assert fit_trace(given, 5, "clip").prompt_token_ids == ((1, 2, 3),)


def test_what_goes_on_after_a_turn_left_out_is_left_out():
    said = UniformLengths(shortest=5, longest=20)
    trace = make_conversations(20, messages=said, answers=said, mean_turns=4, seed=1)
    kept = fit_trace(trace, 60, "skip")
    assert 0 < len(kept) < len(trace)
    assert (kept.prompt_lens + kept.output_lens).max() <= 60
    for index, followed in enumerate(kept.follows.tolist()):
        if followed >= 0:
            assert kept.prompt_lens[index] > kept.prompt_lens[followed] + kept.output_lens[followed]
    with pytest.raises(ConfigError, match="cannot be clipped"):
        fit_trace(trace, 60, "clip")


# What prompts share


@st.composite
def named_prompts(draw):
    """Prompts of blocks that are named by all that is before them, as Mooncake's are."""
    block_len = draw(st.sampled_from([4, 16, 512]))
    names = {}
    rows = []
    for _ in range(draw(st.integers(2, 6))):
        path = draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
        length = (len(path) - 1) * block_len + draw(st.integers(1, block_len))
        last = (*path, length)  # a shorter block of the same text is another block
        keys = [tuple(path[: depth + 1]) for depth in range(len(path) - 1)] + [last]
        rows.append((length, [names.setdefault(key, len(names)) for key in keys]))
    return block_len, rows


def num_alike(one, other):
    """How many values two sequences begin with alike."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@settings(deadline=None, max_examples=60)
@given(named_prompts(), st.integers(0, 2**40))
def test_prompts_share_exactly_what_the_hashes_say(prompts, seed):
    block_len, rows = prompts
    trace = Trace(
        name="named",
        seed=seed,
        arrival_times=np.zeros(len(rows)),
        prompt_lens=[length for length, _ in rows],
        output_lens=[1] * len(rows),
        hash_ids=[names for _, names in rows],
        hash_block_len=block_len,
    )
    drawn = [trace.token_ids(index, VOCAB) for index in range(len(rows))]
    for (one, (length, names)), (other, (other_length, other_names)) in itertools.combinations(
        zip(drawn, rows, strict=True), 2
    ):
        alike, shared = num_alike(names, other_names), num_alike(one, other)
        assert shared == min(alike * block_len, length, other_length)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hash_ids": [[1]]}, r"hash_ids must have one entry per request: 2, got 1"),
        (
            {"hash_ids": [[1], [2, 3]]},
            r"hash_ids\[1\] must name the 1 blocks of 512 that 9 tokens have, got 2",
        ),
        ({"hash_ids": [[1], [-1]]}, r"hash_ids\[1\] holds -1: names are integers in 0..4294967295"),
        (
            {"hash_ids": [[1], [2]], "prompt_texts": ["a", "b"]},
            "hash_ids stand for prompts that are not known",
        ),
        ({"hash_ids": [[1], [2]], "common_lens": [1, 1]}, "without hash_ids; drop them"),
        ({"hash_block_len": 0}, r"hash_block_len must lie in \[1,"),
    ],
)
def test_hashes_are_checked(changes, message):
    values = {"name": "t", "seed": 0, "arrival_times": [0, 0], "prompt_lens": [8, 9], "output_lens": [1, 1]}
    with pytest.raises((ConfigError, RequestError), match=message):
        Trace(**(values | changes))


# What a cache finds of it

BLOCK = 16


def sessions(path, count=30, seed=0):
    """A file in Mooncake's format: sessions over a few system prompts, whose turns come mixed."""
    rng = random.Random(seed)
    names = itertools.count(4)
    systems = {number: [number] for number in range(4)}
    open_sessions = []
    rows = []
    while count or open_sessions:
        if count and (not open_sessions or rng.random() < 0.35):
            open_sessions.append((list(systems[rng.randrange(4)]), rng.randint(1, 6)))
            count -= 1
        place = rng.randrange(len(open_sessions))
        prompt, turns = open_sessions.pop(place)
        prompt = prompt + [next(names) for _ in range(rng.randint(1, 2))]
        rows.append(
            {
                "timestamp": 5000 * len(rows),  # each has ended before the next comes
                "input_length": 512 * len(prompt),
                "output_length": 1,
                "hash_ids": prompt,
            }
        )
        if turns > 1:
            open_sessions.append((prompt, turns - 1))
    return write_lines(path, rows)


def ideal_share(path):
    """Tokens of blocks that were there before, of all."""
    seen, found, total = set(), 0, 0
    for line in path.read_text().splitlines():
        names = json.loads(line)["hash_ids"]
        found += sum(name in seen for name in names)
        total += len(names)
        seen.update(names)
    return found / total


def lru_share(path, capacity):
    """Tokens that a cache of so many blocks of 16 tokens finds, the least recently used leaving first.

    Of one request the end of the prompt leaves first, and a token is always computed.
    """
    cache = collections.OrderedDict()
    found = total = 0
    for line in path.read_text().splitlines():
        row = json.loads(line)
        blocks = [(name, part) for name in row["hash_ids"] for part in range(512 // BLOCK)]
        hits = sum(1 for _ in itertools.takewhile(cache.__contains__, blocks[:-1]))
        found += hits * BLOCK
        total += row["input_length"]
        for block in blocks[:hits]:
            del cache[block]  # held
        while len(cache) > capacity - len(blocks):
            cache.popitem(last=False)
        for block in reversed(blocks):
            cache.pop(block, None)
            cache[block] = True
    return found / total


def simulated_share(path, num_blocks):
    found = simulate(path, policy="vllm_v1", gpu_blocks=num_blocks)
    return found.runs[0].figures["cached_share"]


def test_a_large_cache_finds_what_the_hashes_allow(tmp_path):
    path = sessions(tmp_path / "sessions.jsonl")
    ideal = ideal_share(path)
    assert 0.5 < ideal < 0.9
    assert simulated_share(path, 100_000) == pytest.approx(ideal, abs=0.02)
    assert lru_share(path, 100_000) == pytest.approx(ideal, abs=0.02)


@pytest.mark.parametrize("num_blocks", [400, 500, 700, 1000, 1400])
def test_a_smaller_cache_finds_what_an_lru_does(tmp_path, num_blocks):
    path = sessions(tmp_path / "sessions.jsonl")
    expected = lru_share(path, num_blocks)
    assert expected < ideal_share(path)
    assert simulated_share(path, num_blocks) == pytest.approx(expected)


@pytest.mark.parametrize("command", ["simulate", "bench throughput", "bench serve", "compare"])
def test_commands_read_a_trace_by_the_same_options(command, tmp_path, capsys):
    """Each is of a trace; what it is said of is what the file holds."""
    path = write_json(tmp_path / "two.json", guidellm(3, 1))
    model = str(demo_model_path())
    with_trace = {
        "simulate": ["--trace", str(path), "--gpu-blocks=64"],
        "bench throughput": ["--trace", str(path), "--model", model],
        "bench serve": ["--trace", str(path)],
        "compare": [model, str(path)],
    }[command]
    without = [model, "short"] if command == "compare" else []
    words = command.split()
    assert main([*words, *with_trace]) == 2
    assert "has 2 benchmarks" in (error := capsys.readouterr().err)
    assert "pass --benchmark" in error
    assert main([*words, *with_trace, "--benchmark=7"]) == 2
    assert "has 2 of them; name one from 0 to 1" in capsys.readouterr().err
    assert main([*words, *with_trace, "--benchmark=1", "--time-unit=ms"]) == 2
    assert "time_unit" in capsys.readouterr().err.replace("--time-unit", "time_unit")
    for option in ("--benchmark=1", "--time-unit=ms", "--hash-block-len=16", "--on-bad=skip"):
        assert main([*words, *without, option]) == 2
        assert option.partition("=")[0] in capsys.readouterr().err
