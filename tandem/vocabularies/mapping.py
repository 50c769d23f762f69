"""Maps tokens of equal bytes between two vocabularies (token-level intersection: Timor et al. 2025, arXiv 2502.05202).

A wrong translation costs accepted drafts, never the output: the target verifies every draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.speculation.common_prefix import common

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's tokens: `token_bytes` by id, empty for ids without text.

    `special`: ids without text, whose bytes are their spelling. `begins`: ids before every text. `end`: the end token.
    """

    token_bytes: tuple[bytes, ...]
    encode: Callable[[str], Sequence[int]]
    special: frozenset[int] = frozenset()
    begins: tuple[int, ...] = ()
    end: int | None = None

    def bytes_of(self, token: int) -> bytes:
        """A token's bytes; empty for padding ids beyond the tokenizer's."""
        return self.token_bytes[token] if token < len(self.token_bytes) else b""


@dataclass(frozen=True, slots=True)
class Translation:
    """A target's vocabulary to a draft's, and back for tokens in both."""

    target: Vocabulary
    draft: Vocabulary
    back: dict[int, int]
    """Draft id to target id."""
    spaced: bool
    """Whether the draft's tokenizer prefixes every text with a space."""

    def drafted(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The draft's tokens as the target's, up to the first without a counterpart."""
        found: list[int] = []
        for token in token_ids:
            if (mine := self.back.get(token)) is None:
                break
            found.append(mine)
        return tuple(found)

    def encoded(self, text: bytes) -> list[int]:
        """The draft's tokens of a text's piece."""
        said = text.decode("utf-8", "replace")
        return list(self.draft.encode(said[1:] if self.spaced and said.startswith(" ") else said))


def translation(target: Vocabulary, draft: Vocabulary) -> Translation:
    """Pairs tokens of equal bytes, special with special, and the end tokens."""
    # Where a vocabulary spells a byte twice, as a byte and as a piece, texts have the piece, which is the later one.
    mine = {(text, token in target.special): token for token, text in enumerate(target.token_bytes) if text}
    back = {
        token: mine[key]
        for token, text in enumerate(draft.token_bytes)
        if (key := (text, token in draft.special)) in mine
    }
    if target.end is not None and draft.end is not None:
        back[draft.end] = target.end
    spaced = b"".join(map(draft.bytes_of, draft.encode("a"))) == b" a"
    return Translation(target, draft, back, spaced)


@dataclass(slots=True)
class Prefix:
    """One target sequence in the draft's tokens, updated as it grows or is cut.

    Tokens before the last word boundary are final: tokenizers never cross it. The rest is tokenized again.
    """

    translation: Translation
    known: list[int] = field(default_factory=list)
    stays: list[int] = field(default_factory=list)
    """The draft's tokens up to the last mark."""
    _marks: list[tuple[int, int]] = field(default_factory=list)
    """Matching lengths of `known` and `stays`."""

    def __post_init__(self) -> None:
        self.stays += self.translation.draft.begins

    def follow(self, tokens: Sequence[int]) -> list[int] | None:
        """Returns the draft's tokens for the target's; None while they end inside a character."""
        same = common(self.known, tokens if isinstance(tokens, list) else list(tokens))
        while self._marks and self._marks[-1][0] > same:
            self._marks.pop()
        begins = self.translation.target.begins
        first = len(begins) if begins and tuple(tokens[: len(begins)]) == begins else 0
        until, held = self._marks[-1] if self._marks else (first, len(self.translation.draft.begins))
        del self.stays[held:]
        self.known[same:] = tokens[same:]
        mark = next((at for at in range(len(tokens) - 1, until, -1) if self._begins_word(at)), until)
        if mark > until:
            self.stays += self.translation.encoded(self._text(until, mark))
            self._marks.append((mark, len(self.stays)))
        rest = self._text(mark, len(tokens))
        if rest.decode("utf-8", "replace").endswith(_INCOMPLETE):
            return None
        return [*self.stays, *self.translation.encoded(rest)]

    def _text(self, start: int, end: int) -> bytes:
        return b"".join(map(self.translation.target.bytes_of, self.known[start:end]))

    def _begins_word(self, at: int) -> bool:
        """Whether a word boundary is here: a space or special token after a word, or a line start."""
        target, before, after = self.translation.target, self.known[at - 1], self.known[at]
        if before in target.special or after in target.special:
            return True
        left, right = target.bytes_of(before), target.bytes_of(after)
        if not left or not right or (right[:1].isspace() and right[:1] != b" "):
            return False
        if right[:1] == b" ":
            return not left[-1:].isspace()
        return left[-1:] == b"\n" and not self.translation.spaced
