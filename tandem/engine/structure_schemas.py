"""Rewrites JSON schemas for llguidance, in structure_worker.py; checks the rest once an output or call is complete."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote

Compiles = Callable[[str], bool]
# Keywords of an object itself, and those with the schemas of what is in an object or an array.
OF_OBJECTS = ("properties", "patternProperties", "additionalProperties", "required", "minProperties")
NAMED = ("properties", "patternProperties")
ITEMS = ("items", "prefixItems", "additionalProperties")
CHECKED = (
    *("not", "if", "contains", "uniqueItems", "propertyNames", "oneOf", "minProperties", "dependencies"),
    *("dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef"),
)  # keywords that llguidance drops, or enforces in part: it counts a repeated property as two
# bounds of numbers, and the size from which llguidance has none
BOUNDS, LARGE = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), 2**63 - 1
_PIECES = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?(?:[=!]|<[=!])|[()]|[^\\\[()]+|.", re.DOTALL)
CALL_BEGIN = "<tool_call>"
CALLS = f"""start: (begin call "\\n"? "</tool_call>")* TEXT
TEXT: /(?s:.*)/
begin[lazy]: TEXT "{CALL_BEGIN}"
call: "\\n"? %json """  # text with tool calls between marks; `call_schema`'s schema of a call follows
_DECODER = json.JSONDecoder()
_LOOKING = ("(?=", "(?!", "(?<=", "(?<!", r"\b", r"\B")


# a pointer to a schema within another, the schema, whether others describe the same object
Part = tuple[str, dict[str, Any], bool]


def rewritten(text: str, compiles: Compiles) -> tuple[str, str]:
    """Closes objects, drops unenforceable keywords; returns the schema, and where one was dropped or "".

    Objects of several schemas stay open: each would refuse the others' names. Raises ValueError for keywords that
    cannot be checked.
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
    """Removes look-around and other unsupported parts of a pattern; returns whether it still means the same."""
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
    """Patterns to match too (None: the meaning changes), and the pattern without look-around."""
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
    # so that a masked output leaves unique values
    values = _resolved(root, schema.get("items")).get("enum")
    if schema.get("uniqueItems") and isinstance(values, list):
        schema["maxItems"] = min(len(values), schema.get("maxItems", len(values)))


def _resolved(root: Any, schema: Any) -> dict[str, Any]:
    found = _dict(schema)
    return _dict(referred(root, found["$ref"])) if "$ref" in found else found


def _name_properties(root: Any, schema: dict[str, Any], compiles: Compiles) -> None:
    # llguidance enforces names by `properties` and `patternProperties` alone
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
    """`why` a schema does not compile, with its innermost part at fault."""
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
    """The schema for the pointer `to` of another, with its own references adjusted."""
    if isinstance(schema, list):
        return [moved(each, to) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: each for key, each in schema.items() if key not in ("$id", "$schema") or not isinstance(each, str)}
    own = str(kept.get("$ref", "")).partition("#/")[0] in ("", "#") and isinstance(kept.get("$ref"), str)
    return {**{key: moved(each, to) for key, each in kept.items()}, **({"$ref": to + kept["$ref"][1:]} if own else {})}


def call_schema(names: Iterable[str]) -> dict[str, Any]:
    """The schema of a call of a function, next to the `definitions` of arguments."""
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
    return {f"tools.{name}": moved(each, arguments_of(name)) for name, each in tools.items()}


def arguments_of(name: str) -> str:
    return f"#/$defs/{step(f'tools.{name}')}"


def calls_in(text: str) -> Iterator[tuple[str, Any]]:
    """Yields name and arguments of each complete call in a text of CALLS."""
    at = 0
    while (begin := text.find(CALL_BEGIN, at)) >= 0:
        at = begin + len(CALL_BEGIN)
        try:
            call, at = _DECODER.raw_decode(text, at + text.startswith("\n", at))
            yield call["name"], call["arguments"]
        except (ValueError, KeyError, TypeError):
            return


class Rest:
    """Checks whole outputs, or with `of_calls` each call of an output, against the original schema."""

    def __init__(self, text: str, of_calls: bool) -> None:
        self.of_calls = of_calls
        schemas = {"": json.loads(text)}
        if of_calls:
            defined = schemas[""]["$defs"]
            schemas = {key: {"$ref": f"#/$defs/{step(key)}", "$defs": {key: defined[key]}} for key in defined}
        self._validators = {key: _validator(schema) for key, schema in schemas.items()}
        self._fault_of = lru_cache(64)(self._checked)  # most steps end no call

    def fault(self, output: str) -> str:
        """Where and how an output, or its first wrong call, breaks the schema, or ""."""
        if not self.of_calls:
            return self._checked("", output)
        calls = ((f"tools.{name}", json.dumps(arguments)) for name, arguments in calls_in(output))
        found = ((key, self._fault_of(key, arguments)) for key, arguments in calls)
        return next((f"{key}: {fault}" for key, fault in found if fault), "")

    def _checked(self, key: str, output: str) -> str:
        found = next(self._validators[key].iter_errors(json.loads(output)), None)
        return f"{found.json_path}: {found.message}" if found else ""


def _validator(schema: Any) -> Any:
    from jsonschema import Draft7Validator, Draft202012Validator, FormatChecker, validators
    from referencing import Registry

    for _, part, _ in _parts(schema):  # forms of older drafts, which llguidance takes too
        if isinstance(part.get("items"), list):
            part |= {"prefixItems": part["items"], "items": part.get("additionalItems", True)}
        for key in ("exclusiveMinimum", "exclusiveMaximum"):
            if isinstance(part.get(key), bool) and part.pop(key):
                part[key] = part.pop(key.removeprefix("exclusive").lower(), None)
    Draft202012Validator.check_schema(schema, FormatChecker(()))  # Python does not have all patterns
    own = {"pattern": _pattern, "dependencies": Draft7Validator.VALIDATORS["dependencies"]}
    return validators.extend(Draft202012Validator, own)(schema, registry=Registry())  # which retrieves nothing


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    # a pattern that Python lacks was enforced
    from jsonschema import ValidationError

    try:
        if isinstance(instance, str) and not re.search(pattern, instance):
            yield ValidationError(f"{instance!r} does not match {pattern!r}")
    except re.error:
        return


def referred(root: Any, reference: object) -> Any:
    """The schema that a reference names; None if outside the document."""
    first, *steps = str(reference).split("/")
    at = root if first == "#" else None
    for each in steps:
        name = unquote(each).replace("~1", "/").replace("~0", "~")
        at = at[int(name)] if isinstance(at, list) and name.isdecimal() and int(name) < len(at) else _dict(at).get(name)
    return at


def step(name: str) -> str:
    return quote(name.replace("~", "~0").replace("/", "~1"))


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
