"""Rewrites JSON schemas to what llguidance enforces; checks the rest once an output, or a call in it, is complete.

structure_worker.py runs this. `compiles(pattern)`: whether llguidance has this regular expression.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote

Compiles = Callable[[str], bool]
TextOf = Callable[[int], bytes]
"""The bytes of a token."""
# Keywords of an object itself, and those with the schemas of what is in an object or an array.
OF_OBJECTS = ("properties", "patternProperties", "additionalProperties", "required", "minProperties")
NAMED = ("properties", "patternProperties")
ITEMS = ("items", "prefixItems", "additionalProperties")
CHECKED = (
    *("not", "if", "contains", "uniqueItems", "propertyNames", "oneOf", "minProperties", "dependencies"),
    *("dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef"),
)
"""Keywords that llguidance leaves out, or follows in part: it counts a property that comes twice as two."""
BOUNDS, LARGE = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), 2**63 - 1
"""Bounds of numbers, and the size from which llguidance has none."""
_PIECES = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?(?:[=!]|<[=!])|[()]|[^\\\[()]+|.", re.DOTALL)
CALL_BEGIN = "<tool_call>"
CALLS = f"""start: (begin call "\\n"? "</tool_call>")* TEXT
TEXT: /(?s:.*)/
begin[lazy]: TEXT "{CALL_BEGIN}"
call: "\\n"? %json """
"""A grammar of text with calls of tools between marks; the schema of a call follows, as `call_schema` makes it."""
MOST_DIGITS = 20
"""Digits in a row that a number of JSON may have: a float has 17 significant ones, an integer of 64 bits 20."""
EXPONENT_DIGITS = 3
LONGEST_NUMBER = 400
"""Digits in a row, where the schema itself has such numbers: 1e308 has 309."""
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NUMBER = re.compile(rb"([0-9][eE][+-]?)?([0-9]*)$")
_DECODER = json.JSONDecoder()
_LOOKING = ("(?=", "(?!", "(?<=", "(?<!", r"\b", r"\B")


Part = tuple[str, dict[str, Any], bool]
"""A schema within another: a pointer to it, itself, and whether it describes an object together with others."""


def rewritten(text: str, compiles: Compiles) -> tuple[str, str]:
    """Closes objects, and drops keywords that cannot be enforced. Returns the schema, and where one was dropped or "".

    Raises ValueError for what cannot be checked either.

    An object has only the properties that its schema names, unless that says what else it has. One that several
    schemas describe together stays open: each of them would refuse what the others name.
    """
    try:
        root = json.loads(text)
    except (ValueError, RecursionError):
        return text, ""  # llguidance says what is wrong with it
    parts, dropped = list(_parts(root)), list[str]()
    for pointer, schema, _ in parts:
        large = [key for key in BOUNDS if isinstance(schema.get(key), int | float) and abs(schema[key]) >= LARGE]
        looking = [] if _looks_nowhere(pointer, schema, compiles) else ["pattern"]
        dropped += [f"{pointer}/{key}" for key in (*large, *looking, *(key for key in CHECKED if schema.get(key)))]
        for key in large:
            del schema[key]
        _name_properties(root, schema, compiles)
        _bound(root, schema)
    shared = {id(schema) for _, schema, shares in parts if shares}
    for _, schema, _ in parts:
        properties, required = schema.get("properties"), map(str, _list(schema.get("required")))
        if id(schema) not in shared and isinstance(properties, dict) and properties.keys() >= set(required):
            schema.setdefault("additionalProperties", False)
    return json.dumps({} if root is True else root), next(iter(dropped), "")  # llguidance takes options with objects


def _parts(root: Any) -> Iterator[Part]:
    """Yields the schemas that describe an output."""
    waiting: list[tuple[str, Any, bool]] = [("#", root, False)]
    seen: set[tuple[int, bool]] = set()
    while waiting:
        at, schema, shares = waiting.pop()
        if not isinstance(schema, dict) or (id(schema), shares) in seen:
            continue
        seen.add((id(schema), shares))
        unions = [(f"{at}/{key}", union) for key in ("anyOf", "oneOf") if (union := _list(schema.get(key)))]
        both = [(f"{at}/allOf/{i}", part) for i, part in enumerate(_list(schema.get("allOf")))]
        both += [(schema["$ref"], referred(root, schema["$ref"]))] if "$ref" in schema else []
        shares |= len(unions) + len(both) + (not schema.keys().isdisjoint(OF_OBJECTS)) > 1
        yield at, schema, shares
        waiting += [(where, each, shares) for where, each in both]
        waiting += [(f"{where}/{i}", each, shares) for where, union in unions for i, each in enumerate(union)]
        waiting += [(f"{at}/{key}/{step(n)}", v, False) for key in NAMED for n, v in _dict(schema.get(key)).items()]
        for key in ITEMS:
            waiting.append((f"{at}/{key}", schema.get(key), False))
            waiting += [(f"{at}/{key}/{i}", each, False) for i, each in enumerate(_list(schema.get(key)))]


def _looks_nowhere(pointer: str, schema: dict[str, Any], compiles: Compiles) -> bool:
    """Takes look-around and what else llguidance lacks out of a pattern. Returns whether it still says the same."""
    pattern = schema.get("pattern")
    if not isinstance(pattern, str) or compiles(pattern):
        return True
    ahead, rest = without_looking(pattern)
    parts = [each for each in (*(ahead or ()), rest) if compiles(each)]
    exact = ahead is not None and len(parts) == len(ahead) + 1
    if not exact:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"at {pointer}/pattern: neither llguidance nor Python has it: {error}") from None
    del schema["pattern"]
    schema["allOf"] = [*_list(schema.get("allOf")), *({"pattern": each} for each in parts)]
    return exact


def without_looking(pattern: str) -> tuple[list[str] | None, str]:
    """Returns a pattern without look-around, and the patterns that must match too, so that both say the same.

    Those are None if there are none: all but `^(?=...)` is left out.
    """
    ahead, rest, inside, depth, exact, begins = list[str](), "", "", 0, True, False
    for piece in _PIECES.findall(pattern):
        if depth:
            depth += piece.startswith("(") - (piece == ")")
            inside += piece if depth else ""
            if not depth and begins:
                ahead.append(f"^(?:{inside})")
        elif piece in _LOOKING:
            begins, inside, depth = piece == "(?=" and rest == "^", "", int(piece[0] == "(")
            exact &= begins
        else:
            rest += piece
    return ahead if exact and not (ahead and "|" in rest) else None, rest  # it may be of one alternative alone


def _bound(root: Any, schema: dict[str, Any]) -> None:
    """Bounds multiples, of which a limit of digits may leave none, and lists of values that are all different."""
    if "multipleOf" in schema:
        for key, other, bound in (("minimum", "exclusiveMinimum", -(10**15)), ("maximum", "exclusiveMaximum", 10**15)):
            schema.update({} if key in schema or other in schema else {key: bound})
    values = _resolved(root, schema.get("items")).get("enum")
    if schema.get("uniqueItems") and isinstance(values, list):
        schema["maxItems"] = min(len(values), schema.get("maxItems", len(values)))


def _resolved(root: Any, schema: Any) -> dict[str, Any]:
    """Returns a schema, or the one that it refers to."""
    found = _dict(schema)
    return _dict(referred(root, found["$ref"])) if "$ref" in found else found


def _name_properties(root: Any, schema: dict[str, Any], compiles: Compiles) -> None:
    """Says what names are allowed by `properties` or `patternProperties`, which llguidance follows."""
    names = _resolved(root, schema.get("propertyNames"))
    listed = names.get("enum", [names["const"]] if "const" in names else None)
    pattern = names.get("pattern")
    if not pattern and not names.keys().isdisjoint(("minLength", "maxLength")):
        pattern = f"^[\\s\\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    if "patternProperties" in schema or not (listed or pattern):
        return
    others = schema.get("additionalProperties", True)
    if isinstance(listed, list):
        schema["properties"] = {**{str(name): others for name in listed}, **_dict(schema.get("properties"))}
    elif compiles(str(pattern)):
        schema["patternProperties"] = {pattern: others}
    else:
        return
    schema["additionalProperties"] = False


def blamed(text: str, why: str, fault: Callable[[str], str]) -> str:
    """Returns `why` a schema does not compile, with the innermost part of it that does not compile either.

    `fault(text)`: why a schema does not compile, "" if it does.
    """
    root, why = json.loads(text), why.partition("\n  while processing")[0]
    whole = {"$defs": {"root": moved(root, "#/$defs/root")}}
    for pointer, schema, _ in reversed(list(_parts(root))):  # parts come after what they are parts of
        elsewhere = str(schema.get("$ref", "")).partition("#")[0]
        if elsewhere and elsewhere in why:  # then nothing beside it compiles either
            return f"at {pointer}/$ref: {why}"
    for pointer, _, _ in reversed(list(_parts(root))[1:]):
        if fault(json.dumps({**whole, "$ref": f"#/$defs/root{pointer[1:]}"})).startswith(why):
            return f"at {pointer}: {why}"
    return why


def moved(schema: Any, to: str) -> Any:
    """Returns a schema to stand at the pointer `to` of another, where its references to its own parts hold."""
    if isinstance(schema, list):
        return [moved(each, to) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: each for key, each in schema.items() if key not in ("$id", "$schema") or not isinstance(each, str)}
    own = str(kept.get("$ref", "")).partition("#/")[0] in ("", "#") and isinstance(kept.get("$ref"), str)
    return {**{key: moved(each, to) for key, each in kept.items()}, **({"$ref": to + kept["$ref"][1:]} if own else {})}


def call_schema(names: Iterable[str]) -> dict[str, Any]:
    """Returns the schema of a call of one of some functions, beside the `definitions` of their arguments."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": arguments_of(name)}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name in names
    ]
    return {"anyOf": calls}


