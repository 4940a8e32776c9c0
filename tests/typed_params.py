"""For type checkers, not to be run: what is given may be of another type than what is kept."""

from jaxllm import SamplingParams

params = SamplingParams(stop="a", logit_bias={1: 2}, min_p=0.5)
kept: tuple[str, ...] = params.stop
SamplingParams(stop=5)  # type: ignore[arg-type]
SamplingParams(top_kk=5)  # type: ignore[call-arg]
params.min_p = 1  # type: ignore[misc]
