"""Which tokens may come next: structured outputs, allowed tokens and bad words, against slow oracles."""

import json
import re

import llguidance
import llguidance.hf
import llguidance.numpy
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxllm import LLM, RequestOutputKind, SamplingParams, StructuredOutputsParams
from jaxllm.errors import SamplingParamsError
from jaxllm.executor import compile_stats
from jaxllm.executor.programs import ProgramKey
from jaxllm.sampling.token_masks import BadWords, MaskThreads, TokenMask, TokenMasks, fill_masks

pytestmark = pytest.mark.usefixtures("optimised")

EMAIL = r"[a-z]{3,8}@[a-z]{2,5}\.(com|org)"
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PROMPTS = ["The cat", "def f(x):", "One day", "She said"]


@pytest.fixture(scope="module")
def llm():
    """Few blocks, so that long outputs of several requests are preempted."""
    with LLM(max_num_seqs=4, max_model_len=128, block_size=16, num_gpu_blocks_override=12) as llm:
        yield llm


@pytest.fixture(scope="module")
def masks(llm):
    return TokenMasks(llm.get_tokenizer(), 4096, llm.engine.eos_token_ids)


def generate(llm, prompts, params):
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_is_the_best_of_those_that_the_grammar_allows(llm, temperature):
    """The oracle asks for all log-probabilities, one token at a time, and has a matcher of its own."""
    params = SamplingParams(
        temperature=temperature,
        top_k=1 if temperature else 0,  # of those allowed
        max_tokens=40,
        structured_outputs={"regex": EMAIL},
    )
    tokenizer = llm.get_tokenizer()
    vocabulary = llguidance.hf.from_tokenizer(tokenizer, n_vocab=4096)
    matcher = llguidance.LLMatcher(vocabulary, llguidance.LLMatcher.grammar_from_regex(EMAIL))
    ids, found = tokenizer.encode(PROMPTS[0]), []
    bits = np.zeros((1, 128), np.int32)
    while not found or found[-1] != tokenizer.eos_token_id:
        (step,) = generate(
            llm, [{"prompt_token_ids": ids + found}], SamplingParams(max_tokens=1, logprobs=-1)
        )
        llguidance.numpy.fill_next_token_bitmask(matcher, bits)
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")
        best = max(np.flatnonzero(allowed).tolist(), key=lambda token: step.logprobs[0][token].logprob)
        assert len(step.logprobs[0]) == 4096
        found.append(best)
        assert matcher.consume_token(best)
    (output,) = generate(llm, PROMPTS[:1], params)
    assert output.token_ids == found
    assert output.finish_reason == "stop"
    assert re.fullmatch(EMAIL, output.text)


def test_every_kind(llm):
    for given_params, is_right in (
        ({"choice": ["yes", 'n"o\n', "pérhaps"]}, lambda text: text in ("yes", 'n"o\n', "pérhaps")),
        ({"grammar": 'start: "a" "b"~2..4 "c"'}, lambda text: re.fullmatch("ab{2,4}c", text)),
        ({"grammar": 'root ::= "x" | "y" root'}, lambda text: re.fullmatch("y*x", text)),
        ({"json": json.dumps(PERSON), "disable_any_whitespace": True}, json.loads),
        ({"json_object": True, "disable_any_whitespace": True}, lambda text: type(json.loads(text)) is dict),
    ):
        params = SamplingParams(structured_outputs=given_params, seed=3, max_tokens=90)
        outputs = generate(llm, PROMPTS, params)
        assert {output.finish_reason for output in outputs} <= {"stop", "length"}
        ended = [output.text for output in outputs if output.finish_reason == "stop"]
        assert ended
        for text in ended:
            assert is_right(text), text