def definitions(tools: dict[str, Any]) -> dict[str, Any]:
    """Returns the schemas of arguments under names that say whose they are if they are refused."""
    return {f"tools.{name}": moved(each, arguments_of(name)) for name, each in tools.items()}


def arguments_of(name: str) -> str:
    """Returns the pointer to the schema of a function's arguments."""
    return f"#/$defs/{step(f'tools.{name}')}"


def calls_in(text: str) -> Iterator[tuple[str, Any]]:
    """Yields the name and the arguments of each complete call in a text of the grammar CALLS."""
    at = 0
    while (begin := text.find(CALL_BEGIN, at)) >= 0:
        at = begin + len(CALL_BEGIN)
        try:
            call, at = _DECODER.raw_decode(text, at + text.startswith("\n", at))
            yield call["name"], call["arguments"]
        except (ValueError, KeyError, TypeError):
            return


class Calls:
    """Checks the calls in an output against the original schemas of their arguments."""

    def __init__(self, schema: str) -> None:
        self._rests = {
            key: Rest(json.dumps({"$ref": f"#/$defs/{step(key)}", "$defs": {key: each}}))
            for key, each in json.loads(schema)["$defs"].items()
        }
        self._fault_of = lru_cache(64)(self._checked)  # most steps end no call

    def fault(self, output: str) -> str:
        """Returns where the first wrong call breaks its schema, and how; "" if there is none."""
        found = (self._fault_of(name, json.dumps(arguments)) for name, arguments in calls_in(output))
        return next(filter(None, found), "")

    def _checked(self, name: str, arguments: str) -> str:
        key = f"tools.{name}"
        fault = self._rests[key].fault(arguments)
        return f"{key}: {fault}" if fault else ""


