"""Hypothesis strategies for every request, made from its descriptor: a new field is fuzzed too.

Values are mostly plausible, so that requests get past the checks, and sometimes at or beyond a limit.
"""

from __future__ import annotations

import functools
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import strategies as st

from tandem.speculation.chat import ROLES

VOCABULARY, LONGEST = 258, 64
ADAPTER = "red"
"""That of every server."""
TOKEN_FIELDS = {"prefix", "tokens", "draft_tokens", "ids", "token_ids", "stop_token_ids", "last_token"}
LENGTH_FIELDS = {"base_length", "known_length", "prompt_length", "max_new_tokens", "max_total_tokens"}


def _mostly(plausible: st.SearchStrategy[Any], other: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 23).flatmap(lambda n: plausible if n else other)


_good_token = st.integers(0, 255)
_token = _mostly(_good_token, st.sampled_from([VOCABULARY - 1, VOCABULARY, 2**32 - 1]))
_length = _mostly(st.integers(1, LONGEST // 2), st.sampled_from([0, LONGEST, LONGEST + 1, 2**31, 2**32 - 1]))
_small = _mostly(st.integers(0, 5), st.sampled_from([6, 7, 2**32 - 1]))
_real = _mostly(st.sampled_from([0.5, 1.0, 0.95]), st.sampled_from([0.0, -1.0, 1e300, float("nan")]) | st.floats())
_session = _mostly(st.sampled_from(["s1", "s2", "s3"]), st.sampled_from(["", "x" * 129, "é\0"]))
_string = _mostly(st.just(""), st.just("other") | st.text(max_size=20))
_numbers = {
    FieldDescriptor.TYPE_UINT32: _small,
    FieldDescriptor.TYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_DOUBLE: _real,
    FieldDescriptor.TYPE_FLOAT: _mostly(st.sampled_from([0.5, 1.0]), st.floats(width=32)),
    FieldDescriptor.TYPE_ENUM: _mostly(st.sampled_from([0, 1, 2]), st.just(77)),
}


@functools.cache
def requests(kind: Any) -> st.SearchStrategy[Any]:
    """Well-formed messages of a request's class."""
    return _fields(kind.DESCRIPTOR).map(lambda fields: kind(**fields))


def _fields(descriptor: Descriptor) -> st.SearchStrategy[dict[str, Any]]:
    """Values by field name. A message field may be absent, and so may any other."""
    required, optional = {}, {}
    for field in descriptor.fields:
        choice = field.containing_oneof
        in_oneof = choice is not None and len(choice.fields) > 1
        wanted = field.name in ("session_id", "generation", "prefix", "prompt_length", "tokens", "sampling")
        (required if wanted and not in_oneof else optional)[field.name] = _value(field)
    return st.fixed_dictionaries(required, optional=optional).map(lambda chosen: _one_of_each(descriptor, chosen))


def _one_of_each(descriptor: Descriptor, chosen: dict[str, Any]) -> dict[str, Any]:
    for oneof in descriptor.oneofs:
        for extra in [field.name for field in oneof.fields if field.name in chosen][1:]:
            del chosen[extra]
    return chosen


def _value(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    one = _single(field)
    if not is_repeated(field):
        return one
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return _mostly(st.just([]), st.lists(one, max_size=2))
    if field.name in ("prefix", "ids", "tokens"):
        too_long = st.just([1] * (LONGEST + 1))
        return _mostly(st.lists(_good_token, min_size=1, max_size=12), st.lists(one, max_size=12) | too_long)
    if field.name == "draft_tokens":
        return _mostly(st.lists(_good_token, max_size=5), st.lists(one, max_size=9))
    return _mostly(st.lists(one, max_size=2), st.lists(one, max_size=9))


def is_repeated(field: FieldDescriptor) -> bool:
    """Later versions of protobuf know `is_repeated`, and from 7 on no `label`."""
    known: bool | None = getattr(field, "is_repeated", None)
    return field.label == FieldDescriptor.LABEL_REPEATED if known is None else known


def _single(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return _fields(field.message_type)
    if field.type == FieldDescriptor.TYPE_STRING:
        named = {"session_id": _session, "adapter": _mostly(st.sampled_from(["", ADAPTER]), _string)}
        named |= {"role": _mostly(st.sampled_from(ROLES), _string), "arguments": _mostly(st.just("{}"), _string)}
        return named.get(field.name, _string)
    if field.name in TOKEN_FIELDS:
        return _token
    if field.name == "prompt_length":
        return _mostly(st.just(1), _length)
    return _length if field.name in LENGTH_FIELDS else _numbers[field.type]


@functools.cache
def broken(kind: Any) -> st.SearchStrategy[bytes]:
    """Bytes that no client of ours would send: noise, and real messages cut short or changed in a place."""
    whole = requests(kind).map(lambda message: message.SerializeToString())
    cut = st.tuples(whole, st.integers(0, 60)).map(lambda pair: pair[0][: pair[1]])
    bent = st.tuples(whole, st.integers(0, 60), st.binary(min_size=1, max_size=6)).map(
        lambda three: three[0][: three[1]] + three[2] + three[0][three[1] + 1 :]
    )
    return st.binary(max_size=80) | cut | bent
