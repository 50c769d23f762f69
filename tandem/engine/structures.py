"""Compiles structures (JSON schemas, regular expressions, choices, grammars) for a tokenizer, with llguidance.

llguidance was chosen over xgrammar: it needs no other package, compiles in milliseconds and has limits for hostile
grammars. The optional extra `structured` brings it.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tandem.speculation.draws import BadLogits
from tandem.speculation.processing import Mask, Matcher
from tandem.speculation.sampling import InvalidField, Structure, StructureKind

KEPT = 32
"""Compiled structures to keep; those used last."""
_INSTALL = 'pip install "tandem-speculative[structured]"'
LEXER_STATES = 50_000
"""Limits what one structure may hold in memory, at 1 to 2 kB each."""


@runtime_checkable
class Spelled(Protocol):
    """A tokenizer that tells how its tokens are spelled."""

    end_of_sequence_ids: tuple[int, ...]

    def spelling(self) -> str | Sequence[bytes]:
        """The JSON of a `tokenizers` tokenizer, or the bytes of each token, b"" for special ones."""


class Structures:
    """Makes the matchers of one tokenizer, for logits of `vocab_size` tokens.

    Keeps the `KEPT` structures used last compiled. `end_ids`: the model's end-of-sequence tokens, beside the
    tokenizer's.
    """

    def __init__(self, tokenizer: object, vocab_size: int, end_ids: Sequence[int] = ()) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        own = tokenizer.end_of_sequence_ids if isinstance(tokenizer, Spelled) else ()
        self._end_ids = tuple(token for token in dict.fromkeys((*own, *end_ids)) if token < vocab_size)
        self._compiled: OrderedDict[Structure, Any] = OrderedDict()
        self._vocabulary: Any = None
        self._lock = asyncio.Lock()  # one compilation at a time

    async def matcher(self, structure: Structure) -> Matcher:
        """Returns a matcher at the start of the output. Raises InvalidField if the structure cannot be enforced."""
        async with self._lock:
            if structure not in self._compiled:
                self._compiled[structure] = await asyncio.to_thread(self._compile, structure)
            self._compiled.move_to_end(structure)
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
            return TokenMatcher(self._compiled[structure].deep_copy(), self._vocab_size, self._end_ids)

    def _compile(self, structure: Structure) -> Any:
        try:
            import llguidance
        except ImportError:
            raise InvalidField("structure", f"not available: this server lacks llguidance; {_INSTALL}") from None
        if self._vocabulary is None:
            self._vocabulary = self._read_vocabulary()
        limits = llguidance.LLParserLimits(max_lexer_states=LEXER_STATES, verbose_errors=False)
        try:
            matcher = llguidance.LLMatcher(self._vocabulary, _grammar(structure), log_level=0, limits=limits)
        except ValueError as error:
            raise _invalid(structure, str(error)) from None
        if matcher.is_error():
            raise _invalid(structure, matcher.get_error())
        return matcher

    def _read_vocabulary(self) -> Any:
        import llguidance

        if not isinstance(self._tokenizer, Spelled):
            raise InvalidField("structure", "this server does not know how its tokens are spelled")
        if not self._end_ids:
            raise InvalidField("structure", "this model has no end-of-sequence token to end the output with")
        spelling, end = self._tokenizer.spelling(), self._end_ids[0]
        if isinstance(spelling, str):
            return llguidance.LLTokenizer(spelling, n_vocab=self._vocab_size, eos_token=end)
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes(spelling, end)), eos_token=end)


class TokenMatcher:
    """A Matcher on an llguidance matcher. Where the output may end, any of `end_ids` may come next, and ends it."""

    def __init__(self, matcher: Any, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._matcher, self._vocab_size, self._end_ids = matcher, vocab_size, end_ids
        self._ended = 0  # end-of-sequence tokens taken
        self._only_end = np.zeros(vocab_size, dtype=np.bool_)
        self._only_end[list(end_ids)] = True

    def mask(self) -> Mask:
        if self._ended:
            return self._only_end
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise BadLogits("structure: it became too complex to follow")
        mask = np.unpackbits(packed, count=self._vocab_size, bitorder="little").view(np.bool_)
        mask[list(self._end_ids)] = self._matcher.is_accepting()
        return mask

    def allows(self, token: int) -> bool:
        if self._ended or token in self._end_ids:
            return token in self._end_ids and (self._ended > 0 or bool(self._matcher.is_accepting()))
        if forced := self._matcher.compute_ff_tokens():  # of several spellings, the mask has only the tokenizer's own
            return bool(token == forced[0])
        if self._matcher.compute_ff_bytes():
            return token < self._vocab_size and bool(self.mask()[token])
        return bool(self._matcher.validate_tokens([token]))

    def advance(self, token: int) -> bool:
        if token in self._end_ids:
            may = self._ended > 0 or bool(self._matcher.is_accepting())
            self._ended += may
            return may
        return not self._ended and bool(self._matcher.try_consume_tokens([token]))

    def back(self, count: int) -> None:
        ends = min(self._ended, count)
        self._ended -= ends
        if count > ends:
            self._matcher.rollback(count - ends)


class _Bytes:
    """A tokenizer as llguidance takes it, for a list of tokens that are single bytes."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], end: int) -> None:
        self.tokens, self.eos_token_id = tokens, end
        self.special_token_ids = [token for token, spelled in enumerate(tokens) if not spelled]
        self._ids = {spelled: token for token, spelled in enumerate(tokens) if spelled}

    def __call__(self, text: str | bytes) -> list[int]:
        raw = text.encode() if isinstance(text, str) else text
        return [self._ids[bytes([byte])] for byte in raw]


def _grammar(structure: Structure) -> str:
    """Returns llguidance's form of the structure. Raises ValueError."""
    from llguidance import LLMatcher

    match structure.kind:
        case StructureKind.JSON_SCHEMA:
            return str(LLMatcher.grammar_from_json_schema(structure.text))
        case StructureKind.REGEX:
            return str(LLMatcher.grammar_from_regex(structure.text))
        case StructureKind.CHOICE:
            alternatives = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in structure.choices)
            return str(LLMatcher.grammar_from_lark(f"start: {alternatives}"))
        case StructureKind.GRAMMAR:
            return str(LLMatcher.grammar_from_lark(structure.text))


def _invalid(structure: Structure, why: str) -> InvalidField:
    reason = " ".join(why.split())[:200]
    return InvalidField("structure", f"the {structure.kind.value} cannot be enforced: {reason}")
