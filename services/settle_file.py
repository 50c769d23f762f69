"""Settles a file of requests into a file of answers, and resumes it."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any, BinaryIO

from tandem.rpc.request_context import new_id
from tandem.services.http import fields
from tandem.services.http.answers import HttpAnswer
from tandem.services.http.requests import PROMPTS, RequestReader
from tandem.services.http.values import known, mapping, one_of, read_json, string
from tandem.services.security.limits import ServerLimits, check_name
from tandem.services.settling import Settled, Settler
from tandem.speculation.errors import TandemError
from tandem.speculation.types import Chunk, GenerationEnd, InvalidField

MOST_LINES, LONGEST_LINE = 50_000, 16 * 2**20  # requests of a file, as OpenAI takes them; bytes of a line
PATHS = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
Requests = Mapping[str, Mapping[str, Any]]  # fields by custom_id
Shown = Callable[[int, int, str], None]  # requests done and in all, and a remark on the newest


async def settle_file(source: Path, output: Path, settler: AbstractAsyncContextManager[Settler], shown: Shown) -> int:
    """Adds the answers that `output` lacks; returns the exit code: 1 if a request was refused. Raises ValueError.

    A request is a line: one of OpenAI's batches, or its body alone.
    """
    requests, refused = read_requests(source), 0
    async with settler as target:
        with opened("output", output, "a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InvalidField("output", f"{output}: another run is writing it") from None
            reader = RequestReader(target.generator, ServerLimits(), dict)
            digests = {name: _digest(target, given) for name, given in requests.items()}
            done = _resumed(file, output, digests)

            async def answer(name: str) -> None:
                nonlocal refused
                async with target.room:
                    line = await _line(target, reader, requests[name])
                file.write(json.dumps({"custom_id": name, "request": digests[name], **line}).encode() + b"\n")
                file.flush()
                done.add(name)
                refused += (error := line["error"]) is not None
                shown(len(done), len(requests), f"{name}: {error['message']}" if error else "")

            shown(len(done), len(requests), "")
            await asyncio.gather(*(answer(name) for name in requests if name not in done))
    return int(refused > 0)


def read_requests(path: Path) -> Requests:
    """Names requests without a custom_id by their line's number. Raises a one-line ValueError."""
    found: dict[str, Mapping[str, Any]] = {}
    with opened("input", path, "rb") as file:
        for number, line in _lines(file, f"input: {path}"):
            try:
                if number > MOST_LINES:
                    raise InvalidField("lines", f"more than {MOST_LINES}")
                name, given = _request(read_json(line), str(number))
                if name in found:
                    raise InvalidField("custom_id", f"{name!r} is of an earlier line too")
            except InvalidField as error:
                raise ValueError(f"input: {path}, line {number}: {error}") from None
            found[name] = given
    return found


def _request(line: dict[str, Any], name: str) -> tuple[str, Mapping[str, Any]]:
    of, body = "chat" if PROMPTS["chat"] in line else "completions", line
    if "url" in line:
        keys = {"custom_id": string, "method": one_of("POST"), "url": one_of(*PATHS), "body": mapping}
        batch = known("request", line, keys, "body")
        name, of, body = batch.get("custom_id", name), PATHS[batch["url"]], batch["body"]
    given = fields.read(of, {key: value for key, value in body.items() if key not in ("model", "stream")})
    check_name("custom_id", name, 1)
    if PROMPTS[of] not in given:
        raise InvalidField(PROMPTS[of], "missing")
    if given.get("n", 1) != 1 or (of == "completions" and len(given["prompt"]) != 1):
        raise InvalidField("n", "a line has one prompt and one answer")
    return name, {**given, "receipt": True}


def _digest(target: Settler, given: Mapping[str, Any]) -> str:
    info, defaults = target.generator.info, target.generator.defaults
    model = [info.weights_revision, info.dtype, info.tokenizer_sha256, repr(defaults.sampling), defaults.max_new_tokens]
    return hashlib.sha256(json.dumps([given, model], sort_keys=True, default=repr).encode()).hexdigest()


@contextmanager
def opened(field: str, path: Path, mode: str) -> Iterator[BinaryIO]:
    try:
        with path.open(mode) as file:
            yield file  # type: ignore[misc]
    except OSError as error:
        raise InvalidField(field, f"{path}: {error.strerror}") from None


def _resumed(file: BinaryIO, path: Path, digests: Mapping[str, str]) -> set[str]:
    """Returns the names that a run before answered; drops a last line that it did not complete. Raises ValueError."""
    file.seek(0)
    done, whole = set[str](), 0
    for number, line in _lines(file, f"output: {path}"):
        if not line.endswith(b"\n"):
            break
        try:
            found = read_json(line)
            name = string("custom_id", found.get("custom_id"))
            if name in done or digests.get(name) != found.get("request"):
                raise InvalidField("request", "not the input's with this model and these options, or twice")
        except InvalidField as error:
            raise ValueError(f"output: {path}, line {number}: {error}; name another file") from None
        done.add(name)
        whole = file.tell()
    file.truncate(whole)
    return done


def _lines(file: BinaryIO, what: str) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise ValueError(f"{what}, line {number}: more than {LONGEST_LINE} bytes")
        if line.strip():
            yield number, line


async def _line(target: Settler, reader: RequestReader, given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        parsed = await (reader.chat(given) if PROMPTS["chat"] in given else reader.completion(given))
        settled = await target.settle(parsed.requests[0])
    except TandemError as error:
        return {"response": None, "error": {"code": error.code, "message": error.message}}
    found, answer = settled.completion, HttpAnswer(parsed, reader.tokenizer, target.generator.info, new_id())
    answer.parts(0, Chunk(found.token_ids, found.text, logprobs=found.logprobs))
    end = found.finish_reason, found.prompt_tokens, found.output_tokens, found.statistics, found.receipt
    answer.parts(0, GenerationEnd(*end))
    figures = {each.name: getattr(settled, each.name) for each in fields_of(Settled)[1:]}
    return {"response": {"status_code": 200, "body": answer.whole()}, "error": None, "settled": figures}
