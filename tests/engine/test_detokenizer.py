"""Text as tokens come: every piece is whole characters, and all pieces are the whole text."""

import pytest
from byte_tokenizer import SPECIAL_ID, byte_fallback, byte_level, letter_id

from paged.engine.detokenizer import Detokenizer

TEXTS = [
    "plain words",
    "für 3 € 😀👩‍👩‍👧 ende",
    "日本語のテキスト " * 20,
    "a\ufffdb\ufffd",
    "😀" * 60,
    "",
    " x  y ",
]


def tokens_of(make, text):
    if make is byte_level:
        return list(text.encode())
    token_ids = []
    for letter in text:
        token_ids += [letter_id(letter)] if " " <= letter < "\x7f" else letter.encode()
    return token_ids


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_pieces_are_whole_characters_and_make_up_the_text(make, text):
    tokenizer, token_ids = make(), tokens_of(make, text)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add(token) for token in token_ids]
    pieces.append(detokenizer.finish())
    expected = text.removeprefix(" ") if make is byte_fallback else text
    assert "".join(pieces) == expected == tokenizer.decode(token_ids)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_a_character_comes_with_its_last_byte(make):
    detokenizer = Detokenizer(make())
    assert [detokenizer.add(byte) for byte in "€😀".encode()] == ["", "", "€", "", "", "", "😀"]
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_what_never_becomes_a_character_comes_at_the_end(make):
    detokenizer = Detokenizer(make())
    pieces = [detokenizer.add(token) for token in [*tokens_of(make, "a"), 0xE2, 0x82]]
    assert pieces == ["a", "", ""]
    assert set(detokenizer.finish()) == {"\ufffd"}
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_bytes_that_are_no_text_do_not_hold_back_what_follows(make):
    detokenizer = Detokenizer(make())
    pieces = [detokenizer.add(token) for token in [0xFF] * 100 + tokens_of(make, "ok")]
    assert "".join(pieces) == "\ufffd" * 100 + "ok"
    assert max(map(len, pieces)) <= 4


def test_special_tokens_are_left_out():
    detokenizer = Detokenizer(byte_level())
    assert [detokenizer.add(token) for token in (65, SPECIAL_ID, 66)] == ["A", "", "B"]
