"""Structures are compiled and followed in processes that end: at a limit, with their caller, with the server."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import signal
from contextvars import ContextVar

import numpy as np
import pytest

from tandem.engine import structure_process as limits
from tandem.engine.structure_worker import StructureFollower, grammar, vocabulary_of
from tandem.engine.structures import Structures
from tandem.speculation.draws import StructureFailed
from tandem.speculation.processing import Matcher
from tandem.speculation.types import InvalidField, Structure
from tests.hostile_grammars import GRAMMAR, HOSTILE, LATE, PATTERNS, REGEX, SLOW, choice, late
from tests.structure_workers import alive, reaped, workers
from tests.support import run, until
from tests.toy import END, VOCAB_SIZE, ToyTokenizer

llguidance = pytest.importorskip("llguidance")

WORDS = Structure(REGEX, "[a-c]{3}( [a-c]{3})*")
LATE_TEXT = b"z" * 16
OTHER_END = 256
WHO: ContextVar[str] = ContextVar("who", default="")


@pytest.fixture
def structures() -> Structures:
    made = Structures(ToyTokenizer(), VOCAB_SIZE, (END, OTHER_END))
    made.turns.caller = WHO.get
    return made


@pytest.fixture
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile structure is compiled until somebody ends that."""
    monkeypatch.setattr(limits, "COMPILE_SECONDS", 600.0)
    monkeypatch.setattr(limits, "MEMORY_MIB", 16384)


def ours(before: dict[int, int]) -> dict[int, int]:
    return {pid: parent for pid, parent in workers(os.getpid()).items() if pid not in before}


def allowed(matcher: Matcher) -> set[int]:
    return set(np.flatnonzero(matcher.mask()).tolist())


async def refusal(structures: Structures, structure: Structure) -> str:
    with pytest.raises(InvalidField) as caught:
        await structures.matcher(structure)
    assert caught.value.field == "structure"
    return caught.value.fault


# --- limits ---


async def test_a_structure_over_a_limit_is_refused_and_the_limit_is_said(
    structures: Structures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "COMPILE_SECONDS", 0.1)
    why = await refusal(structures, SLOW)
    assert why == "the grammar cannot be enforced: it took more than 0.1 s of processor time to compile"
    monkeypatch.setattr(limits, "MEMORY_MIB", 24)
    monkeypatch.setattr(limits, "COMPILE_SECONDS", 60.0)
    other = Structures(ToyTokenizer(), VOCAB_SIZE)
    why = await refusal(other, PATTERNS)
    assert why.startswith("the json_schema cannot be enforced: it needed more than 24 MiB of memory to compile, or")
    assert structures.outcomes["time"] == 1 and other.outcomes["memory"] == 1
    await other.matcher(WORDS)
    await structures.matcher(WORDS)


@pytest.mark.parametrize("name", ["endless reference", "references in a ring", "ring of rules", "nothing"])
def test_a_structure_that_no_output_can_match_is_refused_before_the_first_token(
    structures: Structures, name: str
) -> None:
    run(refusal(structures, HOSTILE[name]))
    assert structures.outcomes["refused"] == 1


async def test_what_explodes_only_after_some_tokens_ends_that_output_and_no_other(structures: Structures) -> None:
    matcher, other = await structures.matcher(LATE), await structures.matcher(WORDS)
    for letter in LATE_TEXT:
        assert letter in allowed(matcher) and matcher.advance(letter)
    for ask in (matcher.mask, lambda: matcher.allows(97), lambda: matcher.advance(97)):  # it stays so
        with pytest.raises(StructureFailed) as caught:
            ask()
        assert str(caught.value) == (
            "the grammar cannot be enforced: it took more than 0.25 s of processor time to follow one token"
        )
    assert allowed(other) == {97, 98, 99}
    with pytest.raises(InvalidField, match="structure: the grammar cannot be enforced: it took more than"):
        await structures.matcher(LATE, [*LATE_TEXT, 97])
    assert (await structures.matcher(LATE, list(LATE_TEXT[1:]))).advance(122)


# --- JSON ---

