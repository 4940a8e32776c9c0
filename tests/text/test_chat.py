"""Conversations: what is refused by name, what templates get, and what `LLM.chat` does with both."""

import pytest
from engine_helpers import SMALL
from tokenizer_helpers import write_tokenizer

from jaxllm import LLM, SamplingParams
from jaxllm.errors import ConfigError, RequestError
from jaxllm.text.chat import apply_chat_template, check_messages, render
from jaxllm.text.tokenizer import load_tokenizer

HELLO = [{"role": "user", "content": "hi"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]
LOOP = "{% for m in messages %}{% for part in m['content'] %}[{{ part.text }}]{% endfor %}{% endfor %}"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TOOLS = (
    "{% if tools %}{{ tools | map(attribute='function.name') | join }}:{% endif %}{% for m in messages %}"
    "{{ m.content }}{% for call in m.tool_calls %}{{ call.function.arguments.x }}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("model")))


@pytest.fixture
def with_template(tmp_path):
    """A function that loads the tokenizer with another chat template."""
    loaded = load_tokenizer(write_tokenizer(tmp_path))

    def replace(template):
        loaded.chat_template = template
        return loaded

    return replace


def test_chat_template_adds_no_special_tokens(tokenizer):
    def ids(text):
        return tokenizer.encode(text, add_special_tokens=False)

    assert apply_chat_template(tokenizer, HELLO) == [0, *ids("<user>hi<assistant>")]
    assert apply_chat_template(tokenizer, HELLO, add_generation_prompt=False) == [0, *ids("<user>hi")]
    assert apply_chat_template(tokenizer, tuple(HELLO), template_variables={"closing": "!"})[-1:] == ids("!")


@pytest.mark.parametrize(
    ("messages", "cause"),
    [
        ("hi", "must be a list"),
        ({"role": "user", "content": "hi"}, "must be a list"),
        (None, "must be a list"),
        ([], "is empty"),
        (["hi"], r"messages\[0\] must be an object"),
        ([*HELLO, {"role": "user"}], r'messages\[1\] has no "content"'),
        ([{"content": "hi"}], 'has no "role"'),
        ([{"role": 1, "content": "hi"}], '"role".* must be a string'),
        ([{"role": "user", "content": 5}], r'"content".* must be a string or a list of parts, not int'),
        (
            [{"role": "user", "content": None}],
            r'"content".* must be a string or a list of parts, not NoneType',
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], r'"content"\]\[0\]\["text"\] must be a string'),
        ([{"role": "user", "content": [{"image_url": "x"}]}], r'\[0\] must be an object {"type": "text"'),
        (
            [{"role": "user", "content": ["a", {"type": "image_url", "image_url": {"url": "x"}}]}],
            r"\[1\] is of type 'image_url': models of text only",
        ),
        ([{"role": "assistant", "tool_calls": "x"}], r'"tool_calls"\] must be a list, not str'),
        ([{"role": "assistant", "tool_calls": [{"name": "f"}]}], r'"tool_calls"\]\[0\] must be an object'),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": 7}}]}], "are an object, or text"),
    ],
)
def test_malformed_messages(tokenizer, messages, cause):
    with pytest.raises(RequestError, match=cause):
        apply_chat_template(tokenizer, messages)


def test_check_messages_returns_them():
    assert check_messages(HELLO) is HELLO


def test_a_missing_template_names_the_way_out(with_template):
    with pytest.raises(ConfigError, match=r"no chat template.*plain prompt"):
        apply_chat_template(with_template(None), HELLO)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['os'].system('true') }}",
        "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ messages[0].pop('role') }}",
        "{% for i in range(10 ** 9) %}a{% endfor %}",
        "{% include 'tokenizer.json' %}",
        "{{ 1 + 'a' }}",
        "{% if %}",
    ],
)
def test_hostile_and_broken_templates_fail_cleanly(with_template, template):
    messages = [dict(HELLO[0])]
    with pytest.raises(ConfigError, match="the chat template failed"):
        apply_chat_template(with_template(template), messages)
    assert messages == HELLO


def test_a_template_may_refuse_messages(with_template):
    with pytest.raises(RequestError, match="refuses these messages: roles must alternate"):
        apply_chat_template(with_template("{{ raise_exception('roles must alternate') }}"), HELLO)


