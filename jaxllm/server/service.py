"""What the server's routes share: the engine, its names and limits, and what is counted."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.engine.assembly import Assembly, assemble_replicas
from jaxllm.engine.config import EngineConfig
from jaxllm.sampling.params import SamplingParams
from jaxllm.sched.presets import DEFAULT_PRESET
from jaxllm.sched.scheduler import Scheduler
from jaxllm.server.config import ServerConfig
from jaxllm.server.core import EngineCore
from jaxllm.server.errors import ApiError, refused, shutting_down
from jaxllm.server.parameters import PromptLimits
from jaxllm.server.stats import Stats
from jaxllm.server.tools import CallFormat, call_format
from jaxllm.text.tokenizer import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTES_PER_TOKEN = 16  # where there is no vocabulary to look at


class Service:
    """A model that is served.

    Args:
        replicas: an engine, or several, which are the service's own from now on.
        model: folder or id of its checkpoint.
        config: how to serve it.
        stats: what they were told to report to, one by one.
        policy_name: of the scheduling policy, for people.

    Attributes:
        core: runs requests.
        made: the first engine; the others are like it.
        model_names: what clients call the model.
        tokenizer: the model's, if there is one.
        block_bytes: of a KV block.
    """

    def __init__(
        self,
        replicas: Sequence[Assembly],
        model: str,
        config: ServerConfig,
        stats: Stats,
        policy_name: str,
    ) -> None:
        self.replicas, self.made = replicas, replicas[0]
        self.config, self.stats, self.policy_name = config, stats, policy_name
        self.core = EngineCore(
            replicas,
            max_queued_requests=config.max_queued_requests,
            max_queued_tokens=config.max_queued_tokens,
        )
        named = Path(model).resolve().name if Path(model).exists() else model
        self.model_names = tuple(config.served_model_names) or (named,)
        self._known_names = {*self.model_names, *([] if config.served_model_names else [model])}
        made = self.made
        self.tokenizer: PreTrainedTokenizerBase | None = made.tokenizer
        stats.is_busy = lambda replica: replicas[replica].engine.num_live > 0
        for one in replicas:
            one.engine.on_tokens = stats.count_output
        self.block_bytes = made.executor.pool_bytes // made.executor.num_gpu_blocks
        max_len = self.core.limits.max_model_len
        self.prompt_limits = PromptLimits(
            config.max_prompts,
            2 * max_len,
            2 * max_len * _longest_token(made.tokenizer),
            max_len,
            takes_empty=made.tokenizer is not None and bool(encode(made.tokenizer, "")),
        )

    @classmethod
    def load(cls, engine: EngineConfig, config: ServerConfig) -> Service:
        """Load a model and make its engine, or several.

        Raises:
            ConfigError, WeightsError, CapacityError: see `LLM`.
        """
        stats = Stats()
        replicas = assemble_replicas(engine, stats.on_record)
        policy = DEFAULT_PRESET if engine.scheduler_policy is None else engine.scheduler_policy
        name = policy if isinstance(policy, str) else type(policy).__name__
        return cls(replicas, engine.model, config, stats, name)

    @property
    def schedulers(self) -> list[Scheduler]:
        """One of each engine."""
        return [one.engine.scheduler for one in self.replicas]

    @property
    def default_params(self) -> SamplingParams:
        """The checkpoint's own."""
        return self.made.default_params

    def check_model(self, name: str | None) -> None:
        """Verify that a request means the model that is served; None does.

        Raises:
            ApiError: it does not.
        """
        if name is not None and name not in self._known_names:
            known = ", ".join(map(repr, self.model_names))
            raise ApiError(
                404,
                f"the model {name[:80]!r} is not served here; {known} is",
                param="model",
                code="model_not_found",
            )

    def needed_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer.

        Raises:
            ApiError: there is none.
        """
        if self.tokenizer is None:
            raise refused("this server has no tokenizer: send prompts to /v1/completions as token ids")
        return self.tokenizer

    @functools.cached_property
    def call_format(self) -> CallFormat:
        """How the model writes calls of tools."""
        return call_format(self.needed_tokenizer())

    def check_health(self) -> None:
        """Verify that the engine takes requests.

        Raises:
            ApiError: it does not.
        """
        if self.core.admission.is_closing:
            raise shutting_down()
        if not self.core.is_healthy:
            raise ApiError(503, "the engine has failed; the server must be restarted", code="engine_failed")

    def check_room(self) -> None:
        """Verify that a request may be read.

        Raises:
            ApiError: the engine has failed, or there is no room.
        """
        self.check_health()
        admission = self.core.admission
        admission.retry_seconds = math.ceil(self.stats.median_seconds()) if admission.num_requests else 1
        admission.check()

    def models(self) -> dict[str, Any]:
        """What /v1/models says."""
        return {
            "object": "list",
            "data": [
                {
                    "id": name,
                    "object": "model",
                    "created": int(self.stats.started),
                    "owned_by": "jaxllm",
                    "root": str(self.model_names[0]),
                    "parent": None,
                    "max_model_len": self.core.limits.max_model_len,
                }
                for name in self.model_names
            ],
        }


def _longest_token(tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Characters of the longest entry of the vocabulary."""
    if tokenizer is None:
        return _BYTES_PER_TOKEN
    return max(map(len, tokenizer.get_vocab()), default=_BYTES_PER_TOKEN)
