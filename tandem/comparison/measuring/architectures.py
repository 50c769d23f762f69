"""The architectures that can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    """One way to split draft and target."""

    name: str
    service: str  # whose Generate clients call
    split: bool = False  # draft and target run apart, and bytes are counted between them


AUTOREGRESSIVE = Architecture("autoregressive", "TargetVerifier")
DISTRIBUTED = Architecture("distributed", "DraftWorker", split=True)
FUSED = Architecture("fused", "FusedSpeculativeServer")
# Plain decoding with copies from the text beside the target, and no draft model: the rival of a remote draft.
LOOKUP = Architecture("lookup", "FusedSpeculativeServer")
# The target drives: it asks a DraftWorker for drafts.
REMOTE_DRAFT = Architecture("remote_draft", "TargetVerifier", split=True)
# Like distributed, with rounds sent ahead of verdicts.
PIPELINED = Architecture("pipelined", "DraftWorker", split=True)
# Like distributed, with a target that does not wait for drafts.
NEVER_WAITING = Architecture("never_waiting", "DraftWorker", split=True)
# Like distributed, drafted by an EAGLE-3 head, which the target's features are sent to.
HEADED = Architecture("distributed_head", "DraftWorker", split=True)
# Plain decoding where the target verifies wider than one token: the baseline of speedups, started when needed.
WIDTH_1 = Architecture("autoregressive_width_1", "TargetVerifier")
# A server of which nothing but the OpenAI API is known: only connected, and only measured.
OPENAI = Architecture("openai", "OpenAI")
PLAIN = (AUTOREGRESSIVE.name, WIDTH_1.name)
# not calibrated: their rounds overlap, or their costs are unknown
NOT_COSTED = (*PLAIN, LOOKUP.name, PIPELINED.name, NEVER_WAITING.name, HEADED.name, OPENAI.name)

DEFAULT: tuple[Architecture, ...] = (AUTOREGRESSIVE, LOOKUP, DISTRIBUTED, NEVER_WAITING, FUSED, REMOTE_DRAFT)
COMPARED: Mapping[str, Architecture] = {a.name: a for a in (*DEFAULT, PIPELINED, HEADED)}
CONNECTABLE: Mapping[str, Architecture] = {**COMPARED, WIDTH_1.name: WIDTH_1}
ASKED: Mapping[str, Architecture] = {**COMPARED, OPENAI.name: OPENAI}  # values of --architectures
SERVED_BY_VLLM: Mapping[str, str] = {  # how vLLM decodes as each
    AUTOREGRESSIVE.name: "plain",
    LOOKUP.name: "its own n-gram",
    FUSED.name: "its own draft_model",
    REMOTE_DRAFT.name: "tandem.vllm.RemoteDrafter, waiting",
    NEVER_WAITING.name: "tandem.vllm.RemoteDrafter, never waiting",
}
