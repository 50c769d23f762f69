"""Which tokens of two vocabularies stand for the same bytes, and a text's tokens in the other one.

The mapping is that of token-level intersection (Timor et al. 2025, arXiv 2502.05202). A wrong translation costs
accepted drafts and changes no token: the target verifies what it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.speculation.common_prefix import common

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's tokens: the bytes of each by its id, empty if it stands for none, and what tokenizes a text.

    `special`: ids that stand for no text; their bytes are their spelling. `begins`: what every text begins with, and
    `end`: the id that ends one, if there is one.
    """

    token_bytes: tuple[bytes, ...]
    encode: Callable[[str], Sequence[int]]
    special: frozenset[int] = frozenset()
    begins: tuple[int, ...] = ()
    end: int | None = None

    def bytes_of(self, token: int) -> bytes:
        """Returns a token's bytes. Models have more ids than tokenizers, to pad their matrices: those have none."""
        return self.token_bytes[token] if token < len(self.token_bytes) else b""


@dataclass(frozen=True, slots=True)
class Translation:
    """From a target's vocabulary to a draft's, and back for the tokens that both have."""

    target: Vocabulary
    draft: Vocabulary
    back: dict[int, int]
    """The target's token for each of the draft's that it has too."""
    spaced: bool
    """Whether the draft's tokenizer puts a space before every text."""

    def drafted(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Returns the draft's tokens as the target's, up to the first that the target does not have."""
        found: list[int] = []
        for token in token_ids:
            if (mine := self.back.get(token)) is None:
                break
            found.append(mine)
        return tuple(found)

    def encoded(self, text: bytes) -> list[int]:
        """Returns the draft's tokens of a piece of a text."""
        said = text.decode("utf-8", "replace")
        return list(self.draft.encode(said[1:] if self.spaced and said.startswith(" ") else said))


def translation(target: Vocabulary, draft: Vocabulary) -> Translation:
    """Pairs the tokens of both vocabularies: those of the same bytes, special with special, and the ends of a text."""
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
    """One sequence of the target in the draft's tokens, which follows it as it grows and is taken back.

    Up to the last place where a word begins, the draft's tokens stay as they are, since tokenizers make no token across
    it; what follows is tokenized again.
    """

    translation: Translation
    known: list[int] = field(default_factory=list)
    stays: list[int] = field(default_factory=list)
    """The draft's tokens up to the last mark."""
    _marks: list[tuple[int, int]] = field(default_factory=list)
    """Lengths of `known` and `stays` that belong together."""

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
        """Returns whether a tokenizer makes no token across this place: a space or a special token follows a word, or
        a line begins."""
        target, before, after = self.translation.target, self.known[at - 1], self.known[at]
        if before in target.special or after in target.special:
            return True
        left, right = target.bytes_of(before), target.bytes_of(after)
        if not left or not right or (right[:1].isspace() and right[:1] != b" "):
            return False
        if right[:1] == b" ":
            return not left[-1:].isspace()
        return left[-1:] == b"\n" and not self.translation.spaced
