"""Calls that clients demand, in every format that a template shows, whole and streamed."""

import json

import jsonschema
import openai
import pytest
from server_helpers import serving

from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.sampling.grammars import Grammars
from jaxllm.sampling.params import SamplingParams
from jaxllm.server.protocol import ChatCompletionRequest
from jaxllm.server.tools import PLAIN, CallFormat, CallReader, DemandedCalls, call_format
from jaxllm.text.tokenizer import load_tokenizer

MESSAGES = [{"role": "user", "content": "add two numbers"}]
HERMES = """{% if tools %}{{ tools | length }} tools
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] -%}
{% if not loop.first %}{{ '\n' }}{% endif %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
ONE_AT_A_TIME = """{% for m in messages %}<|{{ m.role }}|>{% if not m.tool_calls %}{{ m.content }}{% else %}
{%- if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set f = m.tool_calls[0].function %}{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}
{%- endif %}<|end|>{% endfor %}"""
NAME_FIRST = """{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}{% for c in m.tool_calls or [] -%}
<|call|>{{ c.function.name }}<|call|>{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"""
ENDING = """{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}{% for c in m.tool_calls or [] -%}
{{ c.function.name }}:{{ c.function.arguments | tojson }}<|endoftext|>{% endfor %}{% endfor %}"""
NO_JSON = """{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }}>
{%- for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}{% endfor %};{% endfor %}"""
FORMATS = {
    "hermes": (
        HERMES,
        CallFormat(
            '<tool_call>\n{"name": "',
            '", "arguments": ',
            "}\n</tool_call>",
            '}\n</tool_call>\n<tool_call>\n{"name": "',
        ),
    ),
    "one at a time": (ONE_AT_A_TIME, CallFormat('{"name": "', '", "parameters": ', "}", None)),
    "special tokens": (NAME_FIRST, CallFormat("<|call|>", "<|call|>", "", "<|call|>")),
    "the end": (ENDING, CallFormat("", ":", "", None)),
    "no JSON": (NO_JSON, PLAIN),
    "no calls": ("{% for m in messages %}{{ m.content }}{% endfor %}", PLAIN),
}


def function(name, **properties):
    schema = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": "-", "parameters": schema}}


LEVELS = {"enum": ["low", "high", 3]}
SWITCH = function("switch", level=LEVELS)
SAY = function("say", to={"anyOf": [LEVELS, {"type": "null"}]})
OPEN = {"type": "function", "function": {"name": "say", "parameters": {}}}  # anything
NAMED = {"type": "function", "function": {"name": "switch"}}


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running
        running.wait_until_idle()


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def chat(client, **options):
    chosen = {"model": "demo_model", "messages": MESSAGES, "max_tokens": 96, "seed": 0} | options
    return client.chat.completions.create(**chosen)


@pytest.fixture(params=FORMATS)
def in_format(server, request, monkeypatch):
    template, form = FORMATS[request.param]
    monkeypatch.setattr(server.service.tokenizer, "chat_template", template)
    server.service.__dict__.pop("call_format", None)
    yield form
    server.service.__dict__.pop("call_format", None)


def a_tokenizer(template=None):
    """The demo model's, with a token that is no text."""
    tokenizer = load_tokenizer(demo_model_path())
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|call|>"]})
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("name", FORMATS)
def test_a_template_shows_how_its_model_writes_calls(name):
    template, expected = FORMATS[name]
    tokenizer = a_tokenizer(template)
    assert call_format(tokenizer) == expected


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_demanded_calls_come_as_calls(client, in_format, choice):
    options = {"tools": [SWITCH, SAY], "tool_choice": choice, "parallel_tool_calls": False}
    [whole] = chat(client, **options).choices
    [call] = whole.message.tool_calls
    assert whole.message.content is None
    assert whole.finish_reason == ("tool_calls" if choice == "required" else "stop")
    found = json.loads(call.function.arguments)
    used = {"switch": SWITCH, "say": SAY}[call.function.name]
    jsonschema.validate(found, used["function"]["parameters"])
    assert choice == "required" or call.function.name == "switch"
    name, arguments, reasons, ids = "", "", [], []
    for chunk in chat(client, **options, stream=True):
        [one] = chunk.choices
        assert not one.delta.content
        for delta in one.delta.tool_calls or ():
            assert delta.index == 0
            name += delta.function.name or ""
            arguments += delta.function.arguments or ""
            ids += [delta.id] if delta.id else []
        reasons += [one.finish_reason] if one.finish_reason else []
    assert (name, arguments) == (call.function.name, call.function.arguments)
    assert reasons == [whole.finish_reason]
    assert len(ids) == 1
    assert call.id.startswith("call_")