def test_mates_preemption_and_sampling_change_nothing(llm):
    """Constrained and free requests together, in a pool too small for them, get the tokens of lone ones."""
    shared = {"max_tokens": 60, "ignore_eos": True}
    mixed = [
        SamplingParams(seed=1, max_tokens=60, structured_outputs={"regex": "([a-z]+ ){20}"}),
        SamplingParams(temperature=0, **shared),
        SamplingParams(seed=2, top_p=0.9, frequency_penalty=0.5, bad_words=["the", "and"], **shared),
        SamplingParams(seed=3, min_p=0.02, allowed_token_ids=range(300, 900), **shared),
        SamplingParams(seed=4, max_tokens=60, structured_outputs={"json": PERSON}, logprobs=2),
        SamplingParams(temperature=0, logit_bias={5: 2}, structured_outputs={"regex": "[0-9 ]{90}"}),
    ]
    prompts = [f"{PROMPTS[index % 4]} {index}" for index in range(len(mixed))]
    outputs = llm.generate(prompts, mixed, use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in outputs)
    llm.reset_prefix_cache()
    for prompt, params, output in zip(prompts, mixed, outputs, strict=True):
        (alone,) = generate(llm, prompt, params)
        assert alone.token_ids == output.outputs[0].token_ids
        assert alone.text == output.outputs[0].text
    samples = llm.generate(
        prompts[0], SamplingParams.from_dict({**_as_dict(mixed[0]), "n": 3}), use_tqdm=False
    )
    assert [one.index for one in samples[0].outputs] == [0, 1, 2]
    assert samples[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids
    assert samples[0].outputs[1].token_ids != outputs[0].outputs[0].token_ids


def _as_dict(params):
    return {
        "seed": params.seed,
        "max_tokens": params.max_tokens,
        "structured_outputs": params.structured_outputs,
    }


_masked = st.one_of(
    st.fixed_dictionaries({"structured_outputs": st.sampled_from([{"regex": EMAIL}, {"json": PERSON}])}),
    st.fixed_dictionaries(
        {"ignore_eos": st.booleans()},
        optional={
            "allowed_token_ids": st.sampled_from([range(300, 900), [0, 40, 41, 42]]),
            "bad_words": st.sampled_from([["the"], ["was", "said", "one day"]]),
            "min_tokens": st.integers(0, 8),
            "stop": st.sampled_from([["a"], ["zz", "he"]]),
        },
    ),
)
_params = st.builds(
    lambda masked, rest: {**masked, **rest},
    _masked,
    st.fixed_dictionaries(
        {"seed": st.integers(0, 5), "max_tokens": st.integers(8, 40)},
        optional={
            "temperature": st.sampled_from([0.0, 0.7, 1.0]),
            "top_k": st.integers(1, 50),
            "top_p": st.floats(0.2, 1),
            "min_p": st.floats(0, 0.5),
            "frequency_penalty": st.sampled_from([-1.0, 0.5]),
            "repetition_penalty": st.sampled_from([0.8, 1.5]),
            "logit_bias": st.just({7: 3.0, 300: -5.0}),
            "logprobs": st.sampled_from([0, 3, -1]),
            "prompt_logprobs": st.just(1),
            "truncate_prompt_tokens": st.integers(1, 9),
            "n": st.integers(1, 3),
        },
    ),
)


@given(mixed=st.lists(_params, min_size=2, max_size=6), prompts=st.permutations(PROMPTS * 2))
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
def test_outputs_do_not_depend_on_mates(llm, mixed, prompts):
    """Of random mixes of all that there is, each gets what it gets alone, in a pool too small for all."""
    for one in mixed:
        if one.get("temperature", 1.0) == 0:
            one["n"] = 1
    params = [SamplingParams(**one) for one in mixed]
    prompts = prompts[: len(params)]
    together = llm.generate(prompts, params, use_tqdm=False)
    for prompt, one, output in zip(prompts, params, together, strict=True):
        llm.reset_prefix_cache()
        (alone,) = llm.generate(prompt, one, use_tqdm=False)
        for found, expected in zip(output.outputs, alone.outputs, strict=True):
            assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
            assert (found.finish_reason, found.stop_reason) == (expected.finish_reason, expected.stop_reason)
            assert (found.logprobs is None) == (one.logprobs is None)


def test_nothing_is_compiled_a_second_time(llm):
    params = [
        SamplingParams(seed=1, max_tokens=20, structured_outputs={"regex": EMAIL}),
        SamplingParams(temperature=0, max_tokens=9, bad_words=["the"]),
        SamplingParams(max_tokens=9, logprobs=-1),
    ]

    def unusual():
        """Programs that are not compiled beside the engine, once there are all that were begun."""
        while not llm.executor._programs.is_settled:
            llm.executor.wait_for_programs(1.0)
        return {key for key in llm.executor.programs if not isinstance(key, ProgramKey)}

    programs, before = set(), None
    while before is None or (len(before) < len(programs) and len(before) < 12):  # smaller ones come later
        before = programs
        generate(llm, PROMPTS[:3], params)
        programs = unusual()
    assert programs == before != set()


def test_everything_warmed_up_compiles_nothing_later(llm):
    params = [
        SamplingParams(seed=1, max_tokens=20, structured_outputs={"regex": EMAIL}, n=2, logprobs=2),
        SamplingParams(temperature=0, max_tokens=9, bad_words=["the"], prompt_logprobs=1),
        SamplingParams(
            max_tokens=9, seed=2, top_k=5, top_p=0.9, min_p=0.1, frequency_penalty=0.5, min_tokens=4
        ),
        SamplingParams(temperature=0, max_tokens=9, logit_bias={7: 3.0}),
        SamplingParams(temperature=0, max_tokens=9),
    ]
    prompts = [*PROMPTS, "import os"]
    expected = [
        llm.generate(prompt, one, use_tqdm=False)[0] for prompt, one in zip(prompts, params, strict=True)
    ]
    sizes = {"decode_buckets": [1, 4], "prefill_buckets": [32], "max_num_seqs": 4, "max_model_len": 128}
    with LLM(warm_up="everything", num_gpu_blocks_override=40, **sizes) as ready:
        programs = set(ready.executor.programs)
        before, _ = compile_stats.total()
        outputs = ready.generate(prompts, params, use_tqdm=False)
        for output, other in zip(outputs, expected, strict=True):
            assert [one.token_ids for one in output.outputs] == [one.token_ids for one in other.outputs]
            assert (output.logprobs is None) == (other.logprobs is None)
            assert (output.prompt_logprobs is None) == (other.prompt_logprobs is None)
        assert compile_stats.total()[0] == before
        assert set(ready.executor.programs) == programs
        steps = {key for key in programs if isinstance(key, ProgramKey)}
        assert len(steps) == 2 * 2 + 2 * 2  # greedy and random decodes; steps that score prompts or not
        ready.generate(prompts[0], SamplingParams(max_tokens=2, logprobs=-1), use_tqdm=False)
        assert set(ready.executor.programs) == programs


def test_bad_words_do_not_come(llm):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (free,) = generate(llm, PROMPTS[:1], params)
    words = [word for word in free.text.split() if word.isalpha()]
    assert len(words) > 2
    tokenizer = llm.get_tokenizer()
    banned = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, bad_words=words)
    (output,) = generate(llm, PROMPTS[:1], banned)
    assert output.token_ids != free.token_ids
    for word in words:
        for text in (word, f" {word}"):
            ids = tokenizer.encode(text, add_special_tokens=False)
            starts = range(len(output.token_ids) - len(ids) + 1)
            assert not any(output.token_ids[start : start + len(ids)] == ids for start in starts)


