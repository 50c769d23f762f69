"""Builds answers of the shapes that OpenAI's clients read, whole and in parts."""

from __future__ import annotations

import codecs
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.checkpoints.tokenizers import ChatTokenizer
from tandem.services.http.requests import Asked
from tandem.services.http.scoring import Scores
from tandem.services.http.tool_calls import Delta, MarkedText
from tandem.services.http.tools import folded
from tandem.services.http.usage import metrics, usage
from tandem.speculation.types import Chunk, FinishReason, GenerationEnd, ModelInfo, TokenLogprobs

Json = dict[str, Any]


class Choice:
    """One choice, as it comes."""

    def __init__(self, asked: Asked, index: int, tokenizer: ChatTokenizer) -> None:
        self._asked, self.index, self._tokenizer = asked, index, tokenizer
        self._parser, marks = asked.tools.parser(), asked.tools.marks
        self._marked = MarkedText(tokenizer.stream(), marks) if marks else None
        self._deltas: list[Delta] = []
        self._logprobs: list[Json] = []
        self._offset, self._characters = 0, codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.token_ids: list[int] = []
        self.end: GenerationEnd | None = None
        self._begun = False

    def scored(self, scores: Scores) -> None:
        """Takes the log-probabilities of the prompt, which the answer repeats."""
        prompt = self._asked.prompts[self._asked.prompt_of(self.index)]
        told = self._logprobs_of(prompt, (TokenLogprobs(0.0), *scores))
        self._logprobs.append(
            {**told, **{name: [None, *told[name][1:]] for name in ("token_logprobs", "top_logprobs")}}
        )

    def add(self, chunk: Chunk) -> list[Json]:
        """Takes the next tokens. Returns the parts of a streamed choice that they make."""
        self.token_ids += chunk.token_ids
        deltas = self._parser.add(self._marked.text(chunk) if self._marked else chunk.text)
        return self._parts(deltas, chunk)

    def ended(self, end: GenerationEnd) -> list[Json]:
        """Takes the end. Returns the last parts, with the reason of the end."""
        self.end = end
        parts = self._parts(self._parser.end(end.finish_reason is FinishReason.LENGTH), None)
        last: Json = {"index": self.index, "finish_reason": self._reason, "logprobs": None, **self._receipt}
        return [*parts, {**last, "delta": {}} if self._asked.chat else {**last, "text": ""}]

    @property
    def _reason(self) -> str:
        assert self.end
        if self.end.finish_reason is FinishReason.LENGTH:
            return "length"
        return "tool_calls" if self._parser.calls else "stop"

    @property
    def _receipt(self) -> Json:
        return {"receipt": json.loads(self.end.receipt)} if self.end and self.end.receipt else {}

    def _parts(self, deltas: list[Delta], chunk: Chunk | None) -> list[Json]:
        asked = self._asked
        streamed = asked.says("stream")
        logprobs = self._logprobs_of(chunk.token_ids, chunk.logprobs) if chunk and chunk.logprobs else None
        if not streamed:
            self._deltas += deltas
            if logprobs:
                self._logprobs.append(logprobs)
            return []
        begins = not self._begun and chunk is not None
        self._begun = self._begun or begins
        ids = asked.says("return_token_ids") and chunk is not None
        if (logprobs or ids) and not deltas:
            deltas = [{"content": ""}]
        parts: list[Json] = []
        if begins and asked.chat:
            parts.append(self._part({"role": "assistant", "content": ""}))
        elif begins and asked.says("echo"):
            echoed = self._part({"content": self._prompt_text()})
            parts.append({**echoed, "logprobs": self._logprobs[0] if self._logprobs else None})
        parts += [self._part(delta) for delta in deltas]
        if logprobs:
            parts[-1]["logprobs"] = logprobs
        if ids and chunk:
            parts[-1]["token_ids"] = list(chunk.token_ids)
            if begins and not asked.chat:
                parts[0]["prompt_token_ids"] = list(asked.prompts[asked.prompt_of(self.index)])
        return parts

    def _part(self, delta: Delta) -> Json:
        said: Json = {"delta": delta} if self._asked.chat else {"text": delta["content"]}
        return {"index": self.index, **said, "logprobs": None, "finish_reason": None}

    def whole(self) -> Json:
        """Returns the choice of an answer that is not streamed."""
        asked, message = self._asked, folded(self._deltas)
        if asked.chat:
            said: Json = {"message": message}
        else:
            echoed = self._prompt_text() if asked.says("echo") else ""
            said = {"text": echoed + (message["content"] or "")}
        made = {"index": self.index, **said, "logprobs": self._all_logprobs(), "finish_reason": self._reason}
        made |= self._receipt
        if asked.says("return_token_ids"):
            made["token_ids"] = self.token_ids
            if not asked.chat:
                made["prompt_token_ids"] = list(asked.prompts[asked.prompt_of(self.index)])
        return made

    def _prompt_text(self) -> str:
        prompt = self._asked.prompt_of(self.index)
        text = self._asked.texts[prompt]
        return self._tokenizer.text(self._asked.prompts[prompt]) if text is None else text

    def _all_logprobs(self) -> Json | None:
        if not self._logprobs:
            return None
        lists = {name: [one for each in self._logprobs for one in each[name] or ()] for name in self._logprobs[0]}
        return lists if not self._asked.chat else {**lists, "refusal": None}

    def _logprobs_of(self, token_ids: Sequence[int], logprobs: Scores) -> Json:
        told = [
            (self._told(token, each.logprob), [(id, self._told(id, logprob)) for id, logprob in each.top])
            for token, each in zip(token_ids, logprobs, strict=True)
        ]
        if self._asked.chat:
            content = [{**one, "top_logprobs": [each for _, each in top]} for one, top in told]
            return {"content": content, "refusal": None}
        return {
            "tokens": [one["token"] for one, _ in told],
            "token_logprobs": [one["logprob"] for one, _ in told],
            "top_logprobs": [_by_text(token, top) for token, (_, top) in zip(token_ids, told, strict=True)],
            "text_offset": [self._offset_of(token) for token in token_ids],
        }

    def _offset_of(self, token: int) -> int:
        """Returns where the next token begins in the text: at the character that it is, or is a part of."""
        offset = self._offset
        self._offset += len(self._characters.decode(self._tokenizer.token_bytes(token)))
        return offset

    def _told(self, token: int, logprob: float) -> Json:
        if self._asked.says("return_tokens_as_token_ids"):
            text = f"token_id:{token}"
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
        spelt = self._tokenizer.token_bytes(token)
        text = self._tokenizer.text([token]) if not spelt else spelt.decode(errors="replace")
        return {"token": text, "logprob": logprob, "bytes": list(spelt)}