def test_every_sample_has_calls_of_its_own(client):
    choices = chat(client, tools=[SWITCH], tool_choice=NAMED, n=3).choices
    assert [one.message.tool_calls[0].function.name for one in choices] == ["switch"] * 3
    assert len({one.message.tool_calls[0].id for one in choices}) == 3


def test_what_is_cut_is_no_finished_call(client):
    cut = chat(client, tools=[SWITCH], tool_choice="required", max_tokens=3).choices[0]
    assert cut.finish_reason == "length"
    assert not cut.message.tool_calls or not cut.message.tool_calls[0].function.arguments.endswith("}")


def test_references_in_schemas_are_followed(client):
    schema = {
        "type": "object",
        "properties": {"level": {"$ref": "#/$defs/Level"}},
        "required": ["level"],
        "additionalProperties": False,
        "$defs": {"Level": LEVELS},
    }
    tool = {"type": "function", "function": {"name": "switch", "parameters": schema}}
    [call] = chat(client, tools=[tool], tool_choice=NAMED).choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), schema)


def test_a_function_without_parameters_has_none(client):
    tool = {"type": "function", "function": {"name": "switch"}}
    [call] = chat(client, tools=[tool], tool_choice=NAMED).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_several_calls_are_told_apart_however_they_are_cut(name, size):
    form, tokenizer = FORMATS[name][1], a_tokenizer()
    body = ChatCompletionRequest.model_validate(
        {"messages": MESSAGES, "tools": [SWITCH, OPEN, function("witch")], "tool_choice": "required"}
    )
    calls = DemandedCalls.of(body)
    params = calls.bound(SamplingParams(), form, tokenizer)
    spoken = [("say", '{"what": {"to": "low", "a": "}{\\"[", "say": ["say", 1]}}'), ("witch", "{}")]
    spoken = spoken[: 2 if form.between else 1]
    text = form.first + (form.between or "").join(f"{tool}{form.middle}{args}" for tool, args in spoken)
    text += form.last
    grammars = Grammars(tokenizer, len(tokenizer), {tokenizer.eos_token_id})
    matcher = grammars.get(params.structured_outputs).matcher()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert matcher.validate_tokens(ids) == len(ids)
    shown = tokenizer.decode(ids, skip_special_tokens=True)
    reader = calls.reader(params, form, tokenizer)
    news = [one for at in range(0, len(shown), size) for one in reader.feed(shown[at : at + size])]
    assert [(one["function"]["name"], one["function"]["arguments"]) for one in reader.calls] == spoken
    pieces = [
        "".join(one["function"].get("arguments", "") for one in news if one["index"] == index)
        for index in range(len(spoken))
    ]
    assert pieces == [arguments for _, arguments in spoken]


def test_a_name_within_another_is_not_taken_for_it():
    reader = CallReader(["get", "forget", "get_all"], "")
    reader.feed('forget{"a": 1} get_all{} get{}')
    assert [one["function"]["name"] for one in reader.calls] == ["forget", "get_all", "get"]


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "tools is empty"),
        ({"tool_choice": NAMED, "tools": [SAY]}, "tool_choice", "none of tools is called 'switch'"),
        ({"tool_choice": "always", "tools": [SAY]}, "tool_choice", '"auto", "none", "required" or'),
        ({"tool_choice": {"type": "custom"}, "tools": [SAY]}, "tool_choice", "must be"),
        ({"tool_choice": "required", "tools": [{"type": "custom"}]}, "tools", r"tools\[0\]="),
        ({"tool_choice": "required", "tools": [function('a"')]}, "tools", "without quotes"),
        (
            {"tool_choice": NAMED, "tools": [SWITCH], "response_format": {"type": "json_object"}},
            "tool_choice",
            "both bound the output",
        ),
        ({"tool_choice": NAMED, "tools": [SWITCH], "min_tokens": 3}, "min_tokens", "contradicts"),
        (
            {"tool_choice": NAMED, "tools": [function("switch", a={"type": "nothing"})]},
            "tools",
            "- tools cannot be compiled",
        ),
        (
            {
                "tool_choice": NAMED,
                "tools": [
                    {"type": "function", "function": {"name": "switch", "parameters": {"type": "array"}}}
                ],
            },
            "tools",
            'of type "object"',
        ),
    ],
    ids=str,
)
def test_what_cannot_be_demanded_is_refused_by_name(client, options, param, words):
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        chat(client, extra_body=options)
    assert caught.value.param == param
