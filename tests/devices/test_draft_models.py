"""A draft model on the first of two devices, and drafts in steps of both."""

from test_draft_model import (  # noqa: F401
    answers,
    llm,
    test_another_model_drafts_and_nothing_changes,
)