def test_bad_words_are_forbidden_in_every_spelling(llm, masks):
    """After a space, too, where that spelling has more or fewer tokens."""
    tokenizer = llm.get_tokenizer()
    words = [word for word in ("Ann", "Bob", "xylophone", "qwerty", "The") if word.isalpha()]
    spelled = [
        [tokenizer.encode(text, add_special_tokens=False) for text in (word, f" {word}")] for word in words
    ]
    assert any(len(plain) != len(after) for plain, after in spelled)
    for word, both in zip(words, spelled, strict=True):
        for ids in both:
            mask = masks.make(SamplingParams(bad_words=[word]))
            row = np.full(128, -1, np.int32)
            mask.fill(row, [7, *ids[:-1]])
            bits = np.unpackbits(row.view(np.uint8), bitorder="little")
            assert not bits[ids[-1]], (word, ids)


def test_bad_words_are_followed_a_token_at_a_time(monkeypatch):
    """What a step costs does not grow with the words: each looks at the new tokens alone."""
    rng = np.random.default_rng(0)
    words = [tuple(rng.integers(0, 50, size).tolist()) for size in rng.integers(2, 6, 2000)]
    bad_words, followed = BadWords(words, 64), []
    after = BadWords.after

    def counted(self, state, token):
        followed.append(token)
        return after(self, state, token)

    monkeypatch.setattr(BadWords, "after", counted)
    mask, outputs = TokenMask(bad_words=bad_words), []
    for token in rng.integers(0, 50, 300).tolist():
        outputs.append(token)
        row = np.full(2, -1, np.int32)
        mask.fill(row, outputs)
        banned = {word[-1] for word in words if word[:-1] == tuple(outputs[len(outputs) - len(word) + 1 :])}
        found = np.unpackbits(row.view(np.uint8), bitorder="little")
        assert set(np.flatnonzero(found == 0).tolist()) == banned
    assert followed == outputs


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_masks_of_allowed_and_bad_tokens(data):
    """Against sets; words whose last token would leave nothing do not count."""
    size = 70
    allowed = data.draw(st.none() | st.sets(st.integers(0, size - 1), min_size=1, max_size=6))
    words = data.draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), max_size=6))
    outputs = data.draw(st.lists(st.integers(0, 5), max_size=6))
    bits = None
    if allowed is not None:
        flags = np.zeros(96, bool)
        flags[list(allowed)] = True
        bits = np.packbits(flags, bitorder="little").view(np.int32)
    mask = TokenMask(bits, BadWords(words, size))
    rows = np.full((3, 3), -1, np.int32)
    fill_masks([(None, [], ()), (mask, outputs, ())], rows)
    banned = {word[-1] for word in words if word[:-1] == tuple(outputs[len(outputs) - len(word) + 1 :])}
    left = set(range(size) if allowed is None else allowed)
    expected = left - banned or left
    found = np.unpackbits(rows[1].view(np.uint8), bitorder="little")[:size]
    assert set(np.flatnonzero(found).tolist()) == expected
    assert (rows[[0, 2]] == -1).all()
    assert mask.depends_on_outputs == any(len(word) > 1 for word in words)


