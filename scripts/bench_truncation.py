"""What it costs a conversation in quality, and saves it in time, to keep its KV when its front is cut.

    python scripts/bench_truncation.py --out truncation.json

The embedded model reads held-out files of the standard library. `once`: it reads `--history` tokens, then the
first ones are cut and `--new` tokens more are predicted, each after those before it in the file, with the KV
that was there ("kept") and with all that is left computed anew ("recomputed"). `rolling`: each turn adds
`--new` tokens and cuts as many, so that what is kept was computed beside tokens that have been gone for
longer and longer. Divergences are KL(recomputed || kept) in nats; `logprob_` is the mean log-probability of
the token that follows in the file, `whole` that of a model which sees everything, and `cut_divergence` is
KL(whole || recomputed), what cutting itself changes. `seconds`: time to the first token on the engine.
"""

from __future__ import annotations

import functools
import pathlib
import statistics
import sys
import sysconfig
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from demo_model_data import read_corpus

from jaxllm import LLM, SamplingParams
from jaxllm.loading import load_params
from jaxllm.loading.checkpoints import demo_model_path
from jaxllm.models.config import LlamaConfig, config_from_dict, read_hf_config
from jaxllm.models.registry import Params, bind
from jaxllm.pallas_kernels.heads import RopeTable, rotated_heads
from jaxllm.research.bench.results import command_line, write_json
from jaxllm.system.hardware import describe_hardware, versions
from jaxllm.system.output_files import OutputParser, new_file

_BLOCK_SIZE = 16


