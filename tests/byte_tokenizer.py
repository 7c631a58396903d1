"""Tokenizers of transformers with a token per byte, made on the spot."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = "<end>"
SPECIAL_ID = 256


def byte_level():
    """Token i is byte i; `SPECIAL` comes after them and ends a text."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]  # written as themselves
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain}
    letters |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE({letters[byte]: byte for byte in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _wrapped(tokenizer)


def byte_fallback():
    """Bytes as in `byte_level`; the printable letters of ASCII are tokens of their own after them."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {SPECIAL: SPECIAL_ID}
    vocab |= {"▁" if byte == 32 else chr(byte): letter_id(chr(byte)) for byte in range(32, 127)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _wrapped(tokenizer)


def letter_id(letter):
    """The token of a printable letter of ASCII in `byte_fallback`."""
    return SPECIAL_ID + 1 + ord(letter)


def _wrapped(tokenizer):
    tokenizer.add_special_tokens([SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL)