_values = st.recursive(
    st.sampled_from(
        [
            {"type": "integer"},
            {"type": "boolean"},
            {"type": "null"},
            {"type": "string", "maxLength": 5},
            {"type": "number", "minimum": 0, "maximum": 10},
            {"enum": ["a", 1, None, "é\n"]},
            {"const": {"k": [1, "x"]}},
            {"type": "string", "pattern": "^[ab]{2,3}$"},
        ]
    ),
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
        st.dictionaries(st.sampled_from(["a", "b", "c d"]), inner, min_size=1).map(
            lambda properties: {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
        ),
    ),
    max_leaves=4,
)


@given(schemas=st.lists(_values, min_size=4, max_size=4), seed=st.integers(0, 99))
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
def test_what_ends_by_stop_is_what_the_schema_says(llm, schemas, seed):
    params = [
        SamplingParams(
            seed=seed,
            max_tokens=60,
            structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=True),
        )
        for schema in schemas
    ]
    for schema, output in zip(schemas, generate(llm, PROMPTS, params), strict=True):
        assert output.finish_reason in ("stop", "length")
        if output.finish_reason == "stop":
            assert conforms(json.loads(output.text), schema), (output.text, schema)


def conforms(value, schema):
    if "anyOf" in schema:
        return any(conforms(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    if "const" in schema:
        return value == schema["const"]
    kind = schema["type"]
    if kind == "object":
        properties = schema["properties"]
        is_whole = isinstance(value, dict) and value.keys() == properties.keys()
        return is_whole and all(conforms(value[name], one) for name, one in properties.items())
    if kind == "array":
        return (
            isinstance(value, list) and len(value) <= 2 and all(conforms(x, schema["items"]) for x in value)
        )
    if kind == "string":
        return isinstance(value, str) and (
            len(value) <= 5 if "maxLength" in schema else bool(re.fullmatch("[ab]{2,3}", value))
        )
    if kind == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 10
    return value is None if kind == "null" else isinstance(value, bool)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "holds nothing: give exactly one of json, regex"),
        ({"json_object": False}, "holds nothing"),
        ({"json": False, "regex": "a"}, "holds json and regex"),
        ({"json": "{}", "regex": "a"}, "holds json and regex: give exactly one"),
        ({"regexp": "a"}, "has no 'regexp'; did you mean regex. it takes json, regex"),
        ("a+", "must be a StructuredOutputsParams or an object, not str"),
        ({"regex": ""}, "regex must be text that is not empty"),
        ({"regex": "a" * 1_000_001}, "regex has 1000001 characters: at most 1000000"),
        ({"json": "{"}, "json is no JSON"),
        ({"json": "[" * 100_000}, "json is no JSON"),
        ({"json": 5}, "must be a schema, an object, not int"),
        ({"json": {"a": {1, 2}}}, "json is no JSON schema"),
        ({"json": {"enum": [{1: 2}]}}, "json is no JSON schema: the name 1 is no text"),
        ({"json": {"const": float("nan")}}, "json is no JSON schema"),
        ({"choice": "yes"}, "choice must be a list of strings"),
        ({"choice": []}, "choice is empty"),
        ({"choice": [1]}, "choice must hold strings"),
        ({"choice": (str(i) for i in range(10**9))}, "at most 10000"),
        ({"json_object": "yes"}, "json_object must be True or False"),
        ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace is for json, not for regex"),
        ({"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "}, "contradicts"),
    ],
)
def test_parameters_that_are_none(value, message):
    with pytest.raises(SamplingParamsError, match=message):
        SamplingParams(structured_outputs=value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"regex": "("}, "cannot be compiled"),
        ({"json": {"type": "objekt"}}, "Invalid type: objekt"),
        ({"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "Unsatisfiable"),
        ({"json": {"properties": {f"k{i}": {"type": "string"} for i in range(20_000)}}}, "too large"),
        ({"json": {"enum": []}}, "it allows nothing: Unsatisfiable schema: anyOf is empty"),
        ({"json": False}, "it allows nothing: Unsatisfiable schema: schema is false"),
        ({"json": "false", "disable_any_whitespace": True}, "it allows nothing"),
        ({"regex": "[a&&b]"}, "compiled: it allows nothing$"),
        ({"grammar": 'start: a\na: a "b"'}, "compiled: it allows nothing$"),
        ({"grammar": 'start: "x" /[a&&b]/'}, "after 1 tokens it allows nothing$"),
        ({"grammar": "start: foo"}, "unknown name"),
    ],
)
def test_grammars_that_cannot_be_compiled(llm, value, message):
    params = SamplingParams(structured_outputs=value)
    with pytest.raises(SamplingParamsError, match=message):
        llm.generate("a", params, use_tqdm=False)
    assert generate(llm, "The", SamplingParams(max_tokens=1, temperature=0))[0].finish_reason == "length"