class Rest:
    """Checks whole outputs against the original schema."""

    def __init__(self, text: str) -> None:
        from jsonschema import Draft7Validator, Draft202012Validator, FormatChecker, validators
        from referencing import Registry

        schema = json.loads(text)
        for _, part, _ in _parts(schema):  # forms of older drafts, which llguidance takes too
            if isinstance(part.get("items"), list):
                part |= {"prefixItems": part["items"], "items": part.get("additionalItems", True)}
            for key in ("exclusiveMinimum", "exclusiveMaximum"):
                if isinstance(part.get(key), bool) and part.pop(key):
                    part[key] = part.pop(key.removeprefix("exclusive").lower(), None)
        Draft202012Validator.check_schema(schema, FormatChecker(()))  # Python does not have all patterns
        own = {"pattern": _pattern, "dependencies": Draft7Validator.VALIDATORS["dependencies"]}
        kind = validators.extend(Draft202012Validator, own)
        self._validator = kind(schema, registry=Registry())  # which retrieves nothing

    def fault(self, output: str) -> str:
        """Returns where an output breaks the schema, and how; "" if nowhere."""
        found = next(self._validator.iter_errors(json.loads(output)), None)
        return f"{found.json_path}: {found.message}" if found else ""


class JsonText:
    """Reads an output that is JSON. It bounds the digits of numbers, which schemas leave without end.

    `digits`: the tokens that begin with a digit, as bits of a mask; none may come after `most` digits in a row, nor
    after EXPONENT_DIGITS in an exponent. `rest` checks a complete output; `fault`: its last result.
    """

    def __init__(self, digits: int, most: int, text_of: TextOf, rest: Rest | Calls | None = None) -> None:
        self._digits, self._most, self._text_of, self._rest = digits, most, text_of, rest
        self._texts: list[bytes] = []
        self.fault = ""

    def take(self, token: int) -> None:
        self._texts.append(self._text_of(token))

    def back(self, count: int) -> None:
        del self._texts[len(self._texts) - count :]

    def limit(self, mask: bytearray, may_end: bool) -> None:
        """Takes the tokens out of a mask that begin with one digit too many, unless nothing else may come."""
        outside = _STRINGS.sub(b"", b"".join(self._texts))
        number = _NUMBER.search(outside)
        assert number, "it matches what is empty"
        if b'"' in outside or len(number[2]) < (EXPONENT_DIGITS if number[1] else self._most):
            return
        left = int.from_bytes(mask, "little") & ~self._digits
        if left or may_end:
            mask[:] = left.to_bytes(len(mask), "little")

    def complete(self) -> bool:
        """Whether an output that may end has nothing against it."""
        self.fault = self._rest.fault(b"".join(self._texts).decode(errors="replace")) if self._rest else ""
        return not self.fault