NUMBER = {"type": "integer"}
ONE = {"type": "object", "properties": {"a": NUMBER}, "required": ["a"]}
OTHER = {"type": "object", "properties": {"b": NUMBER}, "required": ["b"]}


def matches(schema: object, text: str) -> bool:
    """Whether the schema, as a server enforces it, allows exactly this output."""
    vocabulary = vocabulary_of(ToyTokenizer().spelling(), VOCAB_SIZE, END)
    matcher = llguidance.LLMatcher(vocabulary, grammar("json_schema", json.dumps(schema)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        (ONE, '{"a":1}', '{"a":1,"b":2}'),
        ({"type": "array", "items": ONE}, '[{"a":1}]', '[{"a":1,"b":2}]'),
        ({"properties": {"in": OTHER}}, '{"in":{"b":1}}', '{"in":{"b":1,"c":1}}'),
        ({"type": "object", "additionalProperties": ONE}, '{"any":{"a":1}}', '{"any":{"a":1,"b":2}}'),
        ({"anyOf": [ONE, OTHER]}, '{"b":2}', '{"a":1,"b":2}'),
        ({"$ref": "#/a~1b/c~0", "a/b": {"c~": ONE}}, '{"a":1}', '{"a":1,"b":2}'),
    ],
)
def test_an_object_has_only_the_properties_that_its_schema_names(schema: object, allowed: str, refused: str) -> None:
    assert matches(schema, allowed) and not matches(schema, refused)


@pytest.mark.parametrize(
    "schema",
    [
        ONE | {"additionalProperties": True},
        {"type": "object"},
        {"type": "object", "properties": {"b": NUMBER}, "required": ["a"]},
        {"allOf": [ONE], "properties": {"b": NUMBER}},
        {"$defs": {"base": ONE}, "allOf": [{"$ref": "#/$defs/base"}, OTHER]},
        {"anyOf": [ONE, OTHER], "properties": {"b": NUMBER}},
        {"properties": {"b": NUMBER}, "allOf": [{"anyOf": [{"allOf": [ONE]}]}]},
    ],
)
def test_an_object_stays_open_if_it_says_so_or_if_several_schemas_describe_it(schema: object) -> None:
    assert matches(schema, '{"a":1,"b":2}') or matches(schema, '{"b":2,"a":1}')


# --- following ---


async def test_a_matcher_begins_after_an_output_and_refuses_one_that_does_not_match(structures: Structures) -> None:
    matcher = await structures.matcher(WORDS, list(b"abc a"))
    assert allowed(matcher) == {97, 98, 99}
    matcher.back(1)
    assert allowed(matcher) == {97, 98, 99} and matcher.advance(98)
    matcher.back(2)
    assert allowed(matcher) == {32, END, OTHER_END}
    for wrong in (b"abc abd", b"x"):
        with pytest.raises(InvalidField, match="prefix: the output in it does not match the structure"):
            await structures.matcher(WORDS, list(wrong))
    long = b"abc " * 20_000 + b"a"  # more than one message has
    matcher, pid = await followed(structures, WORDS, long)
    assert allowed(matcher) == {97, 98, 99}
    os.kill(pid, signal.SIGKILL)
    assert matcher.advance(99) and allowed(matcher) == {97, 98, 99}


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_is_asked_in_whatever_order_the_answers_are_those_of_a_matcher_here(
    structures: Structures, seed: int
) -> None:
    """It looks ahead, sends changes late, and begins again if it is killed: none of that shows."""
    chance = random.Random(seed)
    structure = chance.choice([WORDS, choice("ab", "abc", "b"), Structure(GRAMMAR, 'start: ("x" | "(" start ")")+')])
    remote, pid = await followed(structures, structure)
    vocabulary = vocabulary_of(ToyTokenizer().spelling(), VOCAB_SIZE, END)
    local = StructureFollower(
        llguidance.LLMatcher(vocabulary, grammar(structure.kind.value, structure.text), log_level=0),
        VOCAB_SIZE,
        (END, OTHER_END),
    )
    length = 0
    for asked in range(300):
        may = np.flatnonzero(np.unpackbits(np.frombuffer(local.mask(), np.uint8), bitorder="little")).tolist()
        token = chance.choice(may) if chance.random() < 0.8 else chance.randrange(VOCAB_SIZE + 9)
        what = chance.randrange(5)
        if what == 0:
            assert np.flatnonzero(remote.mask()).tolist() == may
        elif what == 1:
            assert remote.allows(token) == (token in may)
        elif what == 2 and length:
            count = chance.randrange(1, min(length, 6) + 1)
            remote.back(count)
            local.back(count)
            length -= count
        elif token < VOCAB_SIZE:
            if chance.random() < 0.5:
                remote.allows(token)
            taken = local.advance(token)
            assert remote.advance(token) == taken
            length += taken
        if asked == 150:
            os.kill(pid, signal.SIGKILL)
    assert (
        np.flatnonzero(remote.mask()).tolist()
        == np.flatnonzero(np.unpackbits(np.frombuffer(local.mask(), np.uint8), bitorder="little")).tolist()
    )


