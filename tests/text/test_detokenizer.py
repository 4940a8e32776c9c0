"""Streaming text must depend on the tokens alone, never on how they were batched."""

import codecs
import functools
import gc
import itertools
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jaxllm.text.detokenizer import IncrementalDetokenizer, TokenNames, token_bytes

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


# Prompts that end in anything


@pytest.mark.parametrize("end", ["😀", "日", "é", "\x7f", "\n", "ꙮ日😀"])
def test_the_space_after_a_prompt_of_bytes_survives(end):
    tokenizer = llama_like()
    encoded = ids_of(tokenizer, *(f"<0x{byte:02X}>" for byte in end.encode()))
    for prompt in (
        encoded,
        [*ids_of(tokenizer, "<s>", "▁the"), *encoded],
        [*encoded, *ids_of(tokenizer, "</s>")],
    ):
        for chunks in ([ids_of(tokenizer, "▁cat")], [[i] for i in ids_of(tokenizer, "▁cat", "s")]):
            detokenizer = IncrementalDetokenizer(tokenizer, prompt)
            assert "".join(stream(detokenizer, chunks)).startswith(" cat")


def test_a_space_that_is_a_byte_is_a_space_but_at_the_start():
    tokenizer = llama_like()
    space, cat = ids_of(tokenizer, "<0x20>", "▁cat")
    for prompt, text in (([], " cat"), ([cat], "  cat"), (ids_of(tokenizer, "<0xC3>", "<0xA9>"), "  cat")):
        detokenizer = IncrementalDetokenizer(tokenizer, prompt)
        assert "".join(stream(detokenizer, [[space], [cat]])) == text
        assert "".join(named(tokenizer, prompt, [space, cat])) == text


def with_holes():
    """A tokenizer whose ids are 0, 3, 6 and so on; between them there is nothing."""
    names = ["<s>", "▁the", "▁cat", "s", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {name: 3 * place for place, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = llama_like().backend_tokenizer.decoder
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return wrap(tokenizer)


def test_vocabularies_with_holes_lose_no_text():
    tokenizer = with_holes()
    assert max(tokenizer.get_vocab().values()) > 2 * len(tokenizer)
    prompt, (cat, letter) = ids_of(tokenizer, "▁the"), ids_of(tokenizer, "▁cat", "<0x5A>")
    for before in (prompt, [*prompt, cat + 1], [*prompt, 10**6]):  # what is no token has no text
        detokenizer = IncrementalDetokenizer(tokenizer, before)
        assert stream(detokenizer, [[cat], [letter], [letter + 1], [10**6]]) == [" cat", "Z", "", ""]
    assert stream(IncrementalDetokenizer(tokenizer, [cat + 1]), [[cat]]) == ["cat"]


def drawn_tokenizer(draw):
    """A tokenizer of bytes with pieces of any kind, ids with holes, and a decoder that may strip a space.

    Returns it, the ids to draw from, and the bytes of the tokens.
    """
    is_level, strips = draw(st.booleans()), draw(st.booleans())
    specials = ["<s>", "</s>"]
    contents = [bytes((byte,)) for byte in range(256)]
    if is_level:
        alphabet = dict(zip(sorted(_alphabet(), key=_alphabet().get), contents, strict=True))
        letters = {data: name for name, data in alphabet.items()}
        extra = draw(st.lists(st.binary(min_size=2, max_size=4), max_size=8, unique=True))
        extra += [piece.encode() for piece in (" a", " ", "  ", "é", "😀", " é")]
        names = {"".join(letters[bytes((b,))] for b in data): data for data in [*contents, *extra]}
    else:
        pieces = draw(st.lists(st.text("▁aé你", min_size=1, max_size=3), max_size=6, unique=True))
        names = {f"<0x{data[0]:02X}>": data for data in contents}
        names |= {one: one.replace("▁", " ").encode() for one in [*pieces, "▁", "▁a", "▁▁"]}
    ids = draw(st.permutations(range(0, 2 * (len(names) + 2), 2)))
    by_name = dict(zip([*specials, *names], ids, strict=True))
    model = models.BPE(by_name, [], byte_fallback=not is_level)
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in specials])
    decoder = [decoders.ByteLevel()]
    if not is_level:
        decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*decoder, *[decoders.Strip(" ", 1, 0)] * strips])
    of_bytes = {by_name[name]: data for name, data in names.items()}
    is_byte = set() if is_level else {by_name[f"<0x{byte:02X}>"] for byte in range(256)}
    return wrap(tokenizer), ids, of_bytes, is_byte, {by_name[name]: name for name in specials}


