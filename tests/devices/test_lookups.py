"""Drafts that two devices look up together, also of who filters."""

from test_decode_steps import (  # noqa: F401
    expected,
    llm,
    test_a_stop_token_ends_a_request_wherever_it_is,
    test_who_filters_looks_up_once_a_program_does_both,
)