def test_parts_are_joined_unless_the_template_goes_over_them(with_template):
    plain, loop = "{{ messages[0].content }}", with_template(LOOP)
    assert render(loop, PARTS, chat_template=plain) == "a\nb"
    assert render(loop, PARTS) == "[a][b]"
    assert render(loop, HELLO) == "[hi]"
    assert (
        render(loop, [{"role": "tool", "content": ["a", "b"]}], chat_template=plain, content_format="openai")
        == "a\nb"
    )
    assert render(loop, PARTS, content_format="string") == "[]" * 3
    assert render(loop, HELLO, chat_template=plain, content_format="openai").startswith("[{'type': 'text'")
    by_name = (
        "{% set content = messages[0].content %}{% for part in content | list %}({{ part.text }}){% endfor %}"
    )
    assert render(loop, PARTS, chat_template=by_name) == "(a)(b)"


CALL = {"function": {"name": "f", "arguments": {"x": 7}}}
CALLS = "{% for c in m.tool_calls %}({{ c.function.name }}{{ c.function.arguments.x }}){% endfor %}"
SAID = "{{ m.content }}"
LAYOUTS = {
    "not none": "{% if m.content is not none %}" + SAID + "{% else %}" + CALLS + "{% endif %}",
    "none": "{% if m['content'] is none %}" + CALLS + "{% else %}" + SAID + "{% endif %}",
    "equals none": "{% if m.content != none %}" + SAID + "{% else %}" + CALLS + "{% endif %}",
    "gets none": "{% if m.get('content') is none %}" + CALLS + "{% else %}" + SAID + "{% endif %}",
    "by a name": "{% set said = m.content | default(none) %}{% if said is none %}"
    + CALLS
    + "{% else %}{{ said }}{% endif %}",
    "by a macro": "{% macro show(text) %}{% if text is none %}-{% else %}{{ text }}{% endif %}{% endmacro %}"
    "{% if m.tool_calls %}" + CALLS + "{% else %}{{ show(m.content) }}{% endif %}",
    "defined": "{% if m.content is defined %}" + SAID + "{% else %}" + CALLS + "{% endif %}",
    "undefined": "{% if m.content is undefined %}" + CALLS + "{% else %}" + SAID + "{% endif %}",
    "in": "{% if 'content' in m %}" + SAID + "{% else %}" + CALLS + "{% endif %}",
    "not in": "{% if 'content' not in m %}" + CALLS + "{% else %}" + SAID + "{% endif %}",
    "both": "{% if 'content' in m and m.content is not none %}" + SAID + "{% else %}" + CALLS + "{% endif %}",
    "if any": "{% if m.content %}" + SAID + "{% else %}" + CALLS + "{% endif %}",
    "of parts": "{% if m.content is none %}"
    + CALLS
    + "{% elif m.content is string %}"
    + SAID
    + "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_are_in_the_prompt_however_templates_ask_for_content(tokenizer, layout):
    template = "{% for m in messages %}[" + LAYOUTS[layout] + "]{% endfor %}"
    for empty in ({}, {"content": None}):
        answer = {"role": "assistant", **empty, "tool_calls": [CALL]}
        assert render(tokenizer, [*HELLO, answer], chat_template=template) == "[hi][(f7)]"
    both = {"role": "assistant", "content": "b", "tool_calls": [CALL]}
    assert "None" not in render(tokenizer, [*HELLO, both], chat_template=template)


def test_where_templates_do_not_ask_nothing_said_is_a_text_of_nothing(tokenizer):
    template = "{% for m in messages %}{{ '[' + m.content + ']' }}{% endfor %}"
    answer = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert render(tokenizer, [*HELLO, answer], chat_template=template) == "[hi][]"
    assert render(tokenizer, [*HELLO, {"role": "assistant"}], chat_template=template) == "[hi][]"
    asks = template + "{% if messages[0].content is none %}{% endif %}"
    options = {"add_generation_prompt": False, "continue_final_message": True}
    answer = {"role": "assistant", "content": ""}
    assert render(tokenizer, [*HELLO, answer], chat_template=asks, **options) == "[hi]["
    assert render(tokenizer, [*HELLO, answer], chat_template=LOOP, **options) == "[hi]["


PART = "{% for p in m.content %}<{{ p.text }}>{% endfor %}"
STRINGS = {
    "if": "{% if m.content is string %}{{ m.content | trim }}{% else %}" + PART + "{% endif %}",
    "not": "{% if m.content is not string %}" + PART + "{% else %}{{ m.content | trim }}{% endif %}",
    "elif": "{% if m.content is none %}{% elif m['content'] is string %}{{ m.content | trim }}{% else %}"
    + PART
    + "{% endif %}",
    "by a name": "{% set said = m.content %}{% if said is string %}{{ said | trim }}{% else %}"
    "{% for p in said %}<{{ p.text }}>{% endfor %}{% endif %}",
    "by a macro": "{% macro show(text) %}{% if text is string %}{{ text | trim }}{% else %}"
    "{% for p in text %}<{{ p.text }}>{% endfor %}{% endif %}{% endmacro %}{{ show(m.content) }}",
}


@pytest.mark.parametrize("kind", STRINGS)
def test_strings_stay_strings_where_templates_take_both(tokenizer, kind):
    template = "{% for m in messages %}[" + STRINGS[kind] + "]{% endfor %}"
    messages = [{"role": "user", "content": " a "}, {"role": "assistant", "content": ""}]
    assert render(tokenizer, messages, chat_template=template) == "[a][]"
    parts = [{"role": "user", "content": [{"type": "text", "text": " a "}, "b"]}]
    assert render(tokenizer, parts, chat_template=template) == "[< a ><b>]"
    assert render(tokenizer, parts, chat_template=template, content_format="string") == "[a \nb]"
    assert render(tokenizer, messages, chat_template=template, content_format="openai") == "[< a >][]"
    expected = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    assert render(tokenizer, messages, chat_template=template) == expected


def test_where_templates_go_over_parts_without_asking_all_are_parts(tokenizer):
    template = (
        "{% for m in messages %}{% for content in m.content %}{% if content is string %}{{ content }}"
        "{% else %}<{{ content.text }}>{% endif %}{% endfor %}{% endfor %}"
    )
    assert render(tokenizer, [*HELLO, *PARTS], chat_template=template) == "<hi><a><b>"
    first = "{% if messages[0].content is string %}{{ messages[0].content }}{% endif %}"
    assert render(tokenizer, HELLO, chat_template=first + template) == "<hi>"
    nothing = [{"role": "user", "content": ""}, {"role": "assistant", "content": None}]
    assert render(tokenizer, [*HELLO, *nothing], chat_template=template) == "<hi>"  # no part of nothing
    given = [{"role": "user", "content": ["a", {"type": "text", "text": ""}]}]
    assert render(tokenizer, given, chat_template=template) == "<a><>"  # but as it was sent


def test_parts_are_a_string_for_templates_that_only_test_for_one(tokenizer):
    template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{{ m.content[0].text }}?{% endif %}{% endfor %}"
    )
    assert render(tokenizer, PARTS, chat_template=template) == "a\nb"


