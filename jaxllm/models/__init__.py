"""OPT and the Llama family in Flax NNX."""

from jaxllm.models import like_llama as like_llama  # which register what they are
from jaxllm.models import opt as opt
