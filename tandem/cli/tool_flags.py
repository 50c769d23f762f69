"""Options of the roles in tools.py."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.cli.option import FILE, LIST, choice, option, switch


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ToolOptions:
    """A part of Options (flags.py)."""

    output: str | None = option(
        "accept: JSON file for the figures; convert: empty folder to write to",
        ("accept", "convert"),
        group="measuring and advice",
    )
    report: str | None = option("the comparison.json to use", ("advise",))
    rtt_ms: float | None = option("round trip between client and target (default: as measured)", ("advise",))
    clients: int = option("clients of one target at once", ("advise",), default=1)

    receipt: FILE | None = option(
        "the receipt; also without --receipt, after the role", ("check",), group="receipts (role check)"
    )
    keys: FILE | None = option(
        "the server's public keys, as it publishes them at /v1/receipt_keys (default: not compared)", ("check",)
    )
    sample: int | None = option("draw only so many spans of 64 tokens again (default: all)", ("check",))
    margin: float = option(
        "how far a token may be from being drawn, in logits, where arithmetic differs", ("check",), default=0.5
    )
    signature_only: bool = switch("check signature and digests, without a model", ("check",))

    convert: str | None = option(
        "rescale FP8 weights for Neuron; complete an EAGLE head (--draft_model); or write safetensors",
        ("convert",),
        metavar="fp8|eagle|safetensors",
        group="converting checkpoints (docs/trainium-nxdi.md)",
    )
    shard_gb: float = option("most GB of a file", ("convert",), default=5.0)

    instance: str | None = option(
        "an instance type such as trn2.48xlarge, or FAMILY:CHIPS such as trn3:4",
        ("plan",),
        group="planning (docs/trainium.md)",
    )
    lnc: int | None = option("physical cores per logical one (default: the chip's, 2 on Trn2 and Trn3)", ("plan",))
    quantization: str = choice(
        "quantization of the target; auto: as config.json says", "auto|none|int8|f8e4m3|f8e5m2", ("plan",)
    )
    modules_to_not_convert: LIST = option("modules to leave unquantized", ("plan",), default="lm_head")
    log: FILE | None = option("a log: name its known errors, with cause and next command (docs/errors.md)", ("doctor",))
    json: bool = switch("print JSON", ("plan", "doctor", "check"))