def _alphabet():
    from jaxllm.text.vocabulary import byte_alphabet

    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    return byte_alphabet()


@st.composite
def conversations(draw):
    """A tokenizer, a prompt and an output, mostly of valid text in whatever tokens."""
    tokenizer, ids, of_bytes, is_byte, specials = drawn_tokenizer(draw)
    by_bytes = {data: token_id for token_id, data in sorted(of_bytes.items(), reverse=True)}

    def tokens():
        found = []
        for part in draw(st.lists(st.sampled_from(["text", "ids", "special", "hole"]), max_size=4)):
            if part == "text":
                data = draw(texts).encode()
                while data:
                    sizes = [n for n in (1, 2, 3, 4) if data[:n] in by_bytes]
                    size = draw(st.sampled_from(sizes))
                    found.append(by_bytes[data[:size]])
                    data = data[size:]
            elif part == "ids":
                found += draw(st.lists(st.sampled_from(ids), max_size=3))
            else:
                found.append(draw(st.sampled_from([*specials] if part == "special" else [1, 10**6])))
        return found

    return tokenizer, tokens(), tokens(), of_bytes, is_byte, specials


def _whole(runs):
    """Whether runs of bytes are whole characters each."""
    for run in runs:
        try:
            b"".join(run).decode()
        except UnicodeDecodeError:
            return False
    return True


@settings(max_examples=300, deadline=None)
@given(conversations(), cut_lists, st.booleans())
def test_streams_are_what_decoding_adds_to_the_prompt(drawn, cuts, skip):
    """But where it is no UTF-8: a prompt that ends inside a character, a run of byte tokens that is none."""
    tokenizer, prompt, output, of_bytes, is_byte, specials = drawn
    whole = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    text = "".join(stream(whole, [output]))
    chunked = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    assert "".join(stream(chunked, split(output, cuts))) == text
    shown = {i: b"" if skip else name.encode() for i, name in specials.items()} | of_bytes
    kept = [i for i in [*prompt, *output] if shown.get(i)]
    runs = [
        [of_bytes[i] for i in run] for is_run, run in itertools.groupby(kept, is_byte.__contains__) if is_run
    ]
    of_prompt = [shown[i] for i in prompt if shown.get(i)]
    ends_inside = not _whole([of_prompt]) and codecs_state(b"".join(of_prompt))
    if ends_inside or not _whole(runs):
        return
    before, after = (
        tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        for ids in (prompt, [*prompt, *output])
    )
    assert before + text == after


