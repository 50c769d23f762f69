"""Agreement: commits the target's own seeded draws up to the first that differs from the draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.speculation.draws import Drawn
from tandem.speculation.types import Verdict


def agree(draft: Sequence[int], target_draw: Callable[[int], Drawn], margins: bool = False) -> Verdict:
    """Commits draws i = 0, 1, ... of the target after draft[:i] while they equal draft[i], then one more."""
    drawn: list[Drawn] = []
    for i in range(len(draft) + 1):
        drawn.append(target_draw(i))
        if i == len(draft) or drawn[i].token != draft[i]:
            break
    return Verdict(
        token_ids=tuple(d.token for d in drawn),
        accepted=len(drawn) - 1,
        margins=tuple(d.margin for d in drawn) if margins else (),
    )


def known_prefix(draft: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Returns the draft before its first token outside the target's vocabulary."""
    cut = next((i for i, token in enumerate(draft) if token >= vocab_size), len(draft))
    return tuple(draft[:cut])
