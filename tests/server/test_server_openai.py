"""OpenAI's own client against the server: every endpoint and option, beside the offline engine."""

import itertools
import json
import threading

import jsonschema
import openai
import pytest
from server_helpers import SMALL, serving

from jaxllm.engine.output_builder import OutputBuilder
from jaxllm.engine.outputs import Logprob
from jaxllm.llm import LLM
from jaxllm.sampling.params import SamplingParams
from jaxllm.server.scores import completion_logprobs

PROMPT = "def add(a, b):"
MESSAGES = [{"role": "user", "content": "add two numbers"}]


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running
        running.wait_until_idle()


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def llm():
    with LLM(**SMALL) as made:
        yield made


def complete(client, prompt=PROMPT, **options):
    return client.completions.create(**{"model": "demo_model", "prompt": prompt, "max_tokens": 8} | options)


def greedy(client, prompt=PROMPT, **options):
    return complete(client, prompt, temperature=0, **options)


def chat(client, messages=None, **options):
    chosen = {"model": "demo_model", "messages": messages or MESSAGES, "max_tokens": 8} | options
    return client.chat.completions.create(**chosen)


def offline(llm, prompts, **params):
    return llm.generate(prompts, SamplingParams(**{"max_tokens": 8} | params), use_tqdm=False)


def test_models_are_listed_and_found(client):
    assert [one.id for one in client.models.list()] == ["demo_model"]
    assert client.models.retrieve("demo_model").id == "demo_model"
    with pytest.raises(openai.NotFoundError, match="demo_model"):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError) as caught:
        complete(client, model="gpt-4")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("form", ["text", "texts", "ids", "lists of ids"])
def test_prompts_in_every_form_have_the_tokens_of_the_offline_engine(client, llm, form):
    texts = [PROMPT, "import os", "class A:"]
    ids = [llm.get_tokenizer().encode(text) for text in texts]
    prompts = {"text": PROMPT, "texts": texts, "ids": ids[0], "lists of ids": ids}[form]
    expected = offline(llm, ids if form in ("texts", "lists of ids") else [ids[0]], temperature=0)
    response = greedy(client, prompts)
    assert [choice.text for choice in response.choices] == [one.text for one in expected]
    assert [choice.index for choice in response.choices] == list(range(len(expected)))
    assert {choice.finish_reason for choice in response.choices} == {"length"}
    num_prompt = sum(len(one.prompt_token_ids) for one in expected)
    usage = response.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt, 8 * len(expected))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert (response.object, response.model) == ("text_completion", "demo_model")
    assert response.id.startswith("cmpl-")


