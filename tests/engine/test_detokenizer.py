"""Text as tokens come: every piece is whole characters, and all pieces are the whole text."""

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from paged.engine.detokenizer import Detokenizer

SPECIAL = "<end>"
TEXTS = [
    "plain words",
    "für 3 € 😀👩‍👩‍👧 ende",
    "日本語のテキスト " * 20,
    "a\ufffdb\ufffd",
    "😀" * 60,
    "",
    " x  y ",
]


def bytes_to_letters():
    """How byte-level tokenizers write each byte: printable ones as themselves, others from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {
        byte: chr(256 + place) for place, byte in enumerate(others)
    }


def byte_level():
    """A token per byte."""
    letters = bytes_to_letters()
    tokenizer = Tokenizer(models.BPE({letters[byte]: byte for byte in range(256)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return with_special(tokenizer), lambda text: list(text.encode())


def byte_fallback():
    """A token per letter of ASCII with a mark for spaces, and one per byte for all else."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {"▁" if byte == 32 else chr(byte): 256 + byte for byte in range(32, 127)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )

    def tokens(text):
        token_ids = []
        for letter in text:
            plain = " " <= letter < "\x7f"
            token_ids += [256 + ord(letter)] if plain else letter.encode()
        return token_ids

    return with_special(tokenizer), tokens


def with_special(tokenizer):
    tokenizer.add_special_tokens([SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_pieces_are_whole_characters_and_make_up_the_text(make, text):
    tokenizer, tokens_of = make()
    token_ids = tokens_of(text)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add(token) for token in token_ids]
    pieces.append(detokenizer.finish())
    expected = text.removeprefix(" ") if make is byte_fallback else text
    assert "".join(pieces) == expected == tokenizer.decode(token_ids)
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd")


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_a_character_comes_with_its_last_byte(make):
    tokenizer, _ = make()
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.add(byte) for byte in "€😀".encode()] == ["", "", "€", "", "", "", "😀"]
    assert detokenizer.finish() == ""


def test_what_never_becomes_a_character_comes_at_the_end():
    tokenizer, _ = byte_level()
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.add(byte) for byte in b"a\xe2\x82"] == ["a", "", ""]
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_bytes_that_are_no_text_do_not_hold_back_what_follows():
    tokenizer, _ = byte_level()
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add(byte) for byte in b"\xff" * 100 + b"ok"]
    assert "".join(pieces) == "\ufffd" * 100 + "ok"
    assert max(map(len, pieces)) <= 4


def test_special_tokens_are_left_out():
    tokenizer, _ = byte_level()
    detokenizer = Detokenizer(tokenizer)
    special = tokenizer.convert_tokens_to_ids(SPECIAL)
    assert [detokenizer.add(token) for token in (65, special, 66)] == ["A", "", "B"]