@pytest.mark.parametrize("regex", ["(a+)+$", "(.*a){30}", "[ab]*a[ab]{12}", "((a{1,100}){1,100}){1,100}"])
def test_expressions_that_others_hang_on(llm, regex):
    (output,) = generate(llm, "a", SamplingParams(max_tokens=30, seed=0, structured_outputs={"regex": regex}))
    assert output.finish_reason in ("stop", "length", "error")
    if output.finish_reason == "stop":
        assert set(output.text) <= set("ab") or ".*" in regex


def test_a_grammar_that_gives_up_ends_its_request(llm, monkeypatch):
    mates = SamplingParams(temperature=0, max_tokens=8)
    (alone,) = generate(llm, PROMPTS[:1], mates)

    def give_up(self, *arguments):
        raise RuntimeError("too complex")

    monkeypatch.setattr(MaskThreads, "_fill", give_up)
    params = [SamplingParams(max_tokens=9, structured_outputs={"regex": "[a-z]+"}), mates]
    failed, fine = generate(llm, [PROMPTS[1], PROMPTS[0]], params)
    assert (failed.finish_reason, len(failed.token_ids)) == ("error", 1)
    assert failed.stop_reason == "its grammar could not be followed: too complex"
    assert fine.token_ids == alone.token_ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens=2 .*contradicts"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos=True .*contradicts"),
        ({"structured_outputs": {"regex": "a"}, "bad_words": ["a"]}, "bad_words=.*contradicts"),
        ({"structured_outputs": {"regex": "a"}, "allowed_token_ids": [1]}, "allowed_token_ids=.*contradicts"),
        ({"allowed_token_ids": []}, "allows nothing"),
        ({"allowed_token_ids": [-1]}, "entry=-1"),
        ({"bad_words": "the"}, "must be a list of strings"),
        ({"bad_words": [""]}, "0 characters"),
        ({"output_kind": "all"}, "must be a RequestOutputKind: CUMULATIVE, DELTA, FINAL_ONLY"),
        ({"truncate_prompt_tokens": 0}, "must be in"),
    ],
)
def test_parameters_that_contradict_or_are_out_of_range(options, message):
    with pytest.raises(SamplingParamsError, match=message):
        SamplingParams(**options)


