"""What prompt and suffix lookup propose, against searches that read everything."""

from hypothesis import given
from hypothesis import strategies as st
from scheduler_helpers import make_request

from jaxllm.sched.proposers.ngram import PromptLookup, repeated
from jaxllm.sched.proposers.suffix import SuffixLookup


def naive(tokens, least, most, count):
    for size in range(most, least - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if len(tokens) >= size and tokens[end - size : end] == tokens[-size:]:
                return repeated(tokens, end, count)
    return []


@given(
    tokens=st.lists(st.sampled_from([0, 1, 256, 257]), min_size=1, max_size=60),
    cuts=st.lists(st.integers(1, 60), max_size=6),
    least=st.integers(1, 3),
    span=st.integers(0, 3),
    count=st.integers(1, 9),
)
def test_prompt_lookup_finds_what_a_search_finds(tokens, cuts, least, span, count):
    proposer = PromptLookup(least, least + span)
    num_prompt = min([len(tokens), *cuts])
    request = make_request(num_prompt, 100)
    request.prompt_token_ids[:] = tokens[:num_prompt]
    for cut in sorted({*(cut for cut in cuts if cut <= len(tokens)), len(tokens)}):
        request.output_token_ids[:] = tokens[num_prompt:cut]
        assert list(proposer.propose([(request, count)])[0]) == naive(
            tokens[:cut], least, least + span, count
        )
    proposer.forget(request)
    assert not proposer._known


@given(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=40), num_prompt=st.integers(1, 40))
def test_suffix_lookup_finds_the_longest_ending(tokens, num_prompt):
    proposer, request = SuffixLookup(factor=2.0), make_request(0, 1)
    num_prompt = min(num_prompt, len(tokens))
    request.prompt_token_ids[:] = tokens[:num_prompt]
    for stop in range(num_prompt, len(tokens) + 1):
        request.output_token_ids[:] = tokens[num_prompt:stop]
        text = tokens[:stop]
        starts = {
            size: [end for end in range(size, stop) if text[end - size : end] == text[-size:]]
            for size in range(1, stop)
        }
        longest = max((size for size, ends in starts.items() if ends), default=0)
        found = list(proposer.propose([(request, 5)])[0])
        assert len(found) == min(5, 2 * longest)
        assert not found or found in [repeated(text, end, len(found)) for end in starts[longest]]
    proposer.forget(request)
    assert not proposer._automata


def test_what_repeats_goes_round():
    assert repeated([9, 1, 2, 3], 1, 7) == [1, 2, 3, 1, 2, 3, 1]
