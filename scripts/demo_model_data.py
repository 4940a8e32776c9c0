"""The text of the demo model: Python's standard library, its tokenizer, and windows of tokens to train on."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SEPARATOR = "<|endoftext|>"
SEPARATOR_ID = 0
HELD_OUT_PER_MILLE = 30

# Words with one leading character, up to three digits, punctuation with the line ends that follow it, line
# ends, and all but the last space of an indentation, as in GPT-4's tokenizer.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Standard-library folders and files that hold tests, data tables or this machine's build settings.
EXCLUDED_PARTS = frozenset({"__pycache__", "encodings", "idle_test", "site-packages", "test", "tests"})
EXCLUDED_PREFIXES = ("_sysconfigdata", "config-", "lib2to3", "distutils")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents as `(name, text)`, by name."""

    train: list[tuple[str, str]]
    held_out: list[tuple[str, str]]

    @property
    def sha256(self) -> str:
        """Digest of every name and text, in order."""
        digest = hashlib.sha256()
        for name, text in (*self.train, *self.held_out):
            digest.update(f"{name}\0{text}\0".encode())
        return digest.hexdigest()


def read_corpus(folder: pathlib.Path) -> Corpus:
    """The Python sources under `folder` that are not empty, split by a hash of their relative names."""
    train, held_out = [], []
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    for name in names:
        if EXCLUDED_PARTS & set(name.split("/")) or name.startswith(EXCLUDED_PREFIXES):
            continue
        try:
            text = (folder / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            chosen = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 1000 < HELD_OUT_PER_MILLE
            (held_out if chosen else train).append((name, text))
    if not held_out:
        held_out.append(train.pop())
    return Corpus(train, held_out)


def train_tokenizer(corpus: Corpus, vocab_size: int) -> Tokenizer:
    """Byte-level BPE: every text survives a round trip, and encoding puts the separator in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(SEPARATOR, special=True, normalized=False)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for _, text in corpus.train), trainer)
    assert tokenizer.token_to_id(SEPARATOR) == SEPARATOR_ID
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SEPARATOR} $A",
        pair=f"{SEPARATOR} $A {SEPARATOR} $B",
        special_tokens=[(SEPARATOR, SEPARATOR_ID)],
    )
    return tokenizer


class Windows:
    """Training windows: the separator, then a stretch of the text that starts where a line does.

    Every epoch covers the text once, in another order and cut at other places.
    """

    def __init__(self, tokenizer: Tokenizer, documents: list[tuple[str, str]], seed: int) -> None:
        encoded = tokenizer.encode_batch([text for _, text in documents], add_special_tokens=False)
        stream = [np.array([*document.ids, SEPARATOR_ID], np.int32) for document in encoded]
        self.tokens = np.concatenate(stream)
        texts = tokenizer.decode_batch(
            [[i] for i in range(tokenizer.get_vocab_size())], skip_special_tokens=False
        )
        ends = np.array([text.endswith("\n") or text == SEPARATOR for text in texts])
        self.line_starts = np.concatenate([[0], np.flatnonzero(ends[self.tokens[:-1]]) + 1])
        self.rng = np.random.default_rng(seed)
        self._starts: np.ndarray = np.zeros(0, np.int64)

    def batch(self, batch: int, length: int) -> np.ndarray:
        """`[batch, length + 1]` int32."""
        last = len(self.tokens) - length
        while len(self._starts) < batch:
            epoch = np.arange(self.rng.integers(length), last, length)
            self._starts = np.concatenate([self._starts, self.rng.permutation(epoch)])
        starts, self._starts = self._starts[:batch], self._starts[batch:]
        nearest = np.searchsorted(self.line_starts, starts).clip(max=len(self.line_starts) - 1)
        starts = self.line_starts[nearest].clip(max=last)
        windows = self.tokens[starts[:, None] + np.arange(length)]
        return np.concatenate([np.full((batch, 1), SEPARATOR_ID, np.int32), windows], axis=1)
