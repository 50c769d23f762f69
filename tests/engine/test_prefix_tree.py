"""The tree of pages as a state machine against a plain model: what it finds, what it takes first, what it never loses.

The model is a dictionary of whole prefixes, and looks at all of them whenever it needs one.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tandem.engine.prefix_cache import PrefixTree
from tandem.runners.capabilities import PAGE

COUNT = 5
SCOPES = st.sampled_from(["alice", "bob"])
LETTERS = st.lists(st.sampled_from("abc"), max_size=6).map(tuple)
TAILS = st.integers(0, PAGE - 1)


def text(letters: tuple[str, ...], tail: int = 0) -> list[int]:
    """A page of each letter, and some tokens of another."""
    return [ord(letter) for letter in letters for _ in range(PAGE)] + [0] * tail


class Pages(RuleBasedStateMachine):
    """Callers of two scopes look up, keep and forget texts made of three different pages."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree(COUNT)
        self.model: dict[tuple[str, tuple[str, ...]], int] = {}  # the page of a prefix
        self.used: dict[tuple[str, tuple[str, ...]], int] = {}
        self.now = 0

    def known(self, scope: str, letters: tuple[str, ...]) -> int:
        """How many pages of the text are known; they count as used now."""
        self.now += 1
        count = 0
        while count < len(letters) and (scope, letters[: count + 1]) in self.model:
            count += 1
            self.used[scope, letters[:count]] = self.now
        return count

    def oldest(self, scope: str, letters: tuple[str, ...]) -> tuple[str, tuple[str, ...]] | None:
        """The longest unused of the prefixes that no other goes on, and that are none of this text's."""
        ends = [
            (whose, prefix)
            for whose, prefix in self.model
            if not any(whose == other and more[: len(prefix)] == prefix != more for other, more in self.model)
            and not (whose == scope and letters[: len(prefix)] == prefix)
        ]
        return min(ends, key=lambda each: self.used[each], default=None)

    @rule(scope=SCOPES, letters=LETTERS, tail=TAILS)
    def looks_up(self, scope: str, letters: tuple[str, ...], tail: int) -> None:
        count = self.known(scope, letters)
        found = self.tree.match(scope, text(letters, tail))
        assert found == [self.model[scope, letters[: i + 1]] for i in range(count)]

    @rule(scope=SCOPES, letters=LETTERS, tail=TAILS)
    def keeps(self, scope: str, letters: tuple[str, ...], tail: int) -> None:
        count = self.known(scope, letters)
        known, added = self.tree.extend(scope, text(letters, tail))
        assert known == count
        for length, page in zip(range(count + 1, len(letters) + 1), added, strict=False):
            if len(self.model) == COUNT:
                del self.model[self.oldest(scope, letters)]
            assert page not in self.model.values(), "a page is one prefix's"
            self.model[scope, letters[:length]] = page
            self.used[scope, letters[:length]] = self.now
        if count + len(added) < len(letters):
            assert len(self.model) == COUNT and self.oldest(scope, letters) is None, "only its own pages were left"

    @rule(scope=SCOPES, letters=LETTERS)
    def forgets(self, scope: str, letters: tuple[str, ...]) -> None:
        self.tree.remove(scope, text(letters))
        self.model = {at: page for at, page in self.model.items() if at[0] != scope or at[1][:1] != letters[:1]}

    @invariant()
    def holds_as_many_pages_as_the_model(self) -> None:
        assert len(self.tree) == len(self.model) <= COUNT


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