class CutAttention:
    """Dense attention: each token sees those from a place of its own on up to itself."""

    num_rows = None

    def __init__(self, config: LlamaConfig, seen_from: jax.Array) -> None:
        """`seen_from` [T] int32 are the places."""
        self._config, self._seen_from = config, seen_from

    def __call__(
        self,
        layer: int,
        qkv: jax.Array,
        rope: RopeTable | None,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> jax.Array:
        """See `jaxllm.models.layers.Attend`; of models without windows and soft caps."""
        assert window is None
        assert soft_cap is None
        del layer
        length, kv_heads, size = len(qkv), self._config.num_kv_heads, self._config.head_dim
        q, k, v = rotated_heads(qkv, rope, kv_heads, size)
        scores = jnp.einsum("qhgd,khd->hgqk", q.reshape(length, kv_heads, -1, size) * scale, k)
        is_seen = jnp.tri(length, dtype=bool) & (jnp.arange(length) >= self._seen_from[:, None])
        weights = jax.nn.softmax(jnp.where(is_seen, scores, -1e30), axis=-1)
        return jnp.einsum("hgqk,khd->qhgd", weights, v).reshape(length, -1, size)


@functools.partial(jax.jit, static_argnums=0)
def logprobs_of(config: LlamaConfig, params: Params, tokens: jax.Array, seen_from: jax.Array) -> jax.Array:
    """Log-probabilities [T, vocab_size] of what follows each of `tokens` [T]; see `CutAttention`."""
    model = bind(config, params)
    hidden = model(tokens, jnp.arange(len(tokens)), CutAttention(config, seen_from))
    return jax.nn.log_softmax(model.logits(hidden))


def _divergence(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """KL(one || other) of each row, of log-probabilities, in nats."""
    return (np.exp(one) * (one - other)).sum(axis=1)


def compare(
    kept: np.ndarray, recomputed: np.ndarray, whole: np.ndarray, following: np.ndarray
) -> dict[str, Any]:
    """How far predictions [N, vocab_size] are apart, before each of the `following` tokens [N]."""
    rows = np.arange(len(following))
    scores = {
        name: of[rows, following]
        for name, of in (("kept", kept), ("recomputed", recomputed), ("whole", whole))
    }
    return {
        "divergence": _divergence(recomputed, kept),
        "cut_divergence": _divergence(whole, recomputed),
        "agrees": kept.argmax(axis=1) == recomputed.argmax(axis=1),
        "difference": np.abs(scores["kept"] - scores["recomputed"]),
        **{f"logprob_{name}": of for name, of in scores.items()},
    }


def summary(found: Sequence[dict[str, np.ndarray]]) -> dict[str, float]:
    """Means over all predictions, and the median and the 99th percentile of divergences."""
    values = {name: np.concatenate([one[name] for one in found]) for name in found[0]}
    divergence = values["divergence"]
    return {
        "num_predictions": len(divergence),
        "divergence_mean": float(divergence.mean()),
        "divergence_median": float(np.median(divergence)),
        "divergence_p99": float(np.quantile(divergence, 0.99)),
        "cut_divergence_mean": float(values["cut_divergence"].mean()),
        "greedy_agreement": float(values["agrees"].mean()),
        "abs_logprob_difference": float(values["difference"].mean()),
        **{name: float(values[name].mean()) for name in values if name.startswith("logprob_")},
    }


def measure_once(
    config: LlamaConfig, params: Params, texts: np.ndarray, history: int, new: int, cuts: Sequence[int]
) -> list[dict[str, Any]]:
    """One row per cut, over `texts` [N, history + new + 1]."""
    places = np.arange(history + new)
    rows: list[dict[str, Any]] = []
    for cut in cuts:
        found = []
        for text in texts:
            predict = functools.partial(logprobs_of, config, params, text[:-1])
            seen = {
                "kept": np.where(places < history, 0, cut),
                "recomputed": np.full(history + new, cut),
                "whole": np.zeros(history + new, int),
            }
            parts = {name: np.asarray(predict(jnp.asarray(one)))[history:] for name, one in seen.items()}
            found.append(compare(**parts, following=text[history + 1 :]))
        rows.append({"kind": "once", "cut": cut, "kept_tokens": history - cut, **summary(found)})
    return rows


def measure_rolling(
    config: LlamaConfig, params: Params, texts: np.ndarray, window: int, new: int, turns: int
) -> list[dict[str, Any]]:
    """One row per turn, over `texts` [N, window + turns * new + 1]; a turn sees what is left of a window."""
    places = np.arange(texts.shape[1] - 1)
    turn_of = np.maximum((places - window) // new, -1) + 1  # 0 is the history
    by_turn: list[list[dict[str, np.ndarray]]] = [[] for _ in range(turns)]
    for text in texts:
        predict = functools.partial(logprobs_of, config, params, text[:-1])
        kept = np.asarray(predict(jnp.asarray(turn_of * new)))
        whole = np.asarray(predict(jnp.zeros(len(places), jnp.int32)))
        for turn in range(1, turns + 1):
            recomputed = np.asarray(predict(jnp.full(len(places), turn * new)))
            of = turn_of == turn
            by_turn[turn - 1].append(compare(kept[of], recomputed[of], whole[of], text[1:][of]))
    return [
        {"kind": "rolling", "turn": turn, "kept_tokens": window - new, **summary(found)}
        for turn, found in enumerate(by_turn, 1)
    ]


def measure_seconds(
    texts: np.ndarray, history: int, new: int, cuts: Sequence[int], repetitions: int
) -> list[dict[str, Any]]:
    """Medians of the time to the first token, one row per cut."""
    llm = LLM(max_num_seqs=1, warm_up="all", block_size=_BLOCK_SIZE, skip_tokenizer_init=True)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

    def seconds(prompt: Any) -> tuple[float, int]:
        output = llm.generate([prompt], params, use_tqdm=False)[0]
        metrics = output.metrics
        assert metrics is not None
        assert metrics.first_token_time is not None
        return metrics.first_token_time - metrics.arrival_time, output.num_cached_tokens

    rows = []
    for cut in cuts:
        kept, recomputed, num_found = [], [], 0
        for number in range(repetitions):
            tokens = texts[number % len(texts)][: history + new].tolist()
            llm.reset_prefix_cache()
            seconds(tokens[:history])
            taken, num_found = seconds({"prompt_token_ids": tokens, "num_dropped_tokens": cut})
            kept.append(taken)
            llm.reset_prefix_cache()
            recomputed.append(seconds(tokens[cut:])[0])
        rows.append(
            {
                "kind": "seconds",
                "cut": cut,
                "prompt_tokens": history + new - cut,
                "found_tokens": num_found,
                "kept_seconds": statistics.median(kept),
                "recomputed_seconds": statistics.median(recomputed),
                "speedup": statistics.median(b / a for a, b in zip(kept, recomputed, strict=True)),
            }
        )
    return rows


def read_texts(count: int, length: int, seed: int) -> np.ndarray:
    """`count` windows [length] of the tokens of held-out files, at random places."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
    corpus = read_corpus(pathlib.Path(sysconfig.get_path("stdlib")))
    files = [tokenizer.encode(text).ids for _, text in corpus.held_out]
    long = [ids for ids in files if len(ids) >= length]
    draw = np.random.default_rng(seed)
    windows = []
    for _ in range(count):
        ids = long[draw.integers(len(long))]
        first = int(draw.integers(len(ids) - length + 1))
        windows.append(ids[first : first + length])
    return np.array(windows, np.int32)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark from the command line."""
    parser = OutputParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--texts", type=int, default=32, help="windows of held-out files")
    parser.add_argument("--history", type=int, default=896, help="tokens of a conversation before it is cut")
    parser.add_argument("--new", type=int, default=64, help="tokens after that; of each turn")
    parser.add_argument("--cuts", default="128,256,448,640,768,832", help="default: %(default)s")
    parser.add_argument("--window", type=int, default=512, help="tokens that rolling turns see at most")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=new_file, required=True)
    args = parser.parse_args(argv)
    cuts = [int(cut) for cut in args.cuts.split(",")]
    if any(cut % _BLOCK_SIZE or not 0 < cut < args.history for cut in cuts) or args.window <= args.new:
        parser.error(f"--cuts are multiples of {_BLOCK_SIZE} below --history; --new is less than --window")
    config = config_from_dict(read_hf_config(demo_model_path()))
    assert isinstance(config, LlamaConfig)
    params = load_params(demo_model_path(), config, "float32")
    longest = max(args.history + args.new, args.window + args.turns * args.new) + 1
    texts = read_texts(args.texts, longest, args.seed)
    rows = measure_once(config, params, texts[:, : args.history + args.new + 1], args.history, args.new, cuts)
    rolling = texts[:, : args.window + args.turns * args.new + 1]
    rows += measure_rolling(config, params, rolling, args.window, args.new, args.turns)
    rows += measure_seconds(texts, args.history, args.new, cuts, args.repetitions)
    for row in rows:
        print(", ".join(f"{name} {value:.4g}" if name != "kind" else value for name, value in row.items()))
    command = ["python", "scripts/bench_truncation.py", *(sys.argv[1:] if argv is None else argv)]
    values = {
        "command": command_line(command),
        "model": demo_model_path().name,
        "hardware": describe_hardware(),
        "versions": versions(),
        "settings": {name: getattr(args, name) for name in vars(args) if name != "out"},
        "rows": rows,
    }
    write_json(args.out, values)


if __name__ == "__main__":
    main()
