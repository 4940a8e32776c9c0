"""What the paper prints (AdaptiveLLM: Liang et al.), to be set beside ours."""

from __future__ import annotations

from collections.abc import Mapping

TABLE3: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "opt-13b": {"chatbot": (1.38, 2.46), "alpaca": (1.36, 2.55), "summary": (1.15, 2.50)},
    "opt-30b": {"chatbot": (1.27, 1.98), "alpaca": (1.22, 1.99), "summary": (1.11, 1.64)},
    "llama-13b": {"chatbot": (1.28, 2.28), "alpaca": (1.40, 2.37), "summary": (1.17, 2.12)},
    "llama-32.5b": {"chatbot": (1.28, 1.95), "alpaca": (1.23, 2.13), "summary": (1.09, 2.18)},
}
"""Speed-up of AdaptiveLLM over vLLM and over vLLM_s at 64 output tokens, by model and data set."""
FIG3_AT_256 = 1.3
"""Most that AdaptiveLLM is said to reach over vLLM at 256 output tokens."""
FIG4_CHANGE = (-0.4, -0.2)
"""Change of the mean weighted turnaround against vLLM at batch limits 64 and 128."""
FIG4_CHANGE_SWAP = (-0.6, -0.2)
"""The same against vLLM_s."""
FIG4_LIMITS = (64, 128)
TABLE2: Mapping[str, tuple[str, int, float]] = {
    "chatbot": ("alespalla/chatbot_instruction_prompts", 258_064, 17.02),
    "alpaca": ("gbharti/finance-alpaca", 68_912, 19.66),
    "summary": ("khwhrali011/summary-dataset", 1_799, 340.48),
}
"""Data set, samples, mean tokens of a prompt."""
PREDICTION_SHARE = (0.001, 0.01)
"""Of run time, Section 4.6."""
SCHEDULING_SECONDS = 0.2e-3
"""A step, Section 4.6."""
CONTRADICTIONS = (
    "Section 2.1 gives 39.1 MB for the KV of 100 tokens of Llama-13B; Eq. 3 (2 x layers x hidden x 2 bytes a "
    "token) gives 78.1 MiB, twice that. We take Eq. 3, which is what vLLM 0.2.5 allocates.",
    "Algorithm 1's text preempts the request of lowest priority; its pseudo-code sorts ascending and takes "
    "the last, the one of highest priority. We take the text; the reading `printed Algorithm 1` shows the "
    "other.",
    'vLLM_s "always swaps", and the host pool has 64 blocks where the device has 128: it cannot. We bound '
    "what it starts by what the host pool can hold (`vllm_swap`); the appendix has the other rule.",
)
"""Where the paper contradicts itself, and what we take."""
