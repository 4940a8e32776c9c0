"""Trains the model in `jaxllm/demo_model`: a small Llama and its tokenizer, on Python's standard library.

    python scripts/train_demo_model.py --steps 1200 --overwrite

The text is the running Python's own `Lib` (without tests and data tables); a few per cent of it, files chosen
by a hash of their names, are held out and never trained on, neither by the tokenizer nor by the model. The
schedule follows `--steps`, so the same Python, libraries and machine train the same model, unless the run
would exceed `--minutes`: then the elapsed time takes over, so that the learning rate always reaches zero.

Parameters are saved under `--work-dir` every few minutes; `--export-only CHECKPOINT` turns such a file into a
model folder.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import pathlib
import platform
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from demo_model_data import SEPARATOR, SEPARATOR_ID, Windows, read_corpus, train_tokenizer
from demo_model_weights import Weights, init_weights, losses, weight_shapes
from optax.contrib import MuonDimensionNumbers, muon
from safetensors import safe_open
from safetensors.flax import save_file
from tokenizers import Tokenizer

from jaxllm.models.config import config_from_dict
from jaxllm.models.llama import LlamaConfig
from jaxllm.system.output_files import NewFolder, OutputParser

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
MODEL_FILES = (
    *("model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    *("generation_config.json", "config.json", "training.json"),
)
WORK_FILES = ("checkpoint.safetensors", "final.safetensors", "tokenizer.json")
WARMUP_STEPS = 50
DECAY_FRACTION = 0.7  # the last part of the run, over which the learning rate falls linearly to zero
# Sequence lengths, as parts of the longest, each up to this fraction of the run.
STAGES = ((0.80, 4), (0.90, 2), (1.01, 1))

# What the user asks for becomes a comment; what the model answered stays as it is.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] }}"
    "{% else %}{{ '# ' + message['content'].replace('\\n', '\\n# ') }}{% endif %}"
    "{{ '\\n' }}{% endfor %}"
)


def model_values(args: argparse.Namespace) -> dict[str, Any]:
    """The contents of `config.json`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": SEPARATOR_ID,
        "dtype": "bfloat16",
        "eos_token_id": SEPARATOR_ID,
        "head_dim": args.head_dim,
        "hidden_act": "silu",
        "hidden_size": args.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": args.intermediate_size,
        "max_position_embeddings": args.positions,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": args.heads,
        "num_hidden_layers": args.layers,
        "num_key_value_heads": args.kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": args.vocab_size,
    }


def make_optimizer(config: LlamaConfig, args: argparse.Namespace) -> optax.GradientTransformation:
    """Muon for the matrices, AdamW for the tied embedding and the norms, at their peak learning rates."""
    dimensions = {
        name: MuonDimensionNumbers(reduction_axis=1, output_axis=0)
        if len(shape) == 2 and "embed" not in name
        else None
        for name, shape in weight_shapes(config).items()
    }
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        muon(
            args.muon_lr,
            weight_decay=args.weight_decay,
            adam_learning_rate=args.adam_lr,
            adam_b2=0.95,
            muon_weight_dimension_numbers=dimensions,
        ),
    )