def test_tools_and_calls_are_those_of_transformers(with_template):
    call = {"type": "function", "function": {"name": "add", "arguments": '{"x": 7}'}}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "8"}]
    loaded = with_template(TOOLS)
    assert render(loaded, messages, tools=[TOOL]) == "add:hi78"
    assert call["function"]["arguments"] == '{"x": 7}'
    as_objects = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {"x": 7}}}]},
    ]
    expected = loaded.apply_chat_template(as_objects, tools=[TOOL], tokenize=False)
    assert render(loaded, as_objects, tools=(TOOL,)) == expected == "add:hi7"


def test_the_last_message_may_be_continued(tokenizer):
    messages = [*HELLO, {"role": "assistant", "content": "well, "}]
    continued = render(tokenizer, messages, add_generation_prompt=False, continue_final_message=True)
    assert continued == "<s><user>hi<assistant>well, "
    ended = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    options = {"chat_template": ended, "add_generation_prompt": False}
    assert render(tokenizer, messages, **options) == "hi</s>well, </s>"
    assert render(tokenizer, messages, continue_final_message=True, **options) == "hi</s>well, "


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"continue_final_message": True}, "set one of them to False"),
        ({"add_generation_prompt": None}, "add_generation_prompt=None must be True or False"),
        ({"content_format": "text"}, "chat_template_content_format='text' must be one of auto"),
        ({"chat_template": "template.jinja"}, r"has no jinja in it .*read_text"),
        ({"chat_template": 5}, "chat_template=5 must be a template's text"),
        ({"tools": [TOOL]}, "does not read 'tools'"),
        ({"tools": "add"}, "tools='add' must be a list"),
        ({"tools": [print]}, "must be a list of functions' JSON schemas"),
        ({"template_variables": {"closin": 1}}, "does not read 'closin'; did you mean closing?"),
        ({"template_variables": {"enable_thinking": 1}}, "leave it out. It reads bos_token, closing"),
        ({"template_variables": {"tools": [TOOL]}}, "chat_template_kwargs has 'tools'"),
        ({"template_variables": {"tokenize": True}}, "chat_template_kwargs has 'tokenize'"),
    ],
)
def test_options_that_contradict_or_vanish_are_refused(tokenizer, options, message):
    with pytest.raises(RequestError, match=message):
        render(tokenizer, HELLO, **options)


