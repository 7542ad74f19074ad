"""An answer's text does not depend on how its tokens are split: detokeniser and stop strings against simple references."""

from __future__ import annotations

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from engine.text.detokenizer import REPLACEMENT, Detokenizer, StopStrings
from tests.support.served_model import make_tokenizer

TEXTS = st.text(st.characters(codec="utf-8"), max_size=60)


@cache
def tokenizer() -> Tokenizer:
    return make_tokenizer()


def make_detokenizer() -> Detokenizer:
    return Detokenizer(lambda ids: str(tokenizer().decode(ids)))


def draw_slices(data: st.DataObject, length: int) -> list[slice]:
    """Draw slices that cover `length` items in order."""
    bounds = sorted(data.draw(st.lists(st.integers(0, length), max_size=10)))
    return [slice(begin, end) for begin, end in zip([0, *bounds], [*bounds, length], strict=True)]


@given(text=TEXTS, data=st.data())
@settings(deadline=None)
def test_pieces_add_up_to_the_text_without_broken_characters(text: str, data: st.DataObject) -> None:
    text = text.replace(REPLACEMENT, "")
    ids = tokenizer().encode(text, add_special_tokens=False).ids
    decoder = make_detokenizer()
    pieces = [decoder.push(ids[part]) for part in draw_slices(data, len(ids))]

    assert all(REPLACEMENT not in piece for piece in pieces)
    assert "".join(pieces) + decoder.flush() == text


@given(ids=st.lists(st.one_of(st.sampled_from([0, 1, 2, 3]), st.integers(0, 300)), max_size=80))
@settings(deadline=None)
def test_texts_of_single_tokens_give_the_same_pieces_as_decoding_tokens_in_their_context(ids: list[int]) -> None:
    in_context = make_detokenizer()
    by_token = Detokenizer(lambda ids: str(tokenizer().decode(ids)), lambda token_id: str(tokenizer().decode([token_id])))

    assert [by_token.push([token_id]) for token_id in ids] == [in_context.push([token_id]) for token_id in ids]
    assert by_token.flush() == in_context.flush()


@given(text=st.text(st.sampled_from("aé語🦜"), max_size=30), data=st.data())
@settings(deadline=None)
def test_characters_of_several_byte_tokens_are_emitted_whole(text: str, data: st.DataObject) -> None:
    byte_tokenizer = Tokenizer(
        models.BPE(vocab={f"<0x{byte:02X}>": byte for byte in range(256)}, merges=[], byte_fallback=True)
    )
    byte_tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    decoder = Detokenizer(lambda ids: str(byte_tokenizer.decode(ids)))
    ids = list(text.encode())
    pieces = [decoder.push(ids[part]) for part in draw_slices(data, len(ids))]

    assert "".join(pieces) + decoder.flush() == text


@given(ids=st.lists(st.integers(4, 300), max_size=60), data=st.data())
@settings(deadline=None)
def test_arbitrary_token_ids_decode_like_the_whole_sequence(ids: list[int], data: st.DataObject) -> None:
    known = [token_id for token_id in ids if tokenizer().id_to_token(token_id) is not None]
    decoder = make_detokenizer()
    text = "".join(decoder.push(known[part]) for part in draw_slices(data, len(known))) + decoder.flush()
    whole = str(tokenizer().decode(known))

    assert text.replace(REPLACEMENT, "") == whole.replace(REPLACEMENT, "")


@given(
    text=st.text("ab.", max_size=40),
    stops=st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3),
    data=st.data(),
)
@settings(deadline=None)
def test_stop_strings_match_like_a_search_of_the_whole_text(text: str, stops: list[str], data: st.DataObject) -> None:
    matcher = StopStrings(stops)
    emitted = "".join(matcher.push(text[part]) for part in draw_slices(data, len(text)))
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]

    if not ends:
        assert matcher.matched is None
        assert emitted + matcher.flush() == text
        return
    end = min(ends)
    longest = max((stop for stop in stops if text[:end].endswith(stop)), key=len)
    assert matcher.matched == longest
    assert emitted == text[: end - len(longest)]
