"""Generation inside your own `jax.jit`: as one call, and as a decoding loop of your own.

python examples/own_jit.py
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm import functional as F
from jaxllm.loading import load_params
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.models.config import config_from_dict, read_hf_config
from jaxllm.text.tokenizer import load_tokenizer

NUM_NEW = 12
config = config_from_dict(read_hf_config(demo_model_path()))


@jax.jit
def sample(params, tokens, lengths, temperatures, key):
    """The whole generation is one program, each row with a temperature of its own."""
    return F.generate(params, config, tokens, lengths, NUM_NEW, key, temperature=temperatures).tokens


@jax.jit
def with_entropy(params, tokens, lengths):
    """Greedy tokens, and how many bits each was chosen from: [NUM_NEW, B] twice."""
    cache = F.init_cache(config, tokens.shape[0], tokens.shape[1] + NUM_NEW)
    cache, logits = F.prefill(params, config, cache, tokens, lengths)

    def step(carry, _):
        cache, logits, lengths = carry
        chosen = jnp.argmax(logits, axis=-1)
        log_p = jax.nn.log_softmax(logits)
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1) / jnp.log(2.0)
        cache, logits = F.decode(params, config, cache, chosen, lengths + 1)
        return (cache, logits, lengths + 1), (chosen, entropy)

    return lax.scan(step, (cache, logits, lengths), length=NUM_NEW)[1]


def main() -> None:
    """Two prompts of different lengths, padded at the end."""
    params, tokenizer = load_params(demo_model_path(), config, "float32"), load_tokenizer(demo_model_path())
    prompts = [tokenizer.encode(text) for text in ("def add(a, b):\n", "import os\nimport")]
    lengths = jnp.array([len(prompt) for prompt in prompts])
    tokens = jnp.array([prompt + [0] * (max(map(len, prompts)) - len(prompt)) for prompt in prompts])
    for row in sample(params, tokens, lengths, jnp.array([0.0, 0.8]), jax.random.key(0)):
        print(repr(tokenizer.decode(row)))
    chosen, bits = with_entropy(params, tokens, lengths)
    for token_id, entropy in zip(chosen[:, 0].tolist(), bits[:, 0].tolist(), strict=True):
        print(f"    {tokenizer.decode(token_id)!r}, chosen from {entropy:.1f} bits")


if __name__ == "__main__":
    main()