def _by_text(chosen: int, top: Sequence[tuple[int, Json]]) -> dict[str, float]:
    """Returns log-probabilities by tokens' texts. Of several with one text, others than the likeliest have other names.

    Those are OpenAI's, of bytes that are no text, or vLLM's, of ids. The chosen token has its text in any case.
    """
    named = {each["token"]: token for token, each in reversed(top)}
    named |= {each["token"]: token for token, each in top if token == chosen}
    found: dict[str, float] = {}
    for token, each in top:
        name = each["token"]
        if named[name] != token:
            name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in each["bytes"])
        found[name if name not in found else f"token_id:{token}"] = each["logprob"]
    return found


class Answer:
    """The answer to one request: what all its parts have in common, and the choices."""

    def __init__(self, asked: Asked, tokenizer: ChatTokenizer, info: ModelInfo, request_id: str) -> None:
        self._asked, self._info = asked, info
        self.choices = [Choice(asked, index, tokenizer) for index in range(len(asked.requests))]
        kind = ("chat.completion", "chat.completion.chunk") if asked.chat else ("text_completion", "text_completion")
        self._common = {
            "id": f"{'chatcmpl' if asked.chat else 'cmpl'}-{request_id}",
            "object": kind[asked.says("stream")],
            "created": int(time.time()),
            "model": asked.model,
            "system_fingerprint": f"tandem-{info.weights_revision.rpartition(':')[2][:12]}",
        }

    def score(self, scores: Sequence[Scores]) -> None:
        """Takes the log-probabilities of the prompts."""
        for each in self.choices:
            each.scored(scores[self._asked.prompt_of(each.index)])

    def parts(self, choice: int, event: Chunk | GenerationEnd) -> list[Json]:
        """Takes an event of a choice. Returns the messages of a stream that it makes."""
        its = self.choices[choice]
        made = its.add(event) if isinstance(event, Chunk) else its.ended(event)
        usage_so_far = {"usage": self._usage()} if made and self._asked.says("continuous_usage_stats") else {}
        parts = [{**self._common, "choices": [each], **usage_so_far} for each in made]
        first = parts and len(its.token_ids) == len(event.token_ids if isinstance(event, Chunk) else ())
        if first and self._asked.chat and self._asked.says("return_token_ids"):
            parts[0]["prompt_token_ids"] = list(self._asked.prompts[0])
        return parts

    @property
    def complete(self) -> bool:
        return all(each.end for each in self.choices)

    def last(self) -> list[Json]:
        """Returns what ends a stream after all choices: the usage, if it was asked for."""
        if not self._asked.says("include_usage"):
            return []
        return [{**self._common, "choices": [], **self._totals()}]

    def whole(self) -> Json:
        made = {**self._common, "choices": [each.whole() for each in self.choices], **self._totals()}
        if self._asked.chat and self._asked.says("return_token_ids"):
            made["prompt_token_ids"] = list(self._asked.prompts[0])
        return made

    def _usage(self) -> Json:
        prompts, told = self._asked.prompts, [each.end for each in self.choices if each.end]
        firsts = [each.end for each in self.choices[:: self._asked.n] if each.end]
        return usage(sum(map(len, prompts)), sum(len(each.token_ids) for each in self.choices), told, firsts)

    def _totals(self) -> Json:
        ends = [each.end for each in self.choices if each.end]
        return {"usage": self._usage(), **metrics(ends, self._info.max_speculation_length)}


def models(name: str, adapters: Mapping[str, str], info: ModelInfo, created: int) -> list[Json]:
    """Returns the entries of /v1/models: the target, and each adapter as a model that is made of it."""
    common = {"object": "model", "created": created, "owned_by": "tandem", "max_model_len": info.max_sequence_length}
    return [
        {"id": each, **common, "root": name, "parent": name if each != name else None} for each in (name, *adapters)
    ]