def test_streams_give_what_whole_responses_do(client):
    prompts = [PROMPT, "import os"]
    whole = greedy(client, prompts, logprobs=1)
    texts, scores, usage = ["", ""], [[], []], None
    for chunk in greedy(client, prompts, logprobs=1, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            assert usage is None
            texts[choice.index] += choice.text
            scores[choice.index] += choice.logprobs.token_logprobs
            if choice.finish_reason is not None:
                assert choice.finish_reason == "length"
        usage = chunk.usage
    assert texts == [choice.text for choice in whole.choices]
    assert scores == [pytest.approx(choice.logprobs.token_logprobs, abs=1e-4) for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_usage_in_each_chunk_counts_up(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        chunk.usage.completion_tokens
        for chunk in greedy(client, stream=True, extra_body={"stream_options": options})
    ]
    assert counts == sorted(counts)
    assert counts[-1] == 8


def test_chunks_have_no_usage_unless_it_is_asked_for(client):
    assert all(chunk.usage is None for chunk in greedy(client, stream=True))


def test_samples_are_those_of_the_offline_engine(client, llm):
    response = complete(client, n=3, seed=7, temperature=0.8)
    [expected] = offline(llm, PROMPT, n=3, seed=7, temperature=0.8)
    assert [choice.text for choice in response.choices] == [one.text for one in expected.outputs]
    texts = ["", "", ""]
    for chunk in complete(client, n=3, seed=7, temperature=0.8, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [one.text for one in expected.outputs]


def test_the_best_samples_come_first(client, llm):
    response = complete(client, n=2, best_of=4, seed=3, logprobs=0)
    [expected] = offline(llm, PROMPT, n=2, best_of=4, seed=3, logprobs=0)
    assert [choice.text for choice in response.choices] == [one.text for one in expected.outputs]
    with pytest.raises(openai.BadRequestError, match="cannot be streamed"):
        complete(client, n=1, best_of=2, stream=True)


def test_logprobs_and_echo(client, llm):
    response = greedy(client, logprobs=3, echo=True)
    [expected] = offline(llm, PROMPT, temperature=0, logprobs=3, prompt_logprobs=3)
    [choice] = response.choices
    tokenizer = llm.get_tokenizer()
    assert choice.text == PROMPT + expected.text
    ids = [*expected.prompt_token_ids, *expected.token_ids]
    assert choice.logprobs.tokens == [tokenizer.decode([one]) for one in ids]
    positions = [*expected.prompt_logprobs, *expected.logprobs]
    chosen = [position and position[one].logprob for one, position in zip(ids, positions, strict=True)]
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(chosen[1:], abs=1e-4)
    assert choice.logprobs.top_logprobs[0] is None
    for top, position in zip(choice.logprobs.top_logprobs[1:], positions[1:], strict=True):
        assert top.values() == pytest.approx([one.logprob for one in position.values()], abs=1e-4) or len(
            top
        ) < len(position)
    shown = zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)
    assert all(choice.text[offset:].startswith(token) for token, offset in list(shown)[1:])


def test_of_tokens_of_the_same_text_none_is_lost():
    position = {
        9: Logprob(logprob=-4.0, rank=30, decoded_token=""),
        7: Logprob(logprob=-0.5, rank=1, decoded_token=""),
        8: Logprob(logprob=-0.7, rank=2, decoded_token="a"),
    }
    found = completion_logprobs([9], [position], [0])
    # The sampled one has the name, so that who looks it up finds its score.
    assert found["top_logprobs"] == [{"": -4.0, "token_id:7": -0.5, "a": -0.7}]
    assert (found["tokens"], found["token_logprobs"]) == ([""], [-4.0])
    by_id = {"token_id:9": -4.0, "token_id:7": -0.5, "token_id:8": -0.7}
    assert completion_logprobs([9], [position], [0], as_ids=True)["top_logprobs"] == [by_id]


def test_scores_of_parts_of_characters_lose_nothing(client, llm):
    tokenizer = llm.get_tokenizer()
    spelled = {"structured_outputs": {"choice": ["\U0001f642\u00e9a"]}}
    ids = tokenizer.encode("\U0001f642\u00e9a", add_special_tokens=False)
    assert len(ids) > 5
    scores = greedy(client, logprobs=5, extra_body=spelled).choices[0].logprobs
    assert "".join(scores.tokens[: len(ids)]) == "\U0001f642\u00e9a"
    assert scores.tokens[0] == ""
    for token, score, top in zip(scores.tokens, scores.token_logprobs, scores.top_logprobs, strict=True):
        assert len(top) in (5, 6)
        assert top[token] == score
        assert next(iter(top)) == token
    options = {"logprobs": True, "top_logprobs": 5, "max_tokens": 12, "temperature": 0}
    for as_ids in (False, True):
        body = {**spelled, "return_tokens_as_token_ids": as_ids}
        choice = chat(client, **options, extra_body=body).choices[0]
        content = choice.logprobs.content[: len(ids)]
        assert (
            bytes(itertools.chain.from_iterable(one.bytes for one in content))
            == choice.message.content.encode()
        )
        assert [one.token for one in content[:1]] == ([f"token_id:{ids[0]}"] if as_ids else [""])
        assert {len(one.top_logprobs) for one in choice.logprobs.content} == {5}
        assert all(b"\xef\xbf\xbd" not in bytes(one.bytes) for one in content)


def test_a_special_token_may_be_a_stop_string(client):
    hidden = {"ignore_eos": True, "allowed_token_ids": [0, 40], "logit_bias": {"0": 100}}
    for stream in (False, True):
        found = greedy(client, stop=["<|endoftext|>"], stream=stream, extra_body=hidden)
        ends = [one.choices[0] for one in found] if stream else [found.choices[0]]
        assert "".join(one.text for one in ends) == ""
        assert (ends[-1].finish_reason, ends[-1].model_extra["stop_reason"]) == ("stop", "<|endoftext|>")


def test_echo_in_a_stream(client):
    whole = greedy(client, logprobs=1, echo=True).choices[0]
    chunks = [one.choices[0] for one in greedy(client, logprobs=1, echo=True, stream=True)]
    assert chunks[0].text == PROMPT
    assert "".join(chunk.text for chunk in chunks) == whole.text
    tokens = [token for chunk in chunks if chunk.logprobs for token in chunk.logprobs.tokens]
    offsets = [place for chunk in chunks if chunk.logprobs for place in chunk.logprobs.text_offset]
    assert (tokens, offsets) == (whole.logprobs.tokens, whole.logprobs.text_offset)


def test_tokens_of_parts_of_characters_are_where_the_character_is(client, llm):
    prompt = "d\u00eda \u65e5\u672c \U0001f642 x"
    whole = greedy(client, prompt, logprobs=0, echo=True).choices[0]
    offsets = whole.logprobs.text_offset
    assert offsets == sorted(offsets)
    ids = llm.get_tokenizer()(prompt)["input_ids"]
    assert len(ids) > len(prompt)  # of some characters there are several
    texts = ["" for _ in prompt] + [""]
    for place, token in list(zip(offsets, whole.logprobs.tokens, strict=True))[1:]:  # <|endoftext|> has none
        if place < len(prompt):
            texts[place] += token
    for character, text in zip(prompt, texts, strict=False):
        assert text.startswith(character) or set(text) == {"\ufffd"} or text == ""
    chunks = [one.choices[0] for one in greedy(client, prompt, logprobs=0, echo=True, stream=True)]
    assert [place for one in chunks if one.logprobs for place in one.logprobs.text_offset] == offsets


def test_many_scores_are_named_in_a_thread_of_their_own(client, monkeypatch):
    threads = set()
    add = OutputBuilder.add

    def noted(self, delta):
        threads.add((delta.num_scored > 16, threading.current_thread().name.rpartition("_")[0]))
        return add(self, delta)

    monkeypatch.setattr(OutputBuilder, "add", noted)
    for stream in (False, True):
        response = complete(client, "x = 1\n" * 20, echo=True, logprobs=2, stream=stream)
        list(response)
    assert (True, "jaxllm-outputs") in threads
    assert all(is_many == (name == "jaxllm-outputs") for is_many, name in threads)


def test_prompts_are_scored_without_any_output(client):
    response = complete(client, max_tokens=0, echo=True, logprobs=1)
    [choice] = response.choices
    [*chunks] = complete(client, max_tokens=0, logprobs=1, stream=True)
    assert chunks[-1].choices[0].logprobs == complete(client, max_tokens=0, logprobs=1).choices[0].logprobs
    assert (choice.text, response.usage.completion_tokens) == (PROMPT, 0)
    assert len(choice.logprobs.tokens) == response.usage.prompt_tokens
    assert complete(client, max_tokens=0).choices[0].text == ""


def test_stops(client, llm):
    text = greedy(client, max_tokens=24).choices[0].text
    word = text[6:9]
    stopped = greedy(client, max_tokens=24, stop=word).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(word)], "stop")
    assert stopped.model_extra["stop_reason"] == word
    kept = greedy(client, max_tokens=24, stop=[word], extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == text[: text.index(word) + len(word)]
    pieces = [chunk.choices[0].text for chunk in greedy(client, max_tokens=24, stop=[word], stream=True)]
    assert "".join(pieces) == stopped.text
    [expected] = offline(llm, PROMPT, temperature=0)
    ending = expected.token_ids[3]
    by_token = greedy(client, extra_body={"stop_token_ids": [ending]}).choices[0]
    assert by_token.model_extra["stop_reason"] == ending
    later = greedy(client, extra_body={"stop_token_ids": [ending], "min_tokens": 8}).choices[0]
    assert later.finish_reason == "length"


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "seed": 1},
        {"top_p": 0.5, "seed": 1},
        {"presence_penalty": 1.5, "temperature": 0},
        {"frequency_penalty": 1.5, "temperature": 0},
        {"logit_bias": {"300": 50}, "temperature": 0},
        {"top_k": 3, "seed": 1},
        {"min_p": 0.2, "seed": 1},
        {"repetition_penalty": 1.5, "temperature": 0},
        {"min_tokens": 4, "temperature": 0},
        {"ignore_eos": True, "temperature": 0},
        {"allowed_token_ids": [300, 301, 302], "temperature": 0},
        {"bad_words": [" #"], "temperature": 0},
        {"truncate_prompt_tokens": 3, "temperature": 0},
        {"skip_special_tokens": False, "temperature": 0},
        {"structured_outputs": {"regex": "[a-c]{3}"}, "temperature": 0},
        {"structured_outputs": {"choice": ["yes", "no"]}, "temperature": 0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_sampling_parameters_mean_what_they_mean_offline(client, llm, options):
    [expected] = offline(llm, PROMPT, **options)
    own = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "seed")
    known = {name: value for name, value in options.items() if name in own}
    further = {name: value for name, value in options.items() if name not in own}
    response = complete(client, extra_body=further, **known)
    assert response.choices[0].text == expected.text