def test_masks_that_cannot_be(llm, masks):
    with pytest.raises(SamplingParamsError, match=r"token id 4096 is outside.*0\.\.4095"):
        llm.generate("a", SamplingParams(allowed_token_ids=[1, 4096]), use_tqdm=False)
    word = llm.get_tokenizer().encode("the", add_special_tokens=False)
    with pytest.raises(SamplingParamsError, match="leave none of allowed_token_ids"):
        masks.make(SamplingParams(allowed_token_ids=word, bad_words=["the"]))
    with pytest.raises(SamplingParamsError, match="hold only tokens that end the output"):
        masks.make(SamplingParams(allowed_token_ids=[llm.get_tokenizer().eos_token_id], min_tokens=3))
    bare = TokenMasks(None, 4096, {0})
    with pytest.raises(SamplingParamsError, match="need a tokenizer"):
        bare.make(SamplingParams(bad_words=["a"]))
    with pytest.raises(SamplingParamsError, match=r"tokenizer\.json: none was loaded"):
        bare.make(SamplingParams(structured_outputs={"regex": "a"}))
    endless = TokenMasks(llm.get_tokenizer(), 4096, set())
    with pytest.raises(SamplingParamsError, match="set eos_token_id there"):
        endless.make(SamplingParams(structured_outputs={"regex": "a"}))


def test_parameters_are_hashable_and_come_back_from_json():
    params = SamplingParams(structured_outputs={"json": PERSON}, output_kind="delta", bad_words=["a"][:0])
    again = SamplingParams.from_dict(
        {"structured_outputs": {"json": json.dumps(PERSON)}, "output_kind": "DELTA"}
    )
    assert params == again
    assert hash(params) == hash(again)


def test_a_prompt_is_cut_to_its_last_tokens(llm):
    ids = llm.get_tokenizer().encode(" ".join(PROMPTS) * 3)
    params = SamplingParams(temperature=0, max_tokens=5, truncate_prompt_tokens=4)
    (cut,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    assert cut.prompt_token_ids == ids[-4:]
    (short,) = generate(llm, [{"prompt_token_ids": ids[-4:]}], SamplingParams(temperature=0, max_tokens=5))
    assert cut.outputs[0].token_ids == short.token_ids
    long = (ids * 20)[:400]
    params = SamplingParams(temperature=0, max_tokens=5, truncate_prompt_tokens=-1)
    (whole,) = llm.generate([{"prompt_token_ids": long}], params, use_tqdm=False)
    assert whole.prompt_token_ids == long[-123:]


@pytest.mark.parametrize("n", [1, 2])
def test_deltas_are_what_is_new(llm, n):
    options = {"seed": 5, "max_tokens": 30, "logprobs": 1, "n": n, "stop": ["zzz", "the"]}
    (final,) = llm.generate(PROMPTS[0], SamplingParams(**options), use_tqdm=False)
    deltas = list(llm.stream(PROMPTS[0], SamplingParams(output_kind=RequestOutputKind.DELTA, **options)))
    assert [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True]
    for expected in final.outputs:
        parts = [one for output in deltas for one in output.outputs if one.index == expected.index]
        assert "".join(one.text for one in parts) == expected.text
        assert [token for one in parts for token in one.token_ids] == expected.token_ids
        assert [scores for one in parts for scores in one.logprobs] == expected.logprobs
        assert parts[-1].cumulative_logprob == pytest.approx(expected.cumulative_logprob)
        assert [one.finish_reason for one in parts] == [None] * (len(parts) - 1) + [expected.finish_reason]
    only = list(llm.stream(PROMPTS[0], SamplingParams(output_kind="final_only", **options)))
    assert [one.text for one in only[0].outputs] == [one.text for one in final.outputs]
    assert len(only) == 1
