"""The prompts of a comparison: built-in workloads (prompts.json) or the user's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.clients.messages import read_prompts
from tandem.speculation.types import GenerationRequest

BUILT_IN = ("counting_and_lists", "code", "extraction", "chat", "prose")  # from predictable to high-entropy
ON_REQUEST = ("eks_sample",)  # only if named; AWS's sample of speculative decoding on EKS
OWN = ("file", "prompt")  # kinds of the user's prompts


@dataclass(frozen=True, slots=True)
class Prompt:
    name: str
    kind: str  # groups prompts in the report
    text: str
    chat: bool  # wraps the text in the chat template
    token_ids: tuple[int, ...] | None = None  # in place of the text, under a load of drawn lengths
    new_tokens: int | None = None  # of such a load: generated also past the end of the sequence

    def into(self, request: GenerationRequest, run: int = 0) -> GenerationRequest:
        """Returns a request with this prompt; a sampled run has its own seed."""
        sampling = request.sampling
        seed = sampling.seed if sampling.greedy else (sampling.seed + run) % 2**64
        if self.new_tokens is not None:
            request = replace(request, max_new_tokens=self.new_tokens, ignore_end_of_sequence=True)
        text = self.text if self.token_ids is None else None
        sampling = replace(sampling, seed=seed)
        return replace(request, text=text, token_ids=self.token_ids, chat=self.chat, sampling=sampling)


def built_in_prompts(kinds: Sequence[str] = BUILT_IN, per_workload: int | None = None) -> tuple[Prompt, ...]:
    """Returns the first `per_workload` prompts (None: all) of every kind."""
    known = (*BUILT_IN, *ON_REQUEST)
    if unknown := [kind for kind in kinds if kind not in known]:
        raise ValueError(f"workloads: {unknown[0]!r} is not one of {', '.join(known)}")
    if repeated := [kind for kind in kinds if list(kinds).count(kind) > 1]:
        raise ValueError(f"workloads: {repeated[0]!r} is named twice")
    if per_workload is not None and per_workload < 1:
        raise ValueError(f"prompts-per-workload: {per_workload} is below 1")
    found = json.loads(Path(__file__).with_name("prompts.json").read_text(encoding="utf-8"))
    return tuple(
        Prompt(f"{kind}/{prompt['name']}", kind, prompt["text"], prompt["chat"])
        for kind in kinds
        for prompt in found[kind][:per_workload]
    )


def read_prompt_file(path: Path, chat: bool = True) -> tuple[Prompt, ...]:
    """Reads one prompt per non-empty line, named by file and line."""
    return tuple(Prompt(f"{path.name}:{number}", OWN[0], text, chat) for number, text in read_prompts(path))


def given_prompts(texts: Sequence[str], chat: bool = True) -> tuple[Prompt, ...]:
    """Builds prompts from texts. Raises ValueError for an empty one."""
    if any(not text.strip() for text in texts):
        raise ValueError("prompt: an empty prompt cannot be continued")
    return tuple(Prompt(f"prompt {number}", OWN[1], text, chat) for number, text in enumerate(texts, 1))