def test_token_ids_are_returned(client, llm):
    [expected] = offline(llm, PROMPT, temperature=0, logprobs=0)
    extra = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    choice = greedy(client, logprobs=0, extra_body=extra).choices[0]
    assert choice.model_extra["token_ids"] == expected.token_ids
    assert choice.model_extra["prompt_token_ids"] == expected.prompt_token_ids
    assert choice.logprobs.tokens == [f"token_id:{one}" for one in expected.token_ids]
    chunks = greedy(client, stream=True, extra_body={"return_token_ids": True})
    assert [
        one for chunk in chunks for one in chunk.choices[0].model_extra["token_ids"]
    ] == expected.token_ids
    choice = greedy(client, extra_body={"prompt_logprobs": 1}).choices[0]
    assert choice.model_extra["prompt_logprobs"][0] is None
    assert len(choice.model_extra["prompt_logprobs"]) == len(expected.prompt_token_ids)


def test_request_ids_come_back(client, server):
    assert greedy(client, extra_body={"request_id": "mine.1"}).id == "cmpl-mine.1"
    assert greedy(client, extra_headers={"x-request-id": "other"}).id == "cmpl-other"
    with pytest.raises(openai.BadRequestError) as caught:
        greedy(client, extra_body={"request_id": "a b"})
    assert caught.value.param == "request_id"


