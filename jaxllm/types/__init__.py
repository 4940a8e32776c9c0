"""Values that cross package borders. Imports no accelerator library."""

from jaxllm.types.executor import Executor, StepResult
from jaxllm.types.kv import (
    MAX_PIECE_BLOCKS,
    MAX_STAGED_BLOCKS,
    BlockName,
    HostBlock,
    HostPiece,
    host_blocks_of,
    piece_sizes,
)
from jaxllm.types.request import DecodeClock, FinishReason, Request, RequestMetrics, RequestStatus
from jaxllm.types.steps import (
    MAX_DECODE_STEPS,
    MULTI_STEP_SEQS,
    NO_COPIES,
    NO_TOKEN,
    WRONG_DRAFT,
    CopyProgress,
    CopyTime,
    PrefillChunk,
    Read,
    SampledTokens,
    SchedulerOutput,
    Swap,
    TokenLogprobs,
)

__all__ = [
    "MAX_DECODE_STEPS",
    "MAX_PIECE_BLOCKS",
    "MAX_STAGED_BLOCKS",
    "MULTI_STEP_SEQS",
    "NO_COPIES",
    "NO_TOKEN",
    "WRONG_DRAFT",
    "BlockName",
    "CopyProgress",
    "CopyTime",
    "DecodeClock",
    "Executor",
    "FinishReason",
    "HostBlock",
    "HostPiece",
    "PrefillChunk",
    "Read",
    "Request",
    "RequestMetrics",
    "RequestStatus",
    "SampledTokens",
    "SchedulerOutput",
    "StepResult",
    "Swap",
    "TokenLogprobs",
    "host_blocks_of",
    "piece_sizes",
]
