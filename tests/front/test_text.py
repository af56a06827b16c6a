"""A26, A27: joined pieces equal the whole decoded at once; stop strings neither leak nor swallow."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from decode_svc.text import Assembler, Detokenizer, Stops, StopStrings, TextCodec
from shared.errors import ConfigError, RequestError
from tests.front.fakes import byte_level_tokenizer

HARD = "žluť 🫨 齉 👩‍🚀 the\n\nend é"


def fast(vocab: list[str], decoder: Any) -> TextCodec:
    backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(vocab)}, unk_token=vocab[0]))
    if decoder is not None:
        backend.decoder = decoder
    return TextCodec(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token=vocab[0]))


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["<unk>", "▁the", "▁", "▁▁", "re", "é", "�", "!"]
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
CODECS = {
    "byte level": TextCodec(byte_level_tokenizer()),
    "llama, byte fallback": fast([*WORDS, *BYTES], decoders.Sequence(LLAMA)),
    "metaspace": fast(WORDS, decoders.Metaspace()),
    "metaspace, never prepended": fast(WORDS, decoders.Metaspace(prepend_scheme="never")),
    "word piece": fast(["[UNK]", "play", "##ing", ".", "do", "not", "'", "##s"], decoders.WordPiece()),
    "word ends": fast(["<unk>", "a", "b</w>", "c</w>", "é"], decoders.BPEDecoder()),
    "no decoder": fast(["<unk>", "a", "b"], None),
}


def size(codec: TextCodec) -> int:
    return int(codec._backend.get_vocab_size(with_added_tokens=True))


def pieces(codec: TextCodec, ids: list[int], sizes: list[int]) -> list[str]:
    """The deltas when ids arrive in groups of these sizes (repeated); the flush is last."""
    detokenizer, out, start, turn = Detokenizer(codec), [], 0, 0
    while start < len(ids):
        step = sizes[turn % len(sizes)]
        out.append(detokenizer.push(ids[start : start + step]))
        start, turn = start + step, turn + 1
    return [*out, detokenizer.flush()]


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    seeds=st.lists(st.integers(0, 10_000), max_size=40),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_joined_pieces_equal_the_whole(name: str, seeds: list[int], sizes: list[int]) -> None:
    codec = CODECS[name]
    ids = [seed % size(codec) for seed in seeds]  # the special <eos> among them
    assert "".join(pieces(codec, ids, sizes)) == codec.decode(ids)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(text=st.text(max_size=30), cut=st.integers(0, 200))
@example(text=HARD, cut=200)
def test_text_cut_anywhere(text: str, cut: int) -> None:
    codec = CODECS["byte level"]
    ids = codec.encode(text, add_special_tokens=False)
    assert "".join(pieces(codec, ids[:cut], [1])) == codec.decode(ids[:cut])
    assert "".join(pieces(codec, ids, [1])) == text


def test_text_appears_as_soon_as_its_last_byte() -> None:
    codec = CODECS["byte level"]
    assert pieces(codec, codec.encode("a🫨b", False), [1]) == ["a", "", "", "🫨", "b", ""]


def test_no_replacement_character_that_the_model_did_not_produce() -> None:
    codec = CODECS["byte level"]
    ids = codec.encode(HARD, False)
    assert all("\ufffd" not in piece for piece in pieces(codec, ids, [1]))
    assert pieces(codec, codec.encode("a🫨", False)[:-1], [1]) == ["a", "", "", "\ufffd"]


def test_a_byte_run_is_held_until_it_is_whole() -> None:
    codec = CODECS["llama, byte fallback"]
    euro = [len(WORDS) + byte for byte in "€".encode()]
    assert pieces(codec, [1, *euro, 1], [1]) == ["the", "", "", "", "€ the", ""]
    assert "".join(pieces(codec, [1, *euro, euro[0]], [1])) == "the" + "\ufffd" * 4 == codec.decode([1, *euro, euro[0]])


def test_special_tokens_are_no_text_and_added_ones_are() -> None:
    codec = CODECS["byte level"]
    ids = codec.encode("a<eos>b<tool>c", False)
    assert len(ids) == 5
    assert "".join(pieces(codec, ids, [1])) == "ab<tool>c"


def test_a_tokenizer_without_backend_is_the_operators_fault() -> None:
    with pytest.raises(ConfigError, match="no fast backend"):
        TextCodec(object())


def test_render_and_its_refusals() -> None:
    tokenizer = byte_level_tokenizer()
    codec = TextCodec(tokenizer)
    assert codec.render([{"role": "user", "content": "hi"}]) == "<user>hi<assistant>"
    with pytest.raises(RequestError, match="unknown role king"):
        codec.render([{"role": "king", "content": "hi"}])
    tokenizer.chat_template = None
    with pytest.raises(RequestError, match="no chat template") as caught:
        codec.render([{"role": "user", "content": "hi"}])
    assert caught.value.code == "no_chat_template"


# stop strings


def stopped(text: str, stops: list[str], step: int) -> tuple[str, bool, list[str]]:
    machine, out = StopStrings(stops), []
    for start in range(0, len(text), step):
        final, hit = machine.push(text[start : start + step])
        out.append(final)
        if hit:
            return "".join(out), True, out
    out.append(machine.flush())
    return "".join(out), False, out


@pytest.mark.parametrize("step", [1, 2, 3, 7, 100])
def test_stop_is_cut_and_nothing_leaks(step: int) -> None:
    text, hit, _ = stopped("one two three four five six", ["three four"], step)
    assert (text, hit) == ("one two ", True)


@pytest.mark.parametrize("step", [1, 3, 100])
@pytest.mark.parametrize("text", ["one two three fourth", "one three fou", "aab aab", "three "])
def test_near_misses_and_unfinished_matches_are_delivered(text: str, step: int) -> None:
    assert stopped(text, ["three fourteen", "three four!", "aac"], step)[:2] == (text, False)


def test_only_what_may_become_a_stop_is_held() -> None:
    machine = StopStrings(["abc", "bd"])
    assert machine.push("xab") == ("x", False)
    assert machine.push("x") == ("abx", False)
    assert machine.push("b") == ("", False)
    assert machine.push("e") == ("be", False)


@pytest.mark.parametrize("step", [1, 2, 5])
def test_the_match_that_completes_first_wins_however_the_text_is_split(step: int) -> None:
    assert stopped("xabcd", ["abcd", "bc"], step)[:2] == ("xa", True)
    assert stopped("xabcd", ["abc", "bc"], step)[:2] == ("x", True)
    assert stopped("aaab", ["aab"], step)[:2] == ("a", True)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    text=st.text("ab", max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    step=st.integers(1, 6),
)
def test_stops_against_the_plain_definition(text: str, stops: list[str], step: int) -> None:
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text[: min(ends)[1]] if ends else text
    assert stopped(text, stops, step)[:2] == (expected, bool(ends))


# both


def assembled(text: str, stops: list[str], group: int) -> tuple[str, Assembler]:
    codec = CODECS["byte level"]
    ids = codec.encode(text, False)
    assembler, out = Assembler(codec, Stops(stops)), ""
    for start in range(0, len(ids), group):
        out += assembler.feed(ids[start : start + group], "length" if start + group >= len(ids) else None)
        if assembler.stopped:
            break
    return out, assembler


@pytest.mark.parametrize("group", [1, 2, 50])
def test_tokens_are_counted_up_to_the_one_that_completed_the_stop(group: int) -> None:
    text, assembler = assembled("xyz END more", ["END"], group)
    assert (text, assembler.stopped, assembler.tokens) == ("xyz ", True, 7)


def test_a_stop_string_over_split_characters() -> None:
    text, assembler = assembled("go 🫨🫨 on", ["🫨 "], 1)
    assert (text, assembler.stopped) == ("go 🫨", True)


def test_a_stop_that_only_the_end_completes() -> None:
    codec = CODECS["byte level"]
    ids = codec.encode("a🫨", False)[:-1]
    assembler = Assembler(codec, Stops(["\ufffd"]))
    assert assembler.feed(ids, "length") == "a"
    assert assembler.stopped


@pytest.mark.parametrize("stops", [[], ["never"]])
def test_the_end_flushes_what_is_held(stops: list[str]) -> None:
    codec = CODECS["byte level"]
    ids = codec.encode("a🫨 neve", False)
    assembler = Assembler(codec, Stops(stops))
    assert assembler.feed(ids, "length") == "a🫨 neve"


@pytest.mark.parametrize("stops", [[], ["never met"]])
def test_a15_a_stop_token_counts_and_is_no_text(stops: list[str]) -> None:
    """Also one that is an ordinary token of the vocabulary."""
    codec = CODECS["byte level"]
    assembler, ids = Assembler(codec, Stops(stops)), codec.encode("ab", False)
    assert assembler.feed(ids[:1], None) == "a"
    assert assembler.feed(ids[1:], "stop") == ""
    assert assembler.tokens == len(ids)