def make_step(config: LlamaConfig, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """The jitted `(weights, state, tokens [batch, length + 1], learning-rate factor) -> (..., loss)`."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(weights: Weights, state: Any, tokens: jax.Array, factor: jax.Array) -> tuple[Weights, Any, Any]:
        def mean_loss(weights: Weights) -> jax.Array:
            return losses(config, weights, tokens[:, :-1], tokens[:, 1:]).mean()

        loss, gradients = jax.value_and_grad(mean_loss)(weights)
        updates, state = optimizer.update(gradients, state, weights)
        # Updates are linear in the learning rate.
        updates = jax.tree.map(lambda update: factor * update, updates)
        return optax.apply_updates(weights, updates), state, loss

    return step


class HeldOut:
    """The held-out files: every token of theirs is predicted once, in windows of the model's length."""

    def __init__(self, tokenizer: Tokenizer, documents: list[tuple[str, str]], length: int) -> None:
        rows = []
        for _, text in documents:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            for start in range(0, len(ids), length):
                window = ids[start : start + length]
                rows.append([SEPARATOR_ID, *window] + [-1] * (length - len(window)))
        self.rows = np.array(rows, np.int32)
        self.tokens = int((self.rows[:, 1:] >= 0).sum())
        self.bytes = sum(len(text.encode()) for _, text in documents)
        self.files = [name for name, _ in documents]

    def evaluate(self, config: LlamaConfig, weights: Weights, windows: int | None = None) -> dict[str, float]:
        """Loss in nats per token and bits per byte of text, over all or about so many windows."""
        total, tokens = 0.0, 0
        chosen = self.rows if windows is None else self.rows[:: max(1, len(self.rows) // windows)]
        for first in range(0, len(chosen), 4):
            rows = chosen[first : first + 4]
            rows = np.pad(rows, ((0, 4 - len(rows)), (0, 0)), constant_values=-1)
            values = _jitted_losses(config, weights, rows.clip(min=0)[:, :-1], rows.clip(min=0)[:, 1:])
            real = rows[:, 1:].reshape(-1) >= 0
            total += float(np.asarray(values, np.float64)[real].sum())
            tokens += int(real.sum())
        return {
            "nats_per_token": round(total / tokens, 5),
            "bits_per_byte": round(total / tokens / math.log(2) * self.tokens / self.bytes, 5),
        }


_jitted_losses = jax.jit(losses, static_argnums=0)


def round_weights(weights: Weights) -> Weights:
    """The weights as bfloat16 holds them, in float32."""
    return {name: value.astype(jnp.bfloat16).astype(jnp.float32) for name, value in weights.items()}


def atomic_write(path: pathlib.Path, write: Callable[[pathlib.Path], None]) -> None:
    """Calls `write` on a file next to `path`, which then takes its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    write(temporary)
    temporary.chmod(0o644)  # safetensors makes its files private
    os.replace(temporary, path)


def write_json(path: pathlib.Path, values: dict[str, Any]) -> None:
    """Writes `values`, indented, in one go."""
    text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    atomic_write(path, lambda file: file.write_text(text, encoding="utf-8") and None)


def save_checkpoint(path: pathlib.Path, weights: Weights, record: dict[str, Any]) -> None:
    """Saves float32 weights with the record of the training so far."""
    atomic_write(path, lambda file: save_file(weights, file, {"record": json.dumps(record)}))


def load_checkpoint(path: pathlib.Path) -> tuple[Weights, dict[str, Any]]:
    """What `save_checkpoint` saved."""
    with safe_open(path, framework="flax") as file:
        record = json.loads(file.metadata()["record"])
        return {name: file.get_tensor(name) for name in file.keys()}, record  # noqa: SIM118


def export(
    folder: pathlib.Path,
    values: dict[str, Any],
    weights: Weights,
    tokenizer: Tokenizer,
    record: dict[str, Any],
    held_out: HeldOut,
    windows: int | None = None,
) -> dict[str, Any]:
    """Writes the model folder, file by file, and returns the contents of `training.json`.

    `windows` limits the held-out evaluation, for a look in between.
    """
    config = config_from_dict(values)
    assert isinstance(config, LlamaConfig)
    record = {
        **record,
        "held_out": {
            "files": held_out.files,
            "bytes": held_out.bytes,
            "tokens": held_out.tokens,
            "context": config.max_position_embeddings,
            "float32": held_out.evaluate(config, weights, windows),
            "bfloat16_weights": held_out.evaluate(config, round_weights(weights), windows),
        },
    }
    rounded = {name: value.astype(jnp.bfloat16) for name, value in weights.items()}
    special = {"bos_token": SEPARATOR, "eos_token": SEPARATOR, "pad_token": SEPARATOR}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }
    generation = {"bos_token_id": SEPARATOR_ID, "eos_token_id": SEPARATOR_ID, "pad_token_id": SEPARATOR_ID}
    atomic_write(folder / "model.safetensors", lambda file: save_file(rounded, file, {"format": "pt"}))
    atomic_write(folder / "tokenizer.json", lambda file: tokenizer.save(str(file), pretty=False))
    write_json(folder / "tokenizer_config.json", tokenizer_config)
    write_json(folder / "generation_config.json", generation)
    write_json(folder / "config.json", values)
    write_json(folder / "training.json", record)
    return record


def schedule(args: argparse.Namespace) -> Iterator[tuple[int, float, bool]]:
    """Yields each step's number, the fraction of the run behind it, and whether the clock set that."""
    started = time.perf_counter()
    step = 0
    while True:
        by_clock = (time.perf_counter() - started) / (60 * args.minutes)
        # While the learning rate is constant the clock has no say, so short stalls do not matter.
        by_steps = step / args.steps
        late = by_clock > max(by_steps, 1 - DECAY_FRACTION)
        fraction = by_clock if late else by_steps
        if fraction >= 1:
            return
        yield step, fraction, late
        step += 1


def train(args: argparse.Namespace) -> None:
    """Trains the tokenizer and the model, exports the folder early once and at the end."""
    started = time.perf_counter()

    def log(message: str) -> None:
        print(f"{time.perf_counter() - started:7.1f}s  {message}", flush=True)

    corpus = read_corpus(args.data)
    text_bytes = sum(len(text.encode()) for _, text in corpus.train)
    log(f"{len(corpus.train)} files, {text_bytes / 1e6:.2f} MB; held out: {len(corpus.held_out)} files")
    tokenizer = train_tokenizer(corpus, args.vocab_size)
    args.vocab_size = tokenizer.get_vocab_size()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.work_dir / "tokenizer.json"))
    windows = Windows(tokenizer, corpus.train, args.seed)
    held_out = HeldOut(tokenizer, corpus.held_out, args.positions)
    log(f"{len(windows.tokens)} tokens, {text_bytes / len(windows.tokens):.3f} bytes each; "
        f"held out: {held_out.tokens} tokens")  # fmt: skip

    values = model_values(args)
    config = config_from_dict(values)
    assert isinstance(config, LlamaConfig)
    weights = init_weights(config, args.seed)
    parameters = sum(value.size for value in weights.values())
    optimizer = make_optimizer(config, args)
    state = optimizer.init(weights)
    step_function = make_step(config, optimizer)
    log(f"{parameters} parameters")

    hyperparameters = {
        name: getattr(args, name)
        for name in ("seed", "batch_tokens", "muon_lr", "adam_lr", "weight_decay", "minutes", "steps")
    } | {
        "optimizer": "Muon (matrices), Adam (embedding, norms)",
        "adam_b2": 0.95,
        "gradient_clip_norm": 1.0,
        "warmup_steps": WARMUP_STEPS,
        "decay_fraction": DECAY_FRACTION,
        "sequence_lengths": {str(args.positions // part): min(end, 1.0) for end, part in STAGES},
    }
    packages = ("flax", "jax", "jaxlib", "numpy", "optax", "safetensors", "tokenizers")
    record: dict[str, Any] = {
        "finished": False,
        "command": f"python scripts/train_demo_model.py --steps {args.steps} --seed {args.seed} --overwrite",
        "data": {
            "source": "the Python standard library (PSF licence), without tests and data tables",
            "python": platform.python_version(),
            "files": len(corpus.train),
            "bytes": text_bytes,
            "tokens": len(windows.tokens),
            "sha256": corpus.sha256,
        },
        "parameters": parameters,
        "hyperparameters": hyperparameters,
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
        "device": jax.default_backend(),
    }

    seen, recent, time_bound, saved = 0, [], 0, time.perf_counter()
    exported = False
    steps_done = 0
    for step, fraction, late in schedule(args):
        length = args.positions // next(part for end, part in STAGES if fraction < end)
        batch = windows.batch(max(1, args.batch_tokens // length), length)
        factor = min(1.0, (step + 1) / WARMUP_STEPS, (1 - fraction) / DECAY_FRACTION)
        weights, state, loss = step_function(weights, state, batch, np.float32(factor))
        recent.append(float(loss))
        seen += batch.size - len(batch)
        steps_done, time_bound = step + 1, time_bound + late
        if not math.isfinite(recent[-1]):
            raise SystemExit(f"the loss is {recent[-1]} at step {step}")
        if step % args.log_every == 0:
            log(f"step {step} ({100 * fraction:.1f}%)  length {length}  lr {factor:.3f}  "
                f"loss {np.mean(recent):.4f}  tokens {seen}")  # fmt: skip
            recent = []
        record |= {
            "steps": steps_done,
            "steps_set_by_clock": time_bound,
            "tokens_seen": seen,
            "epochs": round(seen / len(windows.tokens), 3),
            "seconds": round(time.perf_counter() - started, 1),
        }
        now = time.perf_counter()
        if now - saved > 60 * args.save_minutes:
            saved = now
            save_checkpoint(args.work_dir / "checkpoint.safetensors", weights, record)
            log("saved a checkpoint")
            if not exported:
                exported = True
                result = export(args.output, values, weights, tokenizer, record, held_out, 8)
                log(f"exported a first model: {result['held_out']['bfloat16_weights']}")
    record["finished"] = True
    save_checkpoint(args.work_dir / "final.safetensors", weights, record)
    result = export(args.output, values, weights, tokenizer, record, held_out)
    log(f"done: {steps_done} steps, {seen} tokens; held out: {json.dumps(result['held_out'])}")


def export_only(args: argparse.Namespace) -> None:
    """Writes the model folder from a checkpoint and the tokenizer next to it."""
    weights, record = load_checkpoint(args.export_only)
    tokenizer = Tokenizer.from_file(str(args.export_only.with_name("tokenizer.json")))
    args.vocab_size = tokenizer.get_vocab_size()
    held_out = HeldOut(tokenizer, read_corpus(args.data).held_out, args.positions)
    result = export(args.output, model_values(args), weights, tokenizer, record, held_out)
    print(json.dumps(result["held_out"], indent=2))


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = OutputParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1200, help="length of the run (default: %(default)s)")
    parser.add_argument(
        "--minutes", type=float, default=53.0, help="longest run; sooner if needed (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output", type=NewFolder(*MODEL_FILES), default=REPOSITORY / "jaxllm" / "demo_model"
    )
    parser.add_argument("--work-dir", type=pathlib.Path, default=REPOSITORY / "out" / "demo_model")
    parser.add_argument("--data", type=pathlib.Path, default=pathlib.Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--export-only", type=pathlib.Path, metavar="CHECKPOINT")
    parser.add_argument("--save-minutes", type=float, default=3.0)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--positions", type=int, default=1024)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--intermediate-size", type=int, default=704)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    args = parser.parse_args(argv)
    if not args.export_only:
        there = NewFolder(*WORK_FILES).files(args.work_dir)
        parser.check({f"--work-dir {path.name}:": path for path in there}, overwrite=args.overwrite)
    return args


def main(argv: list[str] | None = None) -> None:
    """Trains or exports, as the command line says."""
    args = parse(sys.argv[1:] if argv is None else argv)
    if args.export_only:
        export_only(args)
    else:
        train(args)


if __name__ == "__main__":
    main()