def test_the_prefix_cache_is_apart_by_salt(client):
    prompt = "import os\n" * 24
    assert greedy(client, prompt).usage.prompt_tokens_details.cached_tokens == 0
    assert greedy(client, prompt).usage.prompt_tokens_details.cached_tokens > 0
    salted = greedy(client, prompt, extra_body={"cache_salt": "s"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_urgency_is_refused_where_nobody_looks_at_it(client):
    for name, value in (("priority", 3), ("deadline", 2.5)):
        with pytest.raises(openai.BadRequestError, match=f"{name}=.*would be ignored") as caught:
            greedy(client, extra_body={name: value})
        assert caught.value.param == name


def test_chats_are_those_of_the_offline_engine(client, llm):
    [expected] = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    response = chat(client, temperature=0)
    [choice] = response.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert response.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert (response.object, response.id[:9]) == ("chat.completion", "chatcmpl-")
    assert chat(client, temperature=0, max_tokens=None, max_completion_tokens=8).choices[0] == choice
    chunks = list(chat(client, temperature=0, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    said = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(said) == expected.text
    assert chunks[-1].usage.completion_tokens == 8


def test_chats_with_samples_and_scores(client, llm):
    params = SamplingParams(n=2, seed=5, max_tokens=8, logprobs=2)
    [expected] = llm.chat(MESSAGES, params, use_tqdm=False)
    response = chat(client, n=2, seed=5, logprobs=True, top_logprobs=2)
    for choice, one in zip(response.choices, expected.outputs, strict=True):
        assert choice.message.content == one.text
        content = choice.logprobs.content
        values = [
            position[token].logprob for token, position in zip(one.token_ids, one.logprobs, strict=True)
        ]
        assert [scored.logprob for scored in content] == pytest.approx(values, abs=1e-4)
        assert all(len(scored.top_logprobs) == 2 for scored in content)
        assert bytes(content[0].bytes).decode() == content[0].token
    assert all(not one.top_logprobs for one in chat(client, logprobs=True).choices[0].logprobs.content)


def test_answers_keep_to_a_schema(client):
    schema = {"enum": ["one or two", "three", "some more"]}  # nothing that could go on for ever
    wanted = {"type": "json_schema", "json_schema": {"name": "one", "schema": schema, "strict": True}}
    content = chat(client, response_format=wanted, max_tokens=64, seed=0).choices[0].message.content
    jsonschema.validate(json.loads(content), schema)
    streamed = chat(client, response_format=wanted, max_tokens=64, seed=0, stream=True)
    assert "".join(chunk.choices[0].delta.content for chunk in streamed) == content
    text = complete(client, extra_body={"response_format": wanted}, max_tokens=64, seed=0).choices[0].text
    jsonschema.validate(json.loads(text), schema)
    plain = chat(client, response_format={"type": "text"}, temperature=0).choices[0].message.content
    assert plain == chat(client, temperature=0).choices[0].message.content
    started = chat(client, response_format={"type": "json_object"}, seed=1).choices[0].message.content
    assert started.lstrip().startswith("{")


def test_conversations_have_parts_and_may_be_continued(client, llm):
    parts = [{"role": "user", "content": [{"type": "text", "text": "add two numbers"}]}]
    assert chat(client, parts, temperature=0).choices == chat(client, temperature=0).choices
    open_turn = [*MESSAGES, {"role": "assistant", "content": "def add("}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    params = SamplingParams(temperature=0, max_tokens=8)
    [expected] = llm.chat(open_turn, params, use_tqdm=False, **extra)
    assert (
        chat(client, open_turn, temperature=0, extra_body=extra).choices[0].message.content == expected.text
    )
    echoed = chat(client, open_turn, temperature=0, extra_body={**extra, "echo": True})
    assert echoed.choices[0].message.content == "def add(" + expected.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chat_template": "{{ messages }}"}, "no templates are taken from requests"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "does not read 'tools'"),
        ({"reasoning_effort": "lots"}, "reasoning_effort"),
        ({"max_completion_tokens": 9}, "same limit"),
        ({"top_logprobs": 2}, "logprobs=true"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "text only"),
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema"),
        ({"store": True}, "nothing is stored"),
    ],
    ids=str,
)
def test_what_chats_cannot_be_asked_for_is_refused_by_name(client, options, words):
    with pytest.raises(openai.BadRequestError, match=words):
        chat(client, **{"extra_body": options})


@pytest.mark.parametrize(
    "options", [{"parallel_tool_calls": True}, {"store": False}, {"service_tier": "auto"}, {"functions": []}]
)
def test_options_that_change_nothing_are_taken(client, options):
    assert chat(client, temperature=0, extra_body=options).choices[0].finish_reason == "length"


def test_errors_name_the_field(client, server):
    with pytest.raises(openai.BadRequestError, match="unknown field 'max_token'") as caught:
        greedy(client, extra_body={"max_token": 3})
    assert (caught.value.param, caught.value.type) == ("max_token", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="temperature=-1") as caught:
        complete(client, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        greedy(client, [7] * 2000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        greedy(client, [7] * 5000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match=r"prompt.1.: .*1000000000") as caught:
        greedy(client, [[7], [10**9]])
    assert caught.value.param == "prompt"
    for prompt in ([], [[]], [""], ""):
        with pytest.raises(openai.BadRequestError) as caught:
            complete(client, prompt, temperature=-1)
        assert caught.value.param in ("prompt", "temperature")
    with pytest.raises(openai.BadRequestError, match="suffix"):
        greedy(client, suffix="end")
    with pytest.raises(openai.BadRequestError, match="stream_options is for streams"):
        greedy(client, extra_body={"stream_options": {"include_usage": True}})


def test_state_routes(server, client, llm):
    for path in ("/health", "/ping"):
        assert server.request("GET", path)[0] == 200
    assert server.post("/ping", {})[0] == 200
    assert server.request("GET", "/version")[2] == {"version": "0.1.0"}
    status, _, found = server.post("/tokenize", {"prompt": PROMPT, "return_token_strs": True})
    ids = llm.get_tokenizer().encode(PROMPT)
    assert (status, found["tokens"], found["count"], found["max_model_len"]) == (200, ids, len(ids), 1024)
    assert found["token_strs"] == llm.get_tokenizer().convert_ids_to_tokens(ids)
    bare = server.post("/tokenize", {"prompt": PROMPT, "add_special_tokens": False})[2]["tokens"]
    assert bare == llm.get_tokenizer().encode(PROMPT, add_special_tokens=False)
    of_chat = server.post("/tokenize", {"messages": MESSAGES})[2]
    assert of_chat["count"] == chat(client).usage.prompt_tokens
    assert server.post("/detokenize", {"tokens": bare})[2] == {"prompt": PROMPT}
    for body in ({}, {"prompt": "a", "messages": MESSAGES}, {"prompt": "a", "tools": []}):
        assert server.post("/tokenize", body)[0] == 400
    assert server.post("/detokenize", {"tokens": [10**6]})[0] == 400


def test_names_of_clients_are_taken_and_what_changes_nothing_is_left_out(client):
    extra = {"safety_identifier": "u-1", "prompt_cache_key": "k", "verbosity": "medium"}
    extra |= {"prompt_cache_retention": "in_memory"}
    assert chat(client, extra_body=extra).choices
    for name, value in {"verbosity": "high", "prompt_cache_retention": "24h", "cache_salt": ""}.items():
        with pytest.raises(openai.BadRequestError) as caught:
            complete(client, extra_body={name: value})
        assert caught.value.param == name
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, extra_body={"response_format": wrong})
    assert caught.value.param == "response_format"
