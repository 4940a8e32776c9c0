"""Speculative decoding as one program of your own: draft with few layers, verify with all of them at once.

python examples/speculative.py
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm import functional as F
from jaxllm.loading import load_params
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.models.config import config_from_dict, read_hf_config
from jaxllm.text.tokenizer import load_tokenizer

DRAFTED, NUM_NEW = 3, 24
config = config_from_dict(read_hf_config(demo_model_path()))
draft_config = dataclasses.replace(config, num_layers=2)


@jax.jit
def speculate(params, draft, tokens, lengths):
    """Greedy tokens [B, NUM_NEW + DRAFTED] after prompts [B, L], and how often the model was run."""
    rows = jnp.arange(len(tokens))
    room = tokens.shape[1] + NUM_NEW + 2 * DRAFTED + 2
    cache, logits = F.prefill(params, config, F.init_cache(config, len(rows), room), tokens, lengths)
    small, _ = F.prefill(draft, draft_config, F.init_cache(draft_config, len(rows), room), tokens, lengths)
    first = logits.argmax(axis=-1)
    made = jnp.zeros((len(rows), NUM_NEW + DRAFTED + 1), jnp.int32).at[:, 0].set(first)

    def verify(carry):
        cache, small, newest, count, made, runs = carry  # `count` tokens are made, the newest without KV
        known = lengths + count - 1

        def guess(carry, step):
            small, token = carry
            small, scores = F.decode(draft, draft_config, small, token, known + step + 1)
            return (small, scores.argmax(axis=-1)), token

        (small, _), chunk = lax.scan(guess, (small, newest), jnp.arange(DRAFTED + 1))
        full = jnp.full_like(lengths, DRAFTED + 1)
        cache, scores = F.prefill(params, config, cache, chunk.T, full, cached=known, all_positions=True)
        best = scores.argmax(axis=-1)
        agrees = jnp.cumprod(chunk.T[:, 1:] == best[:, :-1], axis=1).sum(axis=1)  # of what was drafted
        kept = jnp.minimum(agrees + 1, NUM_NEW - count)  # KV of what is not kept is written over
        places = jnp.where(jnp.arange(DRAFTED + 1) < kept[:, None], count[:, None], NUM_NEW)
        made = made.at[rows[:, None], places + jnp.arange(DRAFTED + 1)].set(best)
        newest = jnp.where(kept > 0, best[rows, kept - 1], newest)
        return cache, small, newest, count + kept, made, runs + 1

    carry = cache, small, first, jnp.ones_like(lengths), made, 1
    _, _, _, _, made, runs = lax.while_loop(lambda carry: carry[3].min() < NUM_NEW, verify, carry)
    return made[:, :NUM_NEW], runs


def main() -> None:
    """The same tokens as one by one, of fewer runs of the whole model."""
    params, tokenizer = load_params(demo_model_path(), config, "float32"), load_tokenizer(demo_model_path())
    draft = {name: x for name, x in params.items() if not name.startswith(("layers.2.", "layers.3."))}
    prompt = jnp.array([tokenizer.encode("class Parser:\n    def __init__(self, text):\n")])
    lengths = jnp.array([prompt.shape[1]])
    made, runs = speculate(params, draft, prompt, lengths)
    plain = F.generate(params, config, prompt, lengths, NUM_NEW, jax.random.key(0)).tokens
    print(repr(tokenizer.decode(made[0])))
    print(f"{'the same' if (made == plain).all() else 'other'} tokens, {runs} runs for {NUM_NEW}")


if __name__ == "__main__":
    main()