def codecs_state(data):
    """The incomplete character at the end of bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return decoder.getstate()[0]


# Special tokens as stop strings


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_a_stop_string_may_be_a_special_token_whether_shown_or_not(skip, include):
    tokenizer = byte_level()
    ids = ids_of(tokenizer, "the", "<|user|>", "st")
    for chunks in ([ids], [[i] for i in ids]):
        options = {"skip_special_tokens": skip, "include_stop_str_in_output": include}
        detokenizer = IncrementalDetokenizer(tokenizer, [], stop=("zz", "<|user|>"), **options)
        shown = "".join(stream(detokenizer, chunks))
        assert (shown, detokenizer.check_stop()) == ("the<|user|>" if include else "the", "<|user|>")


@pytest.mark.parametrize(
    ("stop", "text", "matched"),
    [
        ("e<|user|>", "th", "e<|user|>"),
        ("<|user|>st", "the", "<|user|>st"),
        ("<|user|>x", "thestop", None),
        ("</s><|user|>", "thestop", None),
        ("thest", "", "thest"),  # as if there were no token between
        ("hestop", "t", "hestop"),
        ("|user|", "thestop", None),  # only whole tokens count of what is not shown
        ("op", "thest", "op"),
    ],
)
def test_stop_strings_around_special_tokens_that_are_not_shown(stop, text, matched):
    tokenizer = byte_level()
    ids = ids_of(tokenizer, "<s>", "the", "<|user|>", "st", "op")
    for chunks in ([ids], [[i] for i in ids], [ids[:3], ids[3:]]):
        detokenizer = IncrementalDetokenizer(tokenizer, [], stop=(stop, "<|user|>x"))
        assert ("".join(stream(detokenizer, chunks)), detokenizer.check_stop()) == (text, matched)
        assert detokenizer.text == text


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b", "<|user|>", "</s>"]), max_size=12),
    st.lists(st.sampled_from(["ab", "a<|user|>", "<|user|>", "b</s>a", "<|user|></s>", "bab"]), max_size=3),
    cut_lists,
    st.booleans(),
)
def test_they_are_found_wherever_the_tokens_are_cut(names, stop, cuts, include):
    tokenizer = byte_level()
    expected = ("".join(one for one in names if len(one) == 1), None)
    ends = []
    for string in stop:
        for end, start in itertools.combinations_with_replacement(range(len(names), -1, -1), 2):
            part = names[start:end]
            is_seen = [len(one) == 1 or one in string for one in part]  # others are as if not there
            if part and is_seen[0] and is_seen[-1] and "".join(itertools.compress(part, is_seen)) == string:
                ends.append((end, start, string))
    if ends:
        _, start, matched = min(ends)
        before = "".join(one for one in names[:start] if len(one) == 1)
        expected = (before + matched * include, matched)
    ids = ids_of(tokenizer, *names)
    for chunks in ([[i] for i in ids] + [[]], split(ids, cuts), [ids]):
        detokenizer = IncrementalDetokenizer(
            tokenizer, [], stop=tuple(stop), include_stop_str_in_output=include
        )
        assert ("".join(stream(detokenizer, chunks)), detokenizer.check_stop()) == expected


def test_a_special_token_that_is_spelled_out_stops_as_well():
    detokenizer, shown = character_stream("a<|user|>b", stop=("<|user|>",))
    assert ("".join(shown), detokenizer.check_stop()) == ("a", "<|user|>")


# What tokens are called


def named(tokenizer, prompt, ids):
    names, found = TokenNames(tokenizer, prompt), []
    for token_id in ids:
        found.append(names.name(token_id))
        names.append(token_id)
    return found


def test_a_part_of_a_character_is_called_by_what_it_adds():
    tokenizer = byte_level()
    face = ids_of(tokenizer, *"ðŁĺĢ")
    the = ids_of(tokenizer, "the", "Ġthe")
    assert named(tokenizer, [], [*the, *face, *the]) == ["the", " the", "", "", "", "😀", "the", " the"]
    straddling = ids_of(tokenizer, "ĦðŁ", "ĺĢ", "ï¿½", "<|user|>")
    assert named(tokenizer, [], straddling) == ["�", "😀", "�", "<|user|>"]
    assert [token_bytes(tokenizer, one, None) for one in straddling] == [
        b"\x84\xf0\x9f",
        b"\x98\x80",
        "�".encode(),
        b"<|user|>",
    ]
    # Of what might follow too, the same place has another name for each.
    names = TokenNames(tokenizer)
    for token_id in ids_of(tokenizer, *"çļ"):
        names.append(token_id)
    assert [names.name(one) for one in ids_of(tokenizer, "Ħ", "a", "</s>")] == ["的", "a", "</s>"]


def test_byte_tokens_are_called_by_what_they_add():
    tokenizer = llama_like()
    ids = ids_of(tokenizer, "▁the", "<0xC3>", "<0xA9>", "▁cat", "<0x41>", "</s>")
    assert named(tokenizer, [1], ids) == ["the", "", "é", " cat", "A", "</s>"]
    assert named(tokenizer, ids, ids[:1]) == [" the"]
    found = [token_bytes(tokenizer, one, None) for one in ids]
    assert found == [b" the", b"\xc3", b"\xa9", b" cat", b"A", b"</s>"]
    assert token_bytes(tokenizer, ids[0], "the") == b"the"
    assert named(tokenizer, [], [10**6]) == [""]


@settings(max_examples=100, deadline=None)
@given(conversations())
def test_names_together_are_the_text(drawn):
    tokenizer, prompt, output, of_bytes, _, _ = drawn
    output = [i for i in output if i in of_bytes]
    if _whole([[of_bytes[i] for i in output]]):
        detokenizer = IncrementalDetokenizer(tokenizer, prompt)
        assert "".join(named(tokenizer, prompt, output)) == "".join(stream(detokenizer, [output]))
        of_tokens = [token_bytes(tokenizer, one, None) for one in output]
        assert of_tokens == [of_bytes[one] for one in output]


def test_what_is_known_of_a_tokenizer_goes_with_it():
    tokenizer = with_holes()
    named(tokenizer, [], ids_of(tokenizer, "s"))
    reference = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert reference() is None
