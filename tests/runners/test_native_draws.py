"""The library draws the tokens that tandem/speculation/draws.py draws: alone, in verifications, drafts and rounds."""

from __future__ import annotations

import ctypes
import itertools
import platform
import random
import subprocess
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_float
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.runners.native import compilation
from tandem.runners.native.compilation import LEVELS
from tandem.runners.native.library import OutOfBounds, RowBatch, Sampling, ints, load_library, pointer, zeros
from tandem.runners.native.native_runner import NativeRunner
from tandem.runners.native.steps import Threads
from tandem.runners.protocol import VerifyRow
from tandem.runners.protocol import verify_row as verify_here
from tandem.speculation.draws import BadLogits, draw
from tandem.speculation.elementary import exp, log, total
from tandem.speculation.types import Rule, SamplingParams, Verdict
from tests.daily import daily
from tests.rows import fill, propose_row, verify_row
from tests.runners.test_native import GREEDY, SLOTS, VOCAB, module_of, native, sequence

PROGRAM = Path(__file__).parent / "elementary_bits.cpp"
PARAMS = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=0.7, top_k=50),
    SamplingParams(temperature=1.3, top_k=40, top_p=0.95, min_p=0.02),
)


@pytest.fixture(scope="module")
def pools() -> list[Threads]:
    library = load_library(compilation.library_path())
    return [Threads(library, threads) for threads in (1, 2, 3)]


def drawn(pool: Threads, logits: np.ndarray, by: SamplingParams, position: int, only: Sequence[int] = ()) -> int:
    """A token that the library draws; `only`: the ids of the logits, then the number of all ids."""
    tokens = only[-1] if only else len(logits)
    sampling = Sampling(by.temperature, by.top_p, by.min_p, by.seed, position, min(by.top_k, 2**31 - 1), tokens)
    values, token = np.ascontiguousarray(logits), zeros(1)
    outputs = ints(only[:-1]) if only else None
    pool.library.tandem_draw(pool.handle, pointer(values, c_float), len(values), outputs, ctypes.byref(sampling), token)
    return token[0]


def expected(logits: np.ndarray, by: SamplingParams, position: int) -> int:
    try:
        return draw(logits, by, position)
    except BadLogits:
        return -1


