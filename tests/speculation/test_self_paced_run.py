"""A run decides what it verifies next: drafts that fit, copies, or nothing; and where it pauses."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.speculation.estimate import Estimate
from tandem.speculation.lookup_policy import PolicedLookup
from tandem.speculation.run_on import DRAFTING, RunMessage, SelfPacedRun


def hearing(base: int, last: int, *tokens: int, until: int = 100, most: int = 10) -> RunMessage:
    return RunMessage(base, last, tokens, until, most)


def run_after(*tokens: int) -> SelfPacedRun:
    run = SelfPacedRun(tokens)
    run.receive(hearing(1, tokens[0]))
    return run


def test_a_draft_that_comes_late_is_used_from_where_the_committed_tokens_end() -> None:
    run = run_after(5, 6, 7)
    run.receive(hearing(1, 5, 6, 7, 8, 9))
    assert run.next_draft() == (8, 9)
    run.receive(hearing(1, 5, 6, 9, 9))  # contradicted meanwhile
    assert run.next_draft() == (8, 9)


TOKENS = st.lists(st.integers(0, 2), max_size=6)
MESSAGES = st.tuples(st.integers(0, 9), TOKENS)


@given(st.lists(st.one_of(MESSAGES, st.lists(st.integers(0, 2), min_size=1, max_size=3)), max_size=12))
@settings(max_examples=100, deadline=None)
def test_whatever_is_sent_only_what_was_drafted_after_exactly_the_committed_tokens_is_ever_returned(
    moves: list,
) -> None:
    run, committed, sent = run_after(1), [1], []
    for move in moves:
        if isinstance(move, list):
            committed += move
            run.follow(move)
        else:
            base, tokens = move
            last = committed[base - 1] if 1 <= base <= len(committed) else 0
            run.receive(hearing(base, last, *tokens, until=1000))
            if 1 <= base <= len(committed):
                sent.append([*committed[:base], *tokens])
        text = [*committed, *(run.next_draft() or ())]
        assert text == committed or text in [path[: len(text)] for path in sent]


def test_a_run_steps_plainly_without_a_draft_and_verifies_no_more_than_it_may() -> None:
    run = SelfPacedRun([1, 2])
    assert run.next_draft() is None  # nothing was asked for
    run.receive(hearing(2, 2))
    assert run.next_draft() == ()
    run.receive(hearing(2, 2, 3, 4, 5, 6, most=3))
    assert run.next_draft() == (3, 4, 5)
    run.receive(hearing(2, 2, until=5))
    assert run.next_draft() == (3, 4)  # a step adds a token of its own
    run.follow([3, 4, 9])
    assert run.next_draft() is None


def test_a_client_that_acknowledges_nothing_stops_the_run_and_an_acknowledgement_lets_it_go_on() -> None:
    run = SelfPacedRun([1], max_unread=4)
    run.receive(hearing(1, 1))
    for token in (2, 3, 4, 5):
        assert run.next_draft() == ()
        run.follow([token])
    assert run.next_draft() is None
    run.receive(hearing(3, 7))  # of another text: no acknowledgement
    assert run.next_draft() is None
    run.receive(hearing(3, 3, 4, 5, 6, 7, 8))
    assert run.next_draft() == (6,)
    run.receive(hearing(2, 2))  # a late message takes nothing back
    assert run.next_draft() == (6,)


def test_a_stop_token_ends_a_run_wherever_in_a_step_it_was_committed() -> None:
    run = SelfPacedRun([1], stops={9})
    run.receive(hearing(1, 1, 8, 9, 7))
    assert run.next_draft() == (8, 9, 7)
    run.follow([8, 9, 7, 6])
    run.receive(hearing(5, 6))
    assert (run.next_draft(), run.stopped) == (None, True)


def test_a_step_for_which_no_draft_has_arrived_verifies_a_copy_from_the_text_if_the_client_allows_any() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9] * 3
    lookup = PolicedLookup(Estimate())
    asyncio.run(lookup.open(text))
    run = SelfPacedRun(text, lookup=lookup)
    run.receive(hearing(27, 9))
    assert (run.next_draft(), run.copied) == ((), False)
    run.receive(replace(hearing(27, 9), most_copies=3))
    assert (run.next_draft(), run.copied) == ((1, 2, 3), True)
    run.receive(replace(hearing(27, 9, 1, 7), most_copies=3))
    assert (run.next_draft(), run.copied) == ((1, 7), False), "a draft that fits comes first"
    run.follow([1, 2])
    assert (run.next_draft(), run.copied) == ((3, 4, 5), True)
    run.receive(replace(hearing(29, 2, until=31), most_copies=3))
    assert run.next_draft() == (3,), "a step adds a token of its own"


def test_a_run_counts_as_fed_while_its_client_drafts() -> None:
    run, seen = SelfPacedRun([1]), list[bool]()
    for token in range(2, 60):
        draft = {2: (2, 3), 30: (90, 91, 92), 50: (50,)}.get(token, ())
        run.receive(hearing(token - 1, token - 1, *draft, most=0 if token == 50 else 10))
        run.next_draft()
        seen.append(run.client_is_drafting)
        run.follow([token])
    assert seen == [token < 2 + DRAFTING or 30 <= token < 30 + DRAFTING for token in range(2, 60)]
