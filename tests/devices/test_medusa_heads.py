"""Medusa heads on the first of two devices."""

from test_medusa import (  # noqa: F401
    folder,
    llm,
    seen,
    test_any_number_of_drafts_chunks_preemptions_and_aborts,
    test_heads_of_a_folder_draft_and_nothing_changes,
    test_steps_keep_what_tokens_were_sampled_from,
    test_trained_heads_are_right_now_and_then,
    trained,
)
