"""Builds OpenAI's answers, whole and streamed."""

from __future__ import annotations

import codecs
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.checkpoints.tokenizers import ChatTokenizer
from tandem.services.http.requests import ParsedRequest
from tandem.services.http.tool_calls import Delta, MarkedText, folded
from tandem.speculation.types import Chunk, FinishReason, GenerationEnd, ModelInfo, TokenLogprobs

Json = dict[str, Any]
Scores = tuple[TokenLogprobs, ...]


class Choice:
    def __init__(self, request: ParsedRequest, index: int, tokenizer: ChatTokenizer) -> None:
        self._request, self.index, self._tokenizer = request, index, tokenizer
        self._prompt = request.prompts[index // request.n]
        self._parser, marks = request.tools.parser(), request.tools.marks
        self._marked = MarkedText(tokenizer.stream(), marks) if marks else None
        self._offset, self._characters = 0, codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._begun = False
        self.token_ids: list[int] = []
        self.end: GenerationEnd | None = None

    def add(self, chunk: Chunk) -> list[Json]:
        parts, ids = [] if self._begun else self._first_parts(), self._request.says("return_token_ids")
        self._begun = True
        self.token_ids += chunk.token_ids
        deltas = self._parser.add(self._marked.text(chunk) if self._marked else chunk.text)
        if (chunk.logprobs or ids) and not deltas:
            deltas = [{"content": ""}]
        parts += map(self._part, deltas)
        if chunk.logprobs:
            parts[-1]["logprobs"] = self._logprobs_of(chunk.token_ids, chunk.logprobs)
        if ids:
            parts[-1] |= {"token_ids": list(chunk.token_ids), "rounds": list(chunk.rounds)}
        return parts

    def ended(self, end: GenerationEnd) -> list[Json]:
        self.end, cut = end, end.finish_reason is FinishReason.LENGTH
        parts = [self._part(delta) for delta in self._parser.end(cut)]
        last = self._part({} if self._request.chat else {"content": ""})
        last["finish_reason"] = "length" if cut else "tool_calls" if self._parser.calls else "stop"
        return [*parts, last | ({"receipt": json.loads(end.receipt)} if end.receipt else {})]

    def _first_parts(self) -> list[Json]:
        if self._request.chat:
            return [self._part({"role": "assistant", "content": ""})]
        ids = {"prompt_token_ids": list(self._prompt)}
        return [self._part({"content": ""}) | ids] if self._request.says("return_token_ids") else []

    def _part(self, delta: Delta) -> Json:
        text_or_delta: Json = {"delta": delta} if self._request.chat else {"text": delta["content"]}
        return {"index": self.index, **text_or_delta, "logprobs": None, "finish_reason": None}

    def whole(self, parts: Sequence[Json]) -> Json:
        lists = [each["logprobs"] for each in parts if each["logprobs"]]
        logprobs: Json | None = None
        if lists:
            logprobs = {name: [one for each in lists for one in each[name] or ()] for name in lists[0]}
        if self._request.chat:
            text_or_delta: Json = {"message": folded([each["delta"] for each in parts])}
            logprobs = logprobs and {**logprobs, "refusal": None}
        else:
            text_or_delta = {"text": "".join(each["text"] for each in parts)}
        made = {"index": self.index, **text_or_delta, "logprobs": logprobs, "finish_reason": parts[-1]["finish_reason"]}
        made |= {key: each[key] for each in parts for key in ("prompt_token_ids", "receipt") if key in each}
        return made | ({"token_ids": self.token_ids} if self._request.says("return_token_ids") else {})

    def _logprobs_of(self, token_ids: Sequence[int], logprobs: Scores) -> Json:
        entries = [
            (self._entry(token, each.logprob), [self._entry(id, logprob) for id, logprob in each.top])
            for token, each in zip(token_ids, logprobs, strict=True)
        ]
        if self._request.chat:
            content = [{**one, "top_logprobs": top} for one, top in entries]
            return {"content": content, "refusal": None}
        return {
            "tokens": [one["token"] for one, _ in entries],
            "token_logprobs": [one["logprob"] for one, _ in entries],
            "top_logprobs": [{each["token"]: each["logprob"] for each in reversed(top)} for _, top in entries],
            "text_offset": [self._offset_of(token) for token in token_ids],
        }

    def _offset_of(self, token: int) -> int:
        offset = self._offset
        self._offset += len(self._characters.decode(self._tokenizer.token_bytes(token)))
        return offset

    def _entry(self, token: int, logprob: float) -> Json:
        spelt = self._tokenizer.token_bytes(token)
        text = spelt.decode(errors="replace") if spelt else self._tokenizer.text([token])
        return {"token": text, "logprob": logprob, "bytes": list(spelt)}


class HttpAnswer:
    """The answer to one request."""

    def __init__(self, request: ParsedRequest, tokenizer: ChatTokenizer, info: ModelInfo, request_id: str) -> None:
        self._request = request
        self.choices = [Choice(request, index, tokenizer) for index in range(len(request.requests))]
        self._kept: list[list[Json]] = [[] for _ in self.choices]  # parts, if nothing is streamed
        kind = ("chat.completion", "chat.completion.chunk") if request.chat else ("text_completion", "text_completion")
        self._common = {
            "id": f"{'chatcmpl' if request.chat else 'cmpl'}-{request_id}",
            "object": kind[request.says("stream")],
            "created": int(time.time()),
            "model": request.model,
            "system_fingerprint": f"tandem-{info.weights_revision.rpartition(':')[2][:12]}",
        }

    def parts(self, choice: int, event: Chunk | GenerationEnd) -> list[Json]:
        its = self.choices[choice]
        begins, made = not its.token_ids, its.add(event) if isinstance(event, Chunk) else its.ended(event)
        if not self._request.says("stream"):
            self._kept[choice] += made
            return []
        usage = {"usage": self._usage()} if self._request.says("continuous_usage_stats") else {}
        parts = [{**self._common, "choices": [each], **usage} for each in made]
        return [parts[0] | self._prompt_ids(), *parts[1:]] if begins and parts else parts

    @property
    def complete(self) -> bool:
        return all(each.end for each in self.choices)

    def last(self) -> list[Json]:
        """Returns the messages after all choices: the usage, if include_usage is set."""
        return [{**self._common, "choices": [], "usage": self._usage()}] if self._request.says("include_usage") else []

    def whole(self) -> Json:
        choices = [each.whole(parts) for each, parts in zip(self.choices, self._kept, strict=True)]
        return {**self._common, "choices": choices, "usage": self._usage(), **self._prompt_ids()}

    def _prompt_ids(self) -> Json:
        wanted = self._request.chat and self._request.says("return_token_ids")
        return {"prompt_token_ids": list(self._request.prompts[0])} if wanted else {}

    def _usage(self) -> Json:
        prompt, output = sum(map(len, self._request.prompts)), sum(len(each.token_ids) for each in self.choices)
        ends = [each.end for each in self.choices if each.end]
        firsts = [each.end for each in self.choices[:: self._request.n] if each.end]
        accepted, drafted = sum(each.stats.accepted for each in ends), sum(each.stats.drafted for each in ends)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": sum(each.stats.cached_prompt_tokens for each in firsts)},
            "completion_tokens_details": {
                # a stop may cut the last round's
                "accepted_prediction_tokens": sum(min(each.stats.accepted, each.output_tokens) for each in ends),
                "rejected_prediction_tokens": drafted - accepted,
            },
        }


def models(name: str, adapters: Mapping[str, str], info: ModelInfo, created: int) -> dict[str, Json]:
    common = {"object": "model", "created": created, "owned_by": "tandem", "max_model_len": info.max_sequence_length}
    return {
        each: {"id": each, **common, "root": name, "parent": name if each != name else None}
        for each in (name, *adapters)
    }