class CallText(JsonText):
    """Reads an output with calls of tools. `rest` checks each before its end mark.

    That mark may be a stop string, after which no mask is made.
    """

    def limit(self, mask: bytearray, may_end: bool) -> None:
        if not self.complete():
            raise ValueError(f"the output breaks it at {self.fault}")


def reader(schema: str, calls: bool, dropped: bool, digits: int, text_of: TextOf) -> JsonText | None:
    """Returns the reader of outputs of a schema or, with `calls`, of the grammar CALLS; None if it would do nothing.

    `dropped`: the schema has keywords that its grammar has not.
    """
    if calls:
        return CallText(0, 0, text_of, Calls(schema)) if dropped else None
    return JsonText(digits, digits_needed(schema), text_of, Rest(schema) if dropped else None)


def digit_tokens(vocabulary: Any, vocab_size: int) -> int:
    """Returns the `digits` of JsonText for a vocabulary."""
    return sum(1 << token for token in range(vocab_size) if vocabulary.decode_bytes([token])[:1].isdigit())


def digits_needed(schema: str) -> int:
    """Returns how many digits in a row a number may have: MOST_DIGITS, or as many as the schema itself has."""
    return min(LONGEST_NUMBER, max(MOST_DIGITS, *map(len, re.findall("[0-9]+", schema)), 0))


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    """Checks a pattern; one that Python does not have was enforced."""
    from jsonschema import ValidationError

    try:
        if isinstance(instance, str) and not re.search(pattern, instance):
            yield ValidationError(f"{instance!r} does not match {pattern!r}")
    except re.error:
        return


def referred(root: Any, reference: object) -> Any:
    """Returns the schema that a reference names; None if it is not in the same document."""
    first, *steps = str(reference).split("/")
    at = root if first == "#" else None
    for each in steps:
        name = unquote(each).replace("~1", "/").replace("~0", "~")
        at = at[int(name)] if isinstance(at, list) and name.isdecimal() and int(name) < len(at) else _dict(at).get(name)
    return at


def step(name: str) -> str:
    """Returns a step of a pointer."""
    return quote(name.replace("~", "~0").replace("/", "~1"))


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