def made_up(chance: np.random.Generator, vocabulary: int) -> np.ndarray:
    """Logits as flat or peaked as any, with ties, and with tokens that cannot be drawn."""
    logits = chance.normal(0, chance.choice([0.0, 1e-3, 1.0, 3.0, 8.0, 1e4]), vocabulary)
    if grain := chance.choice([0.0, 0.125, 1.0]):
        logits = np.round(logits / grain) * grain
    logits += chance.choice([0.0, 20.0, -1e3])
    if chance.random() < 0.3:
        logits[chance.random(vocabulary) < chance.choice([0.1, 0.9, 0.999])] = -np.inf
    if chance.random() < 0.2:  # logits that differ, but whose distances from the largest do not
        logits[chance.integers(0, vocabulary, 1 + vocabulary // 4)] = 10.0 ** -chance.integers(20, 38)
    return logits.astype(np.float32)


def any_params(chance: np.random.Generator) -> SamplingParams:
    return SamplingParams(
        float(chance.choice([5e-324, 1e-310, 1e-6, 0.1, 0.7, 1.0, 2.5, 50.0, 1e30, 1e300, 1.7e308])),
        int(chance.choice([0, 0, 1, 2, 50, 64, 700, 10**12])),
        float(chance.choice([1.0, 1.0, 1e-9, 0.3, 0.9, 0.99, 1 - 2**-53])),
        float(chance.choice([0.0, 0.0, 5e-324, 1e-300, 0.05, 1.0])),
        int(chance.integers(0, 2**64, dtype=np.uint64)),
    )


@pytest.mark.parametrize("vocabulary", daily([1, 2, 3, 4, 63, 64, 65, 128, 130, 1001, 4097, 20_000], 0, 3, 6, 9, 11))
def test_draws_are_those_of_the_definition(pools: list[Threads], vocabulary: int) -> None:
    chance, found = np.random.default_rng(vocabulary), set()
    for trial in range(300 if vocabulary < 1000 else 120):
        logits, by = made_up(chance, vocabulary), any_params(chance)
        position = int(chance.choice([0, 1, 5000, 2**40, 2**62 - 1]))
        found.add(token := expected(logits, by, position))
        assert drawn(pools[trial % len(pools)], logits, by, position) == token, by
    assert len(found) > 1 or vocabulary == 1


@pytest.mark.parametrize("by", PARAMS, ids=["plain", "top-p", "top-k", "all"])
def test_draws_of_a_models_size_are_those_of_the_definition_at_every_seed(
    pools: list[Threads], by: SamplingParams
) -> None:
    chance = np.random.default_rng(3)
    for position in range(60):
        logits = (chance.normal(0, 3, 49152) + 12 * (chance.random(49152) < 1e-4)).astype(np.float32)
        seeded = SamplingParams(by.temperature, by.top_k, by.top_p, by.min_p, int(chance.integers(2**63)))
        assert drawn(pools[position % 3], logits, seeded, position) == expected(logits, seeded, position)


@pytest.mark.parametrize("trials", daily([15, 60], 0))
def test_a_nucleus_whose_mass_is_exactly_top_p_or_just_not_ends_where_the_definition_ends_it(
    pools: list[Threads], trials: int
) -> None:
    chance, ends = np.random.default_rng(8), set()
    for trial in range(trials):
        logits = np.round(chance.normal(0, 1, int(chance.choice([2, 3, 5, 300]))) * 4).astype(np.float32) / 4
        scores = np.sort(logits.astype(np.float64) - logits.max())[::-1]
        mass = np.cumsum(exp(scores)) / total(exp(logits.astype(np.float64) - logits.max()))
        at = float(mass[int(chance.integers(0, min(4, len(mass) - 1)))])
        for position in range(40):
            found = []
            for top_p in (np.nextafter(at, 0), at, np.nextafter(at, 1)):
                by = SamplingParams(1.0, top_p=float(top_p), seed=trial)
                found.append(drawn(pools[trial % 3], logits, by, position))
                assert found[-1] == expected(logits, by, position), by
            ends.add(len(set(found)))
    assert ends == {1, 2}  # the last token of a nucleus was drawn, and left out of one that is smaller by it


def test_a_position_that_is_drawn_again_from_other_logits_has_its_own_noise(pools: list[Threads]) -> None:
    chance, by = np.random.default_rng(6), SamplingParams(temperature=1.0, seed=2**63 + 5)
    for _ in range(3):
        for position in (*range(4), *range(64, 68)):  # some take the place of others in what is kept
            for vocabulary in (5000, 7000):
                logits = chance.normal(0, 2, vocabulary).astype(np.float32)
                only = np.sort(chance.permutation(vocabulary)[:3000])
                wide = np.full(vocabulary, -np.inf, dtype=np.float32)
                wide[only] = logits[only]
                assert drawn(pools[1], logits, by, position) == expected(logits, by, position)
                narrow = (*only.tolist(), vocabulary)
                assert drawn(pools[1], logits[only], by, position, narrow) == expected(wide, by, position)


def test_a_head_of_few_tokens_draws_as_if_the_others_could_not_be_drawn(pools: list[Threads]) -> None:
    chance = np.random.default_rng(9)
    for trial in range(400):
        vocabulary = int(chance.choice([5, 64, 500, 5000]))
        outputs = int(chance.integers(1, vocabulary + 1))
        only = chance.permutation(vocabulary)[:outputs]
        if trial % 2:
            only = np.sort(only)
        logits, by = made_up(chance, outputs), any_params(chance)
        wide = np.full(vocabulary, -np.inf, dtype=np.float32)
        wide[only] = logits
        found = drawn(pools[trial % 3], logits, by, trial, (*only.tolist(), vocabulary))
        assert found == expected(wide, by, trial), by


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("vocabulary", [1, 3, 64, 400, 5000])
def test_logits_that_are_not_numbers_draw_nothing(pools: list[Threads], bad: float, vocabulary: int) -> None:
    for by, at in itertools.product(PARAMS, {0, vocabulary // 2, vocabulary - 1}):
        logits = np.zeros(vocabulary, dtype=np.float32)
        logits[at] = bad
        assert drawn(pools[1], logits, by, 0) == -1
        assert drawn(pools[1], np.full(vocabulary, -np.inf, dtype=np.float32), by, 0) == -1


# --- exp and log ---


def targets() -> list[tuple[str, ...]]:
    """Compilations that this CPU can run: its own, without optimisation, and on x86-64 for older kinds."""
    found: list[tuple[str, ...]] = [("-march=native",), ("-march=native", "-O0")]
    if platform.machine() == "x86_64":
        here = frozenset(compilation.cpu_features().split())
        found += [("-march=x86-64",), *(level.flags for level in LEVELS if level.needs <= here)]
    return found


@pytest.mark.parametrize(
    "target", [targets()[0], *(pytest.param(each, marks=pytest.mark.thorough) for each in targets()[1:])], ids=" ".join
)
def test_exp_and_log_have_the_bits_of_the_definition(target: tuple[str, ...], tmp_path: Path) -> None:
    made = tmp_path / "elementary.so"
    try:
        compiler = compilation.find_compiler()
    except compilation.LibraryMissing as error:
        pytest.skip(str(error))
    flags = [flag for flag in compilation.FLAGS if flag != "-march=native"]
    command = [compiler, *flags, "-w", *target, f"-I{compilation.SOURCES}", str(PROGRAM), "-o", str(made)]
    subprocess.run(command, check=True, timeout=120)
    library, chance = ctypes.CDLL(str(made)), np.random.default_rng(1)
    edges = [0.0, -0.0, -708.0, np.nextafter(-708, -709), -709.0, 709.0, 710.0, -1e300, -np.inf, np.inf, 5e-324]
    x = np.concatenate([*(chance.uniform(low, 0, 10**6) for low in (-800, -40, -1)), edges, np.zeros(5)])
    assert bits_of(library.exps, x).tolist() == exp(x).view(np.int64).tolist()
    uniforms = ((chance.integers(0, 2**52, 10**6)).astype(np.float64) + 0.5) * 2.0**-52
    edges = [0.0, 5e-324, 2.0**-1022, 2.0**-53, 1 - 2.0**-53, 1.0, 1 + 2.0**-52, 2.0, 1e308]
    y = np.concatenate([uniforms, -log(uniforms), np.exp2(chance.uniform(-1022, 1023, 10**6)), edges])
    assert bits_of(library.logs, y).tolist() == log(y).view(np.int64).tolist()


def bits_of(function: Any, x: np.ndarray) -> np.ndarray:
    found = np.empty_like(x)
    function(pointer(x, c_double), pointer(found, c_double), len(x))
    return found.view(np.int64)


# --- in steps ---


@pytest.fixture
def without_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a draw in Python")

    monkeypatch.setattr("tandem.speculation.rules.draw", never)


@pytest.fixture(scope="module")
def target() -> NativeRunner:
    return native(module_of())


def seeded(chance: random.Random) -> SamplingParams:
    by = chance.choice(PARAMS)
    return SamplingParams(by.temperature, by.top_k, by.top_p, by.min_p, chance.randrange(2**64))


def rows_of(target: NativeRunner, trial: int) -> list[VerifyRow]:
    """Rows after made-up tokens; of a row's draft the first tokens are often what is drawn."""
    chance, rows = random.Random(trial), []
    for slot in range(SLOTS):
        tokens = sequence(chance.randint(3, 40), seed=trial * 5 + slot)
        fill(target, slot, tokens[:-1])
        by = chance.choice([GREEDY, seeded(chance), seeded(chance)])
        draft: list[int] = []
        for i in range(chance.randint(0, 5)):
            row = verify_row(slot, len(tokens) - 1, tokens[-1], draft, by)
            logits = target.verify_logits([row])[0][i]
            draft.append(draw(logits, by, len(tokens) + i) if chance.random() < 0.7 else chance.randrange(VOCAB))
        rows.append(verify_row(slot, len(tokens) - 1, tokens[-1], draft, by))
    return rows


def test_verdicts_on_sampled_rows_are_those_of_the_rule_on_the_same_logits(
    target: NativeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted = rejected = 0
    for trial in range(40):
        rows = rows_of(target, trial)
        logits = target.verify_logits(rows)
        there = [verify_here(row, own.__getitem__) for row, own in zip(rows, logits, strict=True)]
        with monkeypatch.context() as patch:
            patch.setattr("tandem.speculation.rules.draw", None)
            here = target.verify(rows)
        assert here == there
        accepted += sum(verdict.accepted for verdict in there)
        rejected += sum(verdict.accepted < len(row.draft) for verdict, row in zip(there, rows, strict=True))
    assert accepted > 50 and rejected > 20


@pytest.mark.usefixtures("without_python")
@pytest.mark.parametrize("only", [None, tuple(range(0, VOCAB, 3))], ids=["whole head", "narrow head"])
def test_sampled_drafts_are_what_is_drawn_from_the_drafts_logits(only: tuple[int, ...] | None) -> None:
    draft, chance = native(module_of("qwen3"), only, verifies=False), random.Random(4)
    for trial in range(20):
        tokens, by = sequence(chance.randint(3, 40), seed=trial), seeded(chance)
        fill(draft, 0, tokens[:-2])
        (found,) = draft.propose([propose_row(0, len(tokens) - 1, tokens[-2:], 4, by)])
        for token in found.token_ids:  # type: ignore[union-attr]
            logits = draft.model.feed([1], [0], [tokens], wants=1)
            assert logits is not None
            assert token == draw(draft.model.widened(logits)[0], by, len(tokens))
            tokens.append(token)


@pytest.mark.usefixtures("without_python")
def test_plain_decoding_under_the_rejection_rule_is_drawn_by_the_library(target: NativeRunner) -> None:
    fill(target, 0, sequence(20))
    row = verify_row(0, 19, 7, (), PARAMS[0], rule=Rule.REJECTION)
    (agreed,) = target.verify([verify_row(0, 19, 7, (), PARAMS[0])])
    assert target.verify([row]) == [agreed] and isinstance(agreed, Verdict)


def test_what_only_python_can_do_is_left_to_it(target: NativeRunner) -> None:
    fill(target, 0, sequence(20))
    for asked in ({"margins": True}, {"logprobs": 2}):
        (row,) = [verify_row(0, 19, 7, (3, 4), PARAMS[1], **asked)]  # type: ignore[arg-type]
        (found,) = target.verify([row])
        assert isinstance(found, Verdict) and (found.margins or found.logprobs)
        assert found.token_ids == target.verify([verify_row(0, 19, 7, (3, 4), PARAMS[1])])[0].token_ids  # type: ignore[union-attr]


WRONG = (
    {"temperature": -1.0},
    {"temperature": float("nan")},
    {"temperature": float("inf")},
    {"top_p": 0.0},
    {"top_p": 1.5},
    {"top_p": float("nan")},
    {"min_p": -0.1},
    {"min_p": float("nan")},
    {"top_k": -1},
    {"position": -1},
    {"position": 2**62},
    {"tokens": 0},
    {"tokens": VOCAB + 1},
    {"tokens": -5},
)


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_parameters_that_are_out_of_range_are_refused_before_anything_is_computed(
    target: NativeRunner, pools: list[Threads], wrong: dict[str, Any]
) -> None:
    values = {"temperature": 1.0, "top_p": 0.9, "min_p": 0.1, "seed": 1, "position": 5, "top_k": 3, "tokens": VOCAB}
    rows = RowBatch([0, 1], [0, 0], [[1, 2], [3]])
    sampled = (Sampling * 2)(Sampling(**values), Sampling(**{**values, **wrong}))
    logits, model = np.zeros((3, VOCAB), np.float32), target.model
    with pytest.raises(OutOfBounds, match="row 1: an argument is out of range"):
        model.library.tandem_verify(
            model.handle, ctypes.byref(rows.rows), sampled, zeros(3), zeros(2), pointer(logits, c_float)
        )
    with pytest.raises(OutOfBounds, match="an argument is out of range"):
        model.library.tandem_draw(
            pools[0].handle, pointer(logits, c_float), VOCAB, None, ctypes.byref(sampled[1]), zeros(1)
        )


def test_rows_are_not_drawn_without_room_for_their_logits(target: NativeRunner) -> None:
    rows = RowBatch([0], [0], [[1, 2]])
    sampled = ctypes.cast((Sampling * 1)(Sampling(1.0, 1.0, 0.0, 0, 1, 0, VOCAB)), POINTER(Sampling))
    with pytest.raises(OutOfBounds, match="an argument is out of range"):
        target.model.library.tandem_verify(
            target.model.handle, ctypes.byref(rows.rows), sampled, zeros(2), zeros(1), None
        )
