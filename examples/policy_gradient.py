"""Reinforcement learning: `LLM` samples, a policy gradient moves the weights, `LLM` goes on with these.

The reward is the share of a text that are underscores. REINFORCE with the mean of each prompt's samples as
its baseline (Kool et al., "Buy 4 REINFORCE samples, get a baseline for free!", 2019).

python examples/policy_gradient.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxllm import LLM, SamplingParams
from jaxllm import functional as F
from jaxllm.loading import load_params
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.models.config import config_from_dict, read_hf_config

PROMPTS = ["def get", "class Parser", "import os", "    return"]
NUM_SAMPLES, NUM_NEW, NUM_STEPS, LENGTH = 8, 12, 8, 32
config = config_from_dict(read_hf_config(demo_model_path()))
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-4))


@functools.partial(jax.jit, donate_argnums=(0, 1))
def step(params, state, tokens, is_sampled, advantages):
    """One step of ascent: `tokens`, `is_sampled` [B, LENGTH], `advantages` [B]."""

    def loss(params):
        logprobs = F.logprobs(params, config, tokens) * is_sampled[:, 1:]
        return -jnp.sum(advantages[:, None] * logprobs) / jnp.sum(is_sampled), logprobs

    grads, logprobs = jax.grad(loss, has_aux=True)(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, logprobs


def sample(llm, seed):
    """Rows of tokens, which of them were sampled, their log-probabilities by the engine, and rewards."""
    options = SamplingParams(
        n=NUM_SAMPLES, temperature=1.0, seed=seed, max_tokens=NUM_NEW, ignore_eos=True, logprobs=0
    )
    tokens = np.zeros((len(PROMPTS), NUM_SAMPLES, LENGTH), np.int32)
    is_sampled, logprobs = np.zeros(tokens.shape), np.zeros(tokens.shape)
    rewards = np.zeros(tokens.shape[:2])
    for place, output in enumerate(llm.generate(PROMPTS, options, use_tqdm=False)):
        start = len(output.prompt_token_ids)
        for number, one in enumerate(output.outputs):
            end = start + len(one.token_ids)
            tokens[place, number, :end] = [*output.prompt_token_ids, *one.token_ids]
            is_sampled[place, number, start:end] = 1
            logprobs[place, number, start:end] = [
                scores[token].logprob for token, scores in zip(one.token_ids, one.logprobs, strict=True)
            ]
            rewards[place, number] = one.text.count("_") / max(1, len(one.text))
    return tokens, is_sampled, logprobs, rewards


def main() -> None:
    """The engine's log-probabilities are those of the gradient: nothing is to be corrected for."""
    params = load_params(demo_model_path(), config, jnp.float32)
    state = optimizer.init(params)
    with LLM(params=params, max_model_len=LENGTH, max_num_seqs=32) as llm:
        for number in range(NUM_STEPS):
            tokens, is_sampled, logprobs, rewards = sample(llm, seed=number)
            advantages = (rewards - rewards.mean(axis=1, keepdims=True)) / (rewards.std() + 1e-6)
            rows = tokens.reshape(-1, LENGTH), is_sampled.reshape(-1, LENGTH), advantages.reshape(-1)
            params, state, again = step(params, state, *rows)
            off = np.abs(again - logprobs.reshape(-1, LENGTH)[:, 1:]).max()
            print(f"step {number}: reward {rewards.mean():.3f}, log-probabilities off by at most {off:.0e}")
            llm.update_weights(params)
        final = sample(llm, seed=NUM_STEPS)[-1].mean()
    print(f"reward at the end: {final:.3f}")


if __name__ == "__main__":
    main()
