"""Templates that would run on, or fill the memory, are stopped; others are not touched."""

import resource
import subprocess
import sys
import threading
import time

import pytest

from jaxllm.errors import ConfigError
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.text.chat import render
from jaxllm.text.tokenizer import load_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
LONG = "{% for i in range(100000) %}{% for j in range(100000) %}"
ENDS = "{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(demo_model_path())


HOSTILE = {
    "range": "{% for i in range(10**9) %}a{% endfor %}",
    "output": LONG + "aaaaaaaaaaaaaaaa" + ENDS,
    "no output": LONG + ENDS,
    "filtered": "{% for i in range(100000) %}{% for j in range(100000) if false %}" + ENDS,
    "set": "{% set x %}" + LONG + "aaaaaaaa" + ENDS + "{% endset %}",
    "macro": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive": "{% for i in [range(10)|list]*3 recursive %}{{ loop([range(10)|list]*9) }}{% endfor %}",
    "doubled": "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "added": "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "list": "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "power": "{{ 9**(10**9) }}",
    "squared": "{% set n = namespace(s=9) %}{% for i in range(99) %}{% set n.s = n.s * n.s %}{% endfor %}",
    "product": "{{ 'a' * 10**10 }}",
    "product of lists": "{{ ([0] * 10**10)|length }}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "center": "{{ 'a'|center(10**10) }}",
    "slice": "{{ [1]|slice(10**10)|list }}",
    "batch": "{{ [1]|batch(10**10, 0)|list }}",
    "indent": "{{ 'a\nb'|indent(10**10) }}",
    "format": "{{ '%10000000000d' % 1 }}",
    "replace": "{% set s = 'a' * 10**6 %}{{ s.replace('a', s) }}",
    "replace filter": "{% set s = 'a' * 10**6 %}{{ s|replace('a', s) }}",
    "join": "{% set s = 'a' * 10**6 %}{{ s.join(s|list) }}",
    "lipsum": "{{ lipsum(100000) }}",
}


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_template_is_an_error(tokenizer, template):
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(ConfigError, match="the chat template failed"):
        render(tokenizer, MESSAGES, chat_template=template + "{{ messages[0].content }}")
    assert time.monotonic() - started < 6
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


def test_in_threads_too(tokenizer):
    failed = []

    def run(template):
        try:
            render(tokenizer, MESSAGES, chat_template=template)
        except ConfigError:
            failed.append(template)

    threads = [threading.Thread(target=run, args=(one,)) for one in (HOSTILE["no output"], HOSTILE["power"])]
    for thread in threads:
        thread.start()
    assert render(tokenizer, MESSAGES, chat_template="{{ messages[0].content }}") == "hi"
    for thread in threads:
        thread.join(timeout=10)
    assert len(failed) == 2


def test_others_render_as_ever(tokenizer):
    template = (
        "{% macro show(m) %}<{{ m.role|upper }}>{{ m['content'] | trim }}{% endmacro %}"
        "{% set n = namespace(count=0) %}"
        "{% for m in messages %}{% set n.count = n.count + 1 %}{{ loop.index }}/{{ loop.length }} "
        "{{ 'first ' if loop.first }}{{ 'last ' if loop.last }}{{ show(m) ~ ';' }}"
        "{% if loop.index0 == 4 %}{% break %}{% endif %}{% endfor %}"
        "{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }} {% endfor %}"
        "{% for x in messages|map(attribute='role')|unique %}{{ x }}{{ ',' if not loop.last }}{% endfor %}"
        "{{ n.count * 2 }} {{ '%s-%02d' % ('a', 5) }} {{ '=' * 10 }} {{ [1, 2] + [3] }} {{ 2 ** 10 }}"
        " {{ 7 % 4 }}"
        "{{ messages|tojson|length > 10 }} {{ 'a,b'.split(',')|join('+') }} {{ 'x'.replace('x', 'y') }}"
    )
    messages = [*MESSAGES, {"role": "assistant", "content": " yes "}]
    assert render(tokenizer, messages, chat_template=template) == (
        "1/2 first <USER>hi;2/2 last <ASSISTANT>yes;a=1 user,assistant4 a-05 ========== [1, 2, 3] 1024"
        " 3True a+b y"
    )
    long = [{"role": "user", "content": "a" * 10**6}] * 5
    joined = render(tokenizer, long, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    assert len(joined) == 5 * 10**6


def test_transformers_itself_is_left_as_it_is():
    code = """
from transformers.utils import chat_template_utils
before = dict(vars(chat_template_utils))
import jaxllm.text.chat_templates
assert all(vars(chat_template_utils)[name] is value for name, value in before.items())
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
