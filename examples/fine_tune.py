"""Train the embedded model for 50 steps with optax, and serve the result.

python examples/fine_tune.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxllm import LLM, SamplingParams
from jaxllm import functional as F
from jaxllm.loading import load_params
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.models.config import config_from_dict, read_hf_config
from jaxllm.text.tokenizer import load_tokenizer

TEXTS = [
    f"def area_of_{name}(size):\n    return area(size)\n" for name in ("circle", "square", "ring", "disk")
]
config = config_from_dict(read_hf_config(demo_model_path()))
optimizer = optax.adamw(3e-4)


@jax.jit
def step(params, state, tokens, mask):
    """One step: `tokens` [B, L], of which `mask` [B, L] says which count."""
    loss, grads = jax.value_and_grad(lambda p: F.loss(p, config, tokens, mask, remat=True))(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def main() -> None:
    """Weights are a dictionary of arrays by name, which optax takes as it is."""
    params, tokenizer = load_params(demo_model_path(), config, jnp.float32), load_tokenizer(demo_model_path())
    rows = [tokenizer.encode(text) for text in TEXTS]
    tokens, mask = np.zeros((2, len(rows), max(map(len, rows))), int)
    for place, row in enumerate(rows):
        tokens[place, : len(row)], mask[place, : len(row)] = row, 1
    state = optimizer.init(params)
    for number in range(50):
        params, state, loss = step(params, state, tokens, mask)
        if number % 10 == 0:
            print(f"step {number}: loss {loss:.3f}")
    print(f"after 50 steps: loss {F.loss(params, config, tokens, mask):.3f}")
    greedy = SamplingParams(temperature=0, max_tokens=12)
    with LLM(params=params, max_model_len=64, max_num_seqs=1) as llm:
        (output,) = llm.generate(["def area_of_square(size):\n"], greedy, use_tqdm=False)
    print(repr(output.outputs[0].text))


if __name__ == "__main__":
    main()
