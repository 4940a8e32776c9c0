"""What an executor is built for."""

from __future__ import annotations

import dataclasses

from jaxllm.executor.buckets import Buckets
from jaxllm.executor.decode_steps import Lookup
from jaxllm.executor.programs import ProgramKey
from jaxllm.executor.sampling_programs import RowsKey, TakeKey, kind_of, row_sizes
from jaxllm.executor.slot_params import Sampling
from jaxllm.models.linear_formats import LinearFormats
from jaxllm.models.registry import PLAIN
from jaxllm.sampling.logits_processors import LogitsProcessor


@dataclasses.dataclass(frozen=True)
class ExecutorConfig:
    """Sizes the executor's arrays and programs are built for.

    `max_drafts`: most drafts that one step verifies.
    `lookup`: how iterations draft of which each goes on from what the one before it kept, if there are any.
    `num_hidden`: of each slot so many of the newest hidden states are kept on the device.
    `kept_layers`: what these layers are given is kept on the device, of each token with KV in the pool.
    `kv_dtype`: keys and values are stored as that, one of `KV_DTYPES`; None is `dtype`.
    `formats`: those that weights of linear layers are in (`registry.in_format`).
    `warms_sampling`: the programs of what is sampled apart are among those compiled ahead, but for what
    prompts' and all tokens' log-probabilities take, which `warms_everything` adds.
    """

    num_gpu_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    buckets: Buckets
    dtype: str
    kv_dtype: str | None = None
    seed: int = 0
    implementation: str | None = None
    formats: LinearFormats = PLAIN
    num_host_blocks: int = 0
    max_decode_steps: int = 1
    max_drafts: int = 0
    lookup: Lookup | None = None
    num_hidden: int = 0
    kept_layers: tuple[int, ...] = ()
    logits_processors: tuple[LogitsProcessor, ...] = ()
    warms_sampling: bool = False
    warms_everything: bool = False

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size)

    def program_keys(self, platform: str) -> list[ProgramKey]:
        """The programs of greedy and of random steps, those first that a full engine needs first.

        With prompts the random ones serve for greedy steps, too: noise is little beside so many tokens. It is
        much beside drafts: for these there are greedy ones. Those that score prompts come last, if at all.

        A GPU's loop waits for the host to read its condition, so single steps have programs of their own
        there; on a CPU, where they cost a compilation more and gain nothing, the loop serves for them, too.
        """
        buckets = self.buckets
        loops = buckets.multi_step_sizes() if self.max_decode_steps > 1 else ()
        decodes = [ProgramKey(rows) for rows in buckets.decode if rows not in loops or platform != "cpu"]
        decodes += [ProgramKey(rows, 0, self.max_decode_steps) for rows in loops]
        decodes.sort(key=lambda key: -key.rows)
        random = [key._replace(sampling=Sampling.RANDOM) for key in decodes]
        steps = [self.prompt_key(rows) for rows in reversed(buckets.sizes)]
        keys = [step._replace(sampling=Sampling.RANDOM) for step in steps]
        pairs = [key for pair in zip(decodes, random, strict=True) for key in pair]
        keys = [*keys[:1], *pairs, *keys[1:]]
        if self.max_drafts:
            drafts = [self.draft_key(rows) for rows in reversed(buckets.sizes)]
            keys += [key for one in drafts for key in (one, one._replace(sampling=Sampling.RANDOM))]
            keys = list(dict.fromkeys(keys))
        lookups = [self.lookup_key(rows) for rows in self.lookup_sizes]
        keys += [key for one in lookups for key in (one, one._replace(sampling=Sampling.RANDOM))]
        if self.warms_everything:
            keys += [step._replace(sampling=Sampling.IN_STEPS) for step in steps]
        return keys

    @property
    def lookup_sizes(self) -> tuple[int, ...]:
        """Decode batches that may draft in several iterations without the host, in ascending order."""
        if self.lookup is None or self.max_decode_steps == 1:
            return ()
        most = self.max_drafts // self.lookup.num_drafts
        return tuple(size for size in self.buckets.multi_step_sizes() if size <= most)

    def sampling_keys(self) -> list[RowsKey | TakeKey]:
        """The programs of what is sampled apart; the first ones serve everybody."""
        kinds = [Sampling.COMPLETE, kind_of(Sampling.FILTERED)]
        if self.warms_everything:
            kinds.append(kind_of(Sampling.ALL_LOGPROBS))
        sizes = row_sizes(self.max_num_seqs)
        takes = [TakeKey(num_logits, size) for size in sizes for num_logits in self.logits_sizes]
        return [*(RowsKey(size, kind) for size in sizes for kind in kinds), *takes]

    @property
    def logits_sizes(self) -> list[int]:
        """Of how many rows steps leave logits."""
        rows = (*self.buckets.decode, *self.buckets.sizes)
        found = {min(size, self.max_num_seqs) for size in rows}
        return sorted(found | {min(size, self.max_num_seqs + self.max_drafts) for size in self.buckets.sizes})

    def prompt_key(self, rows: int) -> ProgramKey:
        """The program of a step with prompts of so many rows."""
        return ProgramKey(rows, self.buckets.max_chunks(rows))

    def draft_key(self, rows: int) -> ProgramKey:
        """The program of a step with drafts of so many rows, and maybe prompts."""
        key, num_samples = self.prompt_key(rows), min(rows, self.max_num_seqs + self.max_drafts)
        return key if num_samples <= self.max_num_seqs else key._replace(max_samples=num_samples)

    def lookup_key(self, rows: int) -> ProgramKey:
        """The program of several iterations of so many requests, each with drafts that it looks up.

        Of one of them, if drafts are given.
        """
        assert self.lookup is not None
        num_steps = self.max_decode_steps if self.lookup.most else 1
        return ProgramKey(rows, 0, num_steps, num_lookups=self.lookup.num_drafts)