async def test_that_it_would_fail_ahead_does_not_count_where_the_output_does_not_go(structures: Structures) -> None:
    """A mask is asked for before it is wanted; plain decoding may never want it."""
    matcher = await structures.matcher(late(3))
    assert matcher.advance(122) and matcher.advance(122) and matcher.allows(122)  # and the next mask is too much
    assert matcher.allows(END) and matcher.advance(END) and allowed(matcher) == {END, OTHER_END}
    matcher.back(1)
    assert matcher.advance(122)
    with pytest.raises(StructureFailed):
        matcher.mask()


# --- processes ---


async def followed(structures: Structures, structure: Structure, output: bytes = b"") -> tuple[Matcher, int]:
    """A matcher and the id of its process, of a structure that is compiled."""
    await structures.check(structure)
    before = workers(os.getpid())
    matcher = await structures.matcher(structure, list(output))
    matcher.mask()  # by now it is there
    (pid,) = ours(before)
    return matcher, pid


async def test_processes_that_are_killed_from_outside_are_replaced_and_outputs_go_on(structures: Structures) -> None:
    before = workers(os.getpid())
    matcher, follower = await followed(structures, WORDS, b"ab")
    tree = ours(before)
    compiled = tree[follower]
    first = tree[compiled]
    assert set(tree) == {follower, compiled, first} and tree[first] == os.getpid()
    os.kill(follower, signal.SIGKILL)
    assert allowed(matcher) == {97, 98, 99} and matcher.advance(97) and matcher.advance(32)
    os.kill(compiled, signal.SIGKILL)
    await until(lambda: reaped(compiled))
    assert allowed(matcher) == {97, 98, 99}, "it needs neither of those that it came from"
    again = await structures.matcher(WORDS)
    assert allowed(again) == {97, 98, 99} and structures.outcomes["compiled"] == 2
    os.kill(first, signal.SIGKILL)
    await until(lambda: not alive(first))
    assert allowed(matcher) == {97, 98, 99} and allowed(again) == {97, 98, 99}
    assert (await structures.matcher(choice("yes"))).allows(ord("y"))
    assert allowed(await structures.matcher(WORDS)) == {97, 98, 99}


async def test_they_end_with_what_they_are_for() -> None:
    before = workers(os.getpid())
    structures = Structures(ToyTokenizer(), VOCAB_SIZE)
    matcher, follower = await followed(structures, WORDS)
    other, _ = await followed(structures, WORDS)
    assert len(ours(before)) == 4
    del matcher
    gc.collect()
    await until(lambda: not alive(follower))
    assert len(ours(before)) == 3
    left = ours(before)
    del structures
    gc.collect()
    assert allowed(other) == {97, 98, 99}
    del other
    gc.collect()
    await until(lambda: not any(map(alive, left)))


