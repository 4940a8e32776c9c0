"""`jaxllm` as a model of EleutherAI's lm-evaluation-harness (extra `lm-eval`).

Importing this module registers it; the harness's own command with it is

    python -m jaxllm.jobs.lm_eval --model jaxllm --model_args pretrained=DIR --tasks ...
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.engine.outputs import RequestOutput
from jaxllm.errors import ConfigError, EngineError, JaxllmError, RequestError
from jaxllm.llm import LLM
from jaxllm.sampling.param_checks import RequestOutputKind
from jaxllm.sampling.params import SamplingParams
from jaxllm.text.chat import render
from jaxllm.text.tokenizer import encode

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(
        "jaxllm.jobs.lm_eval needs lm-evaluation-harness: pip install 'jaxllm[lm-eval]'"
    ) from error

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

_SCORED = SamplingParams(
    temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
)


@register_model("jaxllm")
class JaxLLM(TemplateLM):
    """Scores and generates with an `LLM`.

    Requests are truncated from the left to `max_length` tokens, as the harness does for transformers; a
    request that an error ended fails the evaluation.

    Args:
        pretrained: model, as of `LLM`; the embedded demo model if None.
        max_length: most tokens that a prediction may depend on. By default and at most two less than
            `LLM.max_model_len`: what is scored is a prompt that one more token must fit behind.
        max_gen_toks: tokens to generate where a task does not say.
        add_bos_token: whether to add the tokenizer's special tokens to texts; as it does by itself if None.
        prefix_token_id: precedes what is scored without context; by default the beginning-of-sequence token,
            or else the end-of-sequence token.
        batch_size, max_batch_size, device: what the harness's command gives whatever its user says, so they
            change nothing: the engine batches by itself (`max_num_seqs`), JAX_PLATFORMS names the device.
        **settings: as of `LLM`.

    Raises:
        ConfigError: an argument is out of range, or as for `LLM`.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.llm = LLM(pretrained, **settings)
        self.tokenizer = self.llm.get_tokenizer()
        limit = self.llm.max_model_len - 2
        if max_length is not None and not 1 <= max_length <= limit:
            raise ConfigError(
                f"max_length={max_length} must be from 1 to {limit}, two less than the model's max_model_len"
            )
        self.max_length = max_length or limit
        self.max_gen_toks = max_gen_toks
        self._adds_special_tokens = add_bos_token is not False
        self._prefix_token_id = prefix_token_id

    @property
    def eot_token_id(self) -> int:
        """The end-of-sequence token."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What precedes texts that are scored without context."""
        choices = self._prefix_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        return next(token_id for token_id in choices if token_id is not None)

    @property
    def tokenizer_name(self) -> str:
        """Tells caches of requests apart."""
        return (self.llm.config.tokenizer or self.llm.config.model).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        """Token ids of a text."""
        adds = self._adds_special_tokens if add_special_tokens is None else add_special_tokens
        return encode(self.tokenizer, string, add_special_tokens=adds)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation."""
        return render(
            self.tokenizer,
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **options: Any,
    ) -> list[tuple[float, bool]]:
        """Sum of log-probabilities of each continuation, and whether it is what greedy decoding gives.

        A continuation of no tokens is certain.
        """
        prompts, places = [], []
        for place, (_, context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise RequestError(
                    f"requests[{place}] scores {len(continuation)} tokens, more than max_length="
                    f"{self.max_length}: raise max_model_len, or shorten the text"
                )
            if continuation:
                prompts.append((context + continuation)[-(self.max_length + 1) :])
                places.append(place)
        scores: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for number, output in self._outputs(prompts, [_SCORED] * len(prompts), disable_tqdm):
            place = places[number]
            text, _, continuation = requests[place]
            logprobs = output.prompt_logprobs or []
            found = [
                (at or {})[token_id]
                for at, token_id in zip(logprobs[-len(continuation) :], continuation, strict=True)
            ]
            scores[place] = sum(one.logprob for one in found), all(one.rank == 1 for one in found)
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, scores[place])
        return scores

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probabilities of whole texts, in windows of `max_length` that predict each token once."""
        windows = []
        for place, request in enumerate(requests):
            token_ids = self.tok_encode(request.args[0])
            pairs = get_rolling_token_windows(token_ids, self.prefix_token_id, self.max_length, context_len=1)
            windows += [(place, *make_disjoint_window(pair)) for pair in pairs]
        scores = self._loglikelihood_tokens([(None, *pair) for _, *pair in windows], disable_tqdm)
        sums = [0.0] * len(requests)
        for (place, *_), (score, _) in zip(windows, scores, strict=True):
            sums[place] += score
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts up to the first of a request's stop strings, which are left out."""
        prompts, params = [], []
        for request in requests:
            context, options = request.args
            one = self._sampling_params(options)
            assert one.max_tokens is not None
            room = self.llm.max_model_len - one.max_tokens
            if room < 1:
                raise RequestError(
                    f"max_gen_toks={one.max_tokens} leaves no room for a prompt in max_model_len="
                    f"{self.llm.max_model_len}: lower it, or raise that"
                )
            prompts.append(self.tok_encode(context)[-min(room, self.max_length) :])
            params.append(one)
        texts = [""] * len(requests)
        for place, output in self._outputs(prompts, params, disable_tqdm):
            texts[place] = output.text
            self.cache_hook.add_partial("generate_until", requests[place].args, output.text)
        return texts

    def _sampling_params(self, options: Mapping[str, Any]) -> SamplingParams:
        """From a task's: `until`, `max_gen_toks` or its aliases, `do_sample`, and ours."""
        values = dict(normalize_gen_kwargs(dict(options), self.max_gen_toks))
        values.pop("do_sample")
        return SamplingParams(
            max_tokens=values.pop("max_gen_toks"),
            stop=[text for text in handle_stop_sequences(values.pop("until"), eos=None) if text],
            output_kind=RequestOutputKind.FINAL_ONLY,
            **values,
        )

    def _outputs(
        self, prompts: list[list[int]], params: list[SamplingParams], disable_tqdm: bool
    ) -> Iterable[tuple[int, RequestOutput]]:
        """Prompts' places and outputs, as they are done; no more than a few batches' are held at once."""
        from tqdm import tqdm

        # The longest first, so that the last ones running are short.
        order = sorted(range(len(prompts)), key=lambda place: -len(prompts[place]))
        rows = ({"prompt_token_ids": prompts[one], "sampling_params": params[one]} for one in order)
        with tqdm(total=len(prompts), disable=disable_tqdm, desc="Running requests") as bar:
            for output in self.llm.generate_iter(rows, in_order=False):
                if output.finish_reason == "error":
                    raise EngineError(f"a request failed: {output.stop_reason}")
                yield order[int(output.request_id)], output
                bar.update()


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except JaxllmError as failure:
        sys.exit(f"jaxllm: error: {failure}")
