"""EAGLE-3 heads on the first of two devices."""

from test_eagle3 import (  # noqa: F401
    answers,
    llm,
    target,
    test_any_number_of_drafts_chunks_preemptions_and_aborts,
    test_heads_draft_what_a_reference_drafts,
    weights,
)