@pytest.mark.usefixtures("unlimited")
async def test_one_that_ends_early_while_it_compiles_is_tried_again_once(structures: Structures) -> None:
    await structures.check(WORDS)
    before, killed = workers(os.getpid()), set[int]()
    compiling = asyncio.create_task(refusal(structures, PATTERNS))
    while len(killed) < 2:
        await asyncio.sleep(0.01)
        for pid in ours(before).keys() - killed:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    assert "MiB of memory to compile, or is nested too deeply" in await compiling
    assert structures.outcomes["memory"] == 1
    await structures.check(choice("yes"))


async def test_one_that_hangs_is_given_up(structures: Structures, monkeypatch: pytest.MonkeyPatch) -> None:
    await structures.check(WORDS)
    monkeypatch.setattr(limits, "HUNG_SECONDS", 1.0)
    before, stopped = workers(os.getpid()), set[int]()
    compiling = asyncio.create_task(refusal(structures, PATTERNS))
    while not compiling.done():
        for pid, parent in ours(before).items():
            if parent != os.getpid() and pid not in stopped:  # one that compiles
                os.kill(pid, signal.SIGSTOP)
                stopped.add(pid)
        await asyncio.sleep(0.001)
    for pid in stopped:
        os.kill(pid, signal.SIGKILL)
    assert await compiling


@pytest.mark.usefixtures("unlimited")
async def test_a_compilation_ends_when_the_last_that_waits_for_it_leaves(structures: Structures) -> None:
    await structures.check(WORDS)
    before = workers(os.getpid())
    asking = [asyncio.create_task(structures.matcher(PATTERNS)) for _ in range(2)]
    await until(lambda: bool(ours(before)))
    (pid,) = ours(before)  # one for both
    asking[0].cancel()
    await asyncio.sleep(0.2)
    assert set(ours(before)) == {pid}
    asking[1].cancel()
    await until(lambda: not alive(pid))
    assert structures.outcomes["cancelled"] == 1 and not structures.compiling
    await structures.check(choice("yes"))


@pytest.mark.usefixtures("unlimited")
async def test_callers_take_turns_and_compile_two_structures_at_a_time(structures: Structures) -> None:
    await structures.check(WORDS)
    before = workers(os.getpid())
    WHO.set("alice")
    endless = [structures.matcher(Structure(PATTERNS.kind, PATTERNS.text + " " * i)) for i in range(99)]
    asking = [asyncio.create_task(each) for each in endless]
    await until(lambda: bool(ours(before)))
    WHO.set("bob")
    for i in range(5):
        await structures.check(choice(f"{i} times {'x' * 9999}", "y" * 9999))
    assert len(ours(before)) == 1 + 5, "one that does not end, and those that are kept"
    for each in asking:
        each.cancel()
    await asyncio.wait(asking)
    assert not any(structures.turns._waiting.values())


async def test_compiled_structures_are_kept_within_a_count_and_a_size(
    structures: Structures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.engine.structures.KEPT", 3)
    await structures.check(WORDS)
    kept = len(workers(os.getpid()))
    for i in range(6):
        await structures.check(choice(f"{i}"))
        await structures.check(WORDS)  # used last each time
    assert structures.outcomes["compiled"] == 7
    await until(lambda: len(workers(os.getpid())) == kept + 2)
    size = structures.kept[WORDS][1]
    assert 0 < size < 2**25
    monkeypatch.setattr("tandem.engine.structures.KEPT_BYTES", 1)
    await structures.check(choice("last"))
    await until(lambda: len(workers(os.getpid())) == kept)
    assert list(structures.kept) == [choice("last")]


async def test_without_llguidance_or_spelling_or_an_end_it_is_said_what_lacks() -> None:
    class Broken(ToyTokenizer):
        def spelling(self) -> str:  # type: ignore[override]
            return "no tokenizer"

    assert "does not know how its tokens are spelled" in await refusal(Structures(object(), 9, (1,)), WORDS)
    tokenizer = ToyTokenizer()
    tokenizer.end_of_sequence_ids = ()
    assert "no end-of-sequence token" in await refusal(Structures(tokenizer, VOCAB_SIZE), WORDS)
    broken = Structures(Broken(), VOCAB_SIZE)
    assert (await refusal(broken, WORDS)).startswith("not available: ")
