"""Attention of a user's own, named by its import path."""

import sys

import jax.numpy as jnp
import pytest
from docs_helpers import DOCS, Page
from engine_helpers import make_llm
from variants import golden_checkpoint

from jaxllm import SamplingParams
from jaxllm.errors import ConfigError
from jaxllm.pallas_kernels import decode_attention

SIZES = {"warm_up": "background"}


OTHERS = """
class Nothing:
    pass

class Nameless:
    @staticmethod
    def decode_attention(q, pool, tables):
        return q

class Flat:
    @staticmethod
    def decode_attention(q, pool, block_tables, lengths, **options):
        return q.reshape(len(q), -1)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The kernel of the documentation, in a module of its own."""
    text = Page(DOCS / "howto" / "own-kernel.md").python()[0].text
    (tmp_path / "own_attention.py").write_text(text + OTHERS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_attention", raising=False)  # nobody has traced it before
    import own_attention

    return own_attention


def test_an_engine_computes_with_it(own, monkeypatch):
    calls, theirs = [], own.Gathered.decode_attention

    def decode_attention(*args, **options):
        calls.append(options)
        return theirs(*args, **options)

    monkeypatch.setattr(own.Gathered, "decode_attention", staticmethod(decode_attention))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": [5, 9, 40, 7]}, {"prompt_token_ids": list(range(30, 50))}]
    found = []
    for implementation in ("own_attention:Gathered", "xla"):
        llm = make_llm(golden_checkpoint("llama_gqa"), attention_implementation=implementation, **SIZES)
        found.append([list(output.token_ids) for output in llm.generate(prompts, params, use_tqdm=False)])
        llm.close()
        assert calls
    assert found[0] == found[1]


def test_a_kernel_that_has_changed_is_taken_as_it_is_now(own, monkeypatch):
    """As in a notebook, where a module is read again."""
    pool = jnp.zeros((2, 1, 2, 1, 4, 8))
    step = jnp.zeros((1, 2, 8)), pool, jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
    for number in (1.0, 2.0):
        kernel = staticmethod(lambda q, *_, number=number, **__: jnp.full_like(q, number))
        monkeypatch.setattr(own.Flat, "decode_attention", kernel)
        out = decode_attention(*step, layer=0, scale=1.0, implementation="own_attention:Flat")
        assert jnp.all(out == number)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("own_attention:Nothing", "has none of decode_attention, prefill_attention, write_kv"),
        ("own_attention:Nameless", "cannot be called: .*unexpected keyword"),
        ("own_attention:Flat", "must return that shape and dtype"),
        ("own_attention:Absent", "cannot import the attention implementation .* AttributeError"),
        ("no_such_module:Gathered", "cannot import the attention implementation .*PYTHONPATH"),
    ],
)
def test_what_is_none_is_refused(own, path, message):
    with pytest.raises(ConfigError, match=message):
        make_llm(golden_checkpoint("llama_gqa"), attention_implementation=path, **SIZES)


def test_kept_blocks_are_of_the_code_that_computed_them(own, tmp_path):
    """Blocks in files are found again, and not when the kernel's file says something else."""
    prompts = [{"prompt_token_ids": list(range(10, 40))}]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    found = []
    for _ in range(3):
        settings = {
            "enable_prefix_caching": True,
            "num_host_blocks": 16,
            "prefix_cache_dir": str(tmp_path / "kept"),
            **SIZES,
        }
        path = "own_attention:Gathered"
        llm = make_llm(golden_checkpoint("llama_gqa"), attention_implementation=path, **settings)
        (output,) = llm.generate(prompts, params, use_tqdm=False)
        found.append(output.num_cached_tokens)
        llm.close()
        if len(found) == 2:
            with open(own.__file__, "a", encoding="utf-8") as file:
                file.write("# changed\n")
    assert found[0] == found[2] == 0 < found[1]
