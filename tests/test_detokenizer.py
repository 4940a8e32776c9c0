"""Streaming text must depend on the tokens alone, never on how they were batched."""

import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jaxllm.detokenizer import IncrementalDetokenizer

SPECIAL = ["<s>", "</s>", "<|user|>"]
BYTE_LEVEL_SIZE = 3 + 256 + 14


def wrap(tokenizer):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@functools.cache
def byte_level():
    """All bytes, words, whole characters, and tokens that straddle characters (E7 9A 84 is one)."""
    words = [
        "the",
        "Ġthe",
        "st",
        "op",
        "çļĦ",
        "ĦçļĦç",
        "ļĦç",
        "ĦðŁ",
        "ðŁĺĢ",
        "ðŁĺ",
        "ĺĢ",
        "ĢðŁ",
        "ï¿½",
        "ï¿½x",
    ]
    names = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + words
    assert len(names) == BYTE_LEVEL_SIZE
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return wrap(tokenizer)


@functools.cache
def llama_like():
    """Llama 2's layout: unk, bos, eos, 256 bytes, pieces; Metaspace spaces, a decoder that strips one."""
    pieces = ["▁", "▁the", "▁cat", "s", "▁.", ".", "a", "é", "▁é", "x▁"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    model = models.BPE({n: i for i, n in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens([AddedToken(n, special=True) for n in ("<unk>", "<s>", "</s>")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return wrap(tokenizer)


@functools.cache
def word_piece():
    names = ["[UNK]", "<s>", "</s>", "un", "##believ", "##able", "is", ",", "it"]
    tokenizer = Tokenizer(models.WordPiece({n: i for i, n in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens([AddedToken(n, special=True) for n in ("<s>", "</s>")])
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return wrap(tokenizer)


def ids_of(tokenizer, *names):
    return [tokenizer.convert_tokens_to_ids(name) for name in names]


def stream(detokenizer, chunks):
    """What each call shows, with the stop string checked as the engine does."""
    shown = []
    for position, chunk in enumerate(chunks):
        detokenizer.append(chunk)
        shown.append(detokenizer.flush(finished=position == len(chunks) - 1))
        if detokenizer.check_stop() is not None:
            break
    return shown


def split(ids, cuts):
    edges = [0, *sorted({min(c, len(ids)) for c in cuts}), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


token_lists = st.lists(st.integers(0, BYTE_LEVEL_SIZE + 3) | st.integers(259, 272), max_size=24)
cut_lists = st.lists(st.integers(0, 24), max_size=8)
texts = st.text(alphabet="aé你的😀�\u200d ", max_size=12)


@st.composite
def byte_level_ids(draw):
    """Random ids (mostly invalid UTF-8), or real text cut into single bytes, with specials between."""
    tokenizer = byte_level()
    ids = draw(token_lists)
    if draw(st.booleans()):
        byte_names = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(draw(texts))
        ids = [tokenizer.convert_tokens_to_ids(c) for word, _ in byte_names for c in word]
        for place in draw(st.lists(st.integers(0, 30), max_size=2)):
            ids.insert(place, draw(st.integers(0, 2)))
    return ids


@settings(max_examples=80, deadline=None)
@given(byte_level_ids(), token_lists, cut_lists, st.booleans())
def test_byte_level_text_is_the_tokenizers_and_independent_of_batching(ids, prompt, cuts, skip):
    tokenizer = byte_level()
    whole = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    one_by_one = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    for i in range(len(ids)):
        one_by_one.append(ids[i : i + 1])
        one_by_one.flush()
        at_once = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
        at_once.append(ids[: i + 1])
        assert at_once.flush() == one_by_one.text
        assert whole.startswith(one_by_one.text)
    one_by_one.flush(finished=True)
    assert one_by_one.text == whole
    chunked = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    assert "".join(stream(chunked, split(ids, cuts))) == whole == chunked.text


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 270), max_size=16),
    st.lists(st.integers(0, 270), max_size=4),
    cut_lists,
    st.booleans(),
)
def test_byte_fallback_text_is_independent_of_batching(ids, prompt, cuts, skip):
    tokenizer = llama_like()
    one_by_one = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    chunked = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    expected = "".join(stream(one_by_one, [*([i] for i in ids), []]))
    assert "".join(stream(chunked, split(ids, cuts))) == expected


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.sampled_from(["▁the", "▁cat", "s", ".", "▁é", "</s>", "😀", "\n"]), max_size=10), cut_lists
)
def test_byte_fallback_valid_text_continues_the_prompt(names, cuts):
    tokenizer = llama_like()
    ids = []
    for name in names:
        is_token = name in tokenizer.get_vocab()
        ids += ids_of(tokenizer, *([name] if is_token else (f"<0x{b:02X}>" for b in name.encode())))
    for prompt in (["<s>"], ["<s>", "▁the"], ["<s>", "▁the", "</s>"], ["▁"], ["▁the", "<0xC3>", "<0xA9>"]):
        prompt_ids = ids_of(tokenizer, *prompt)
        detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids)
        stream(detokenizer, split(ids, cuts))
        before, after = (
            tokenizer.decode(i, skip_special_tokens=True) for i in (prompt_ids, prompt_ids + ids)
        )
        assert before + detokenizer.text == after


def test_leading_space_survives_after_a_prompt_and_not_at_the_start_of_the_text():
    tokenizer = llama_like()
    cat = ids_of(tokenizer, "▁cat")
    for prompt, text in ((["<s>", "▁the"], " cat"), (["<s>"], "cat"), (["▁the", "</s>", "<s>"], " cat")):
        detokenizer = IncrementalDetokenizer(tokenizer, ids_of(tokenizer, *prompt))
        detokenizer.append(cat)
        assert detokenizer.flush() == text


def test_shown_bytes_stay_when_an_invalid_byte_follows():
    tokenizer = llama_like()
    detokenizer = IncrementalDetokenizer(tokenizer, ids_of(tokenizer, "▁the"))
    assert stream(detokenizer, [[i] for i in ids_of(tokenizer, "<0xC3>", "<0xA9>", "<0xFF>", "s")]) == [
        "",
        "é",
        "�",
        "s",
    ]


def test_word_piece_joins_continuations():
    tokenizer = word_piece()
    detokenizer = IncrementalDetokenizer(tokenizer, ids_of(tokenizer, "<s>", "it"))
    shown = stream(detokenizer, [[i] for i in ids_of(tokenizer, "is", "un", "##believ", "</s>", "##able")])
    assert shown == [" is", " un", "believ", "", "able"]


def test_an_incomplete_character_is_held_back_until_complete_or_finished():
    tokenizer = byte_level()
    face = ids_of(tokenizer, *"ðŁĺĢ")  # the four bytes of an emoji in the byte-level alphabet
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    assert stream(detokenizer, [face[:1], face[1:3], face[3:], face[:2]]) == ["", "", "😀", "�"]


def test_special_tokens_are_shown_on_request():
    tokenizer = byte_level()
    for skip, text in ((True, "a"), (False, "<|user|>a</s>")):
        detokenizer = IncrementalDetokenizer(tokenizer, [0], skip_special_tokens=skip)
        detokenizer.append([2, *ids_of(tokenizer, "a"), 1])
        assert detokenizer.flush(finished=True) == text


def test_work_per_call_does_not_grow_with_the_text():
    """Valid text, endless invalid bytes, and characters that straddle tokens: the decode stays short."""
    tokenizer = byte_level()
    for names in (["a"], ["çļĦ"], ["ÿ"], ["ç", "ļ", "Ħ"], ["ĦçļĦç", "ļ"], ["ĦðŁ", "ĺĢ"]):
        unit = ids_of(tokenizer, *names)
        detokenizer = IncrementalDetokenizer(tokenizer, ids_of(tokenizer, "<s>", "the"))
        inner = detokenizer._decoder._decode_function
        lengths = []

        def counted(ids, skip, inner=inner, lengths=lengths):
            lengths.append(len(ids))
            return inner(ids, skip)

        detokenizer._decoder._decode_function = counted
        for token_id in unit * 50:
            detokenizer.append([token_id])
            detokenizer.flush()
        assert max(lengths) <= 5
        assert len(lengths) <= 2 * 50 * len(unit)
        lengths.clear()
        detokenizer.append(ids_of(tokenizer, "a") * 100)
        detokenizer.flush()
        assert len(lengths) == 1


def character_stream(characters, **options):
    tokenizer = byte_level()
    detokenizer = IncrementalDetokenizer(tokenizer, [], **options)
    return detokenizer, stream(detokenizer, [ids_of(tokenizer, "Ġ" if c == " " else c) for c in characters])


def test_a_possible_start_of_a_stop_string_is_held_back():
    detokenizer, shown = character_stream("ab</xb", stop=("</s>",))
    assert shown == ["a", "b", "", "", "</x", "b"]
    assert detokenizer.check_stop() is None
    _, shown = character_stream("ab</", stop=("</s>",))
    assert shown == ["a", "b", "", "</"]  # finished: nothing is held


@pytest.mark.parametrize(("include", "text"), [(False, "ab EN"), (True, "ab ENEND")])
def test_a_stop_string_over_several_tokens_ends_the_text(include, text):
    detokenizer, shown = character_stream(
        "ab ENENDcd", stop=("END", "zz"), include_stop_str_in_output=include
    )
    assert "".join(shown) == detokenizer.text == text
    assert detokenizer.check_stop() == "END"
    detokenizer.append([5])
    assert detokenizer.flush(finished=True) == ""


def test_the_first_stop_string_to_complete_wins_then_the_longest():
    assert character_stream("xabcd", stop=("abcd", "bc"))[0].check_stop() == "bc"
    assert character_stream("xabcd", stop=("abcd", "bc"))[0].text == "xa"
    detokenizer, _ = character_stream("xabc", stop=("c", "abc"))
    assert detokenizer.check_stop() == "abc"
    assert detokenizer.text == "x"


def test_a_stop_string_that_ends_too_early_never_counts():
    tokenizer = byte_level()
    detokenizer = IncrementalDetokenizer(tokenizer, [], stop=("ab", "bab"))
    shown = ""
    for place, character in enumerate("abab"):
        detokenizer.append(ids_of(tokenizer, character))
        shown += detokenizer.flush(may_stop=place >= 2)
    # "ab" was complete at the second character; the match may begin before stopping was allowed.
    assert (shown, detokenizer.check_stop()) == ("a", "bab")


@settings(max_examples=100, deadline=None)
@given(
    st.text(alphabet="ab é", max_size=20),
    st.lists(st.text(alphabet="ab é", min_size=1, max_size=4), min_size=1, max_size=3),
    cut_lists,
    st.booleans(),
)
def test_stop_strings_are_independent_of_batching_and_match_a_naive_search(text, stop, cuts, include):
    tokenizer = byte_level()
    words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    ids = [tokenizer.convert_tokens_to_ids(c) for word, _ in words for c in word]
    found = [
        (end, start, text[start:end])
        for start in range(len(text))
        for end in range(start, len(text) + 1)
        if text[start:end] in stop
    ]
    expected = (text, None)
    if found:
        end, start, matched = min(found)
        expected = (text[: end if include else start], matched)
    for chunks in ([[i] for i in ids] + [[]], split(ids, cuts), [ids]):
        detokenizer = IncrementalDetokenizer(
            tokenizer, [], stop=tuple(stop), include_stop_str_in_output=include
        )
        shown = "".join(stream(detokenizer, chunks))
        assert (shown, detokenizer.check_stop()) == expected
        assert detokenizer.text == shown


def test_a_wrapper_with_its_own_decode_is_used():
    from transformers import PreTrainedTokenizerFast

    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *args, **kwargs):
            return super()._decode(*args, **kwargs).upper()

    tokenizer = Shouting(tokenizer_object=byte_level().backend_tokenizer, bos_token="<s>", eos_token="</s>")
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    detokenizer.append(ids_of(tokenizer, "a", "b"))
    assert detokenizer.flush() == "AB"