def test_of_several_templates_one_is_named(with_template):
    loaded = with_template({"default": "d{{ messages[0].content }}", "tool_use": "t{{ tools | length }}"})
    assert render(loaded, HELLO) == "dhi"
    assert render(loaded, HELLO, tools=[TOOL]) == "t1"
    assert render(loaded, HELLO, chat_template="default") == "dhi"
    with pytest.raises(ConfigError, match="no default chat template"):
        render(with_template({"rag": "{{ documents }}"}), HELLO)


@pytest.fixture(scope="module")
def llm():
    return LLM(**{**SMALL, "skip_tokenizer_init": False, "block_size": 16})


GREEDY = SamplingParams(temperature=0, max_tokens=4)


def test_outputs_repeat_the_rendered_prompt(llm):
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}\n{% endfor %}{{ closing }}"
    options = {"chat_template": template, "chat_template_kwargs": {"closing": "def f"}}
    first, second = llm.chat([HELLO, PARTS], GREEDY, False, **options)
    bos = llm.tokenizer.bos_token
    assert (first.prompt, second.prompt) == (f"{bos}hi\ndef f", f"{bos}a\nb\ndef f")
    assert first.prompt_token_ids == llm.tokenizer.encode(first.prompt, add_special_tokens=False)
    assert first.prompt_token_ids.count(llm.tokenizer.bos_token_id) == 1
    (expected,) = llm.generate(first.prompt, GREEDY, False)
    assert first.token_ids == expected.token_ids


def test_arguments_of_vllm_that_change_nothing(llm):
    neutral = {"lora_request": None, "mm_processor_kwargs": None, "tokenization_kwargs": {}}
    (output,) = llm.chat(HELLO, GREEDY, False, tool_choice="auto", **neutral)
    (expected,) = llm.chat(HELLO, GREEDY, False)
    assert output.token_ids == expected.token_ids
    (output,) = llm.chat(HELLO, GREEDY, False, tools=[TOOL], tool_choice="none")
    assert output.prompt == expected.prompt
    (output,) = llm.chat(HELLO, GREEDY, False, tools=[TOOL], chat_template=TOOLS)
    assert output.prompt == "add:hi"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lora_request": 5}, "lora_request=5 is not supported: there are no LoRA adapters"),
        ({"mm_processor_kwargs": {"size": 2}}, "models of text only"),
        ({"tool_choice": "required"}, "tool_choice='required' is not supported"),
        ({"tool_choice": TOOL}, "chooses by itself"),
        ({"chat_templat": "x"}, "unknown argument 'chat_templat'; did you mean chat_template?"),
        ({"enable_thinking": False}, "unknown argument 'enable_thinking'.* go into chat_template_kwargs"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs='x' must be a dictionary"),
    ],
)
def test_other_arguments_are_refused_by_name(llm, arguments, message):
    with pytest.raises(RequestError, match=message):
        llm.chat(HELLO, GREEDY, False, **arguments)
