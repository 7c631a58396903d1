"""Text from tokens as they come, never half a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

_WINDOW = 16  # tokens after which earlier ones no longer matter to how the next are written
_UNFINISHED = "\ufffd"  # how a tokenizer shows bytes that are no character, or none yet
_MOST_UNFINISHED = 3  # bytes of a character of four that can be there without the last


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer; those of transformers have it."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], **options: Any) -> str: ...


class Detokenizer:
    """The text of one sequence's generated tokens, special ones left out.

    A token's text depends on the tokens before it, so the last ones are decoded again with each
    new one, and what has been added is the news.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._boundary = 0  # tokens of the window up to the end of a character
        self._given = ""  # what is known of the window's text

    def add(self, token: int) -> str:
        """The text that is certain with this token: the end of a character may be yet to come."""
        self._window.append(token)
        text = self._decode()
        num_unfinished = len(text) - len(text.rstrip(_UNFINISHED))
        if num_unfinished:
            text = text[: len(text) - min(num_unfinished, _MOST_UNFINISHED)]
            # Tokenizers of another kind show all bytes before an unfinished character as unknown.
            return self._give(text) if text.startswith(self._given) else ""
        new = self._give(text)
        if len(self._window) - self._boundary >= _WINDOW:
            del self._window[: self._boundary]
            self._boundary = len(self._window)
            self._given = self._decode()
        return new

    def finish(self) -> str:
        """What was held back."""
        return self._give(self._decode())

    def _give(self, text: str) -> str:
        new = text[len(self._given) :]
        self._given = text
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(
            self._window, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
