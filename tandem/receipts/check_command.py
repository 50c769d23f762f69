"""Runs `tandem check`."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tandem.engine.batcher import Batcher
from tandem.engine.generator import chat_tokens
from tandem.engine.generators import target_info
from tandem.engine.load_models import Loaded, load, load_adapters
from tandem.engine.model_config import ModelConfig
from tandem.receipts import checking
from tandem.receipts.checking import CheckOutcome, Finding, overall
from tandem.receipts.computation_receipt import computation_receipt
from tandem.receipts.keys import read_keys
from tandem.receipts.receipt import MOST_BYTES, Receipt, Signed, read_signed
from tandem.receipts.redraw import Redrawn, redraw, same_adapter, same_arithmetic, same_model, spans
from tandem.runners.load_runner import WEIGHTS
from tandem.speculation.chat import ChatMessage
from tandem.speculation.types import InvalidField

MARGIN = 0.5


@dataclass(frozen=True, slots=True)
class CheckConfig:
    """`prompt`: token ids or text; `chat`: instead of it. `keys`: the server's, None: any.

    signature_only: without the model.
    sample: spans of 64 tokens, None: all. beacon: hexadecimal, chooses them. computation_receipt: a file to write.
    margin: tolerated logit gap under other arithmetic. own_length, own_format: the receipt's, not those of `models`.
    """

    receipt: Path
    prompt: tuple[int, ...] | str | None
    models: ModelConfig
    chat: tuple[ChatMessage, ...] | None = None
    signature_only: bool = False
    keys: Path | None = None
    sample: int | None = None
    beacon: str | None = None
    computation_receipt: Path | None = None
    margin: float = MARGIN
    own_length: bool = True
    own_format: bool = True
    json: bool = False

    def __post_init__(self) -> None:
        if self.sample is not None and self.sample < 1:
            raise ValueError(f"sample: {self.sample} is below 1")
        if self.beacon is not None and (self.sample is None or not re.fullmatch("([0-9a-f]{2}){1,64}", self.beacon)):
            raise ValueError("beacon: not 1 to 64 bytes in lower-case hexadecimal beside --sample")
        if not 0 <= self.margin < float("inf"):
            raise ValueError(f"margin: {self.margin} is not a finite number, at least 0")
        if self.prompt is None and self.chat is None and not self.signature_only:
            raise ValueError("prompt: give --prompt FILE, or --signature_only")

    @property
    def challenge(self) -> bytes | None:
        return None if self.beacon is None else bytes.fromhex(self.beacon)


async def run_check(config: CheckConfig) -> int:
    """Returns the exit code, a CheckOutcome. Raises ValueError if nothing can be checked."""
    signed = read_signed(read_file("receipt", config.receipt))
    findings = await check(config, signed)
    if config.computation_receipt is not None:
        made = computation_receipt(signed, config.sample, config.challenge or b"")
        config.computation_receipt.write_text(json.dumps(made, ensure_ascii=False) + "\n")
    _show(findings, config.json)
    return int(overall(findings))


async def check(config: CheckConfig, signed: Signed) -> list[Finding]:
    """Checks signature and digests, then the rest with the model, unless forged."""
    trusted = None if config.keys is None else read_keys(read_file("keys", config.keys))
    findings = [*checking.signature(signed, trusted), checking.digests(signed.receipt)]
    if CheckOutcome.FORGED in {each.outcome for each in findings}:
        return findings
    if config.signature_only:
        if isinstance(config.prompt, tuple):
            findings.append(checking.prompt(signed, [config.prompt])[0])
        else:
            unread = "none is given" if config.prompt is None and config.chat is None else "needs the model's tokenizer"
            findings.append(Finding("prompt", None, unread))
        findings.append(checking.end(signed.receipt, None))
        return [*findings, Finding("tokens", None, "needs the model")]
    batcher = Batcher("check")
    try:
        loaded = await load(fitting(config, signed.receipt), batcher)
        await load_adapters(config.models, loaded)
        return [*findings, *await checked_by(loaded, signed, config)]
    finally:
        await batcher.close()


def fitting(config: CheckConfig, receipt: Receipt) -> ModelConfig:
    """Returns models with the receipt's sizes and, by default, number format."""
    models, tokens = config.models, receipt.prompt_tokens + len(receipt.token_ids)
    # Few distinct lengths: steps checked at one need no check again.
    whole = max(512, 1 << (tokens - 1).bit_length()) if tokens <= 8192 else -(-tokens // 1024) * 1024
    length = whole if config.own_length else models.shape.max_length
    shape = replace(models.shape, slots=1, max_length=length)
    execution = models.execution
    if config.own_format:
        weights, _, dtype = receipt.model.dtype.rpartition("/")
        kinds = weights if weights in WEIGHTS else "as-stored" if weights else "auto"
        execution = replace(execution, dtype=dtype, weights=kinds)
    return replace(models, shape=shape, execution=execution)


async def checked_by(loaded: Loaded, signed: Signed, config: CheckConfig) -> list[Finding]:
    receipt, engine, info = signed.receipt, loaded.engine, target_info(loaded, 0)
    findings = [same_model(receipt, info)]
    if adapter := same_adapter(receipt, engine):
        findings.append(adapter)
    if overall(findings) is CheckOutcome.OTHER_WEIGHTS:
        return findings
    found, prompt = checking.prompt(signed, candidates(loaded, config))
    findings += [found, checking.end(receipt, loaded.tokenizer.stream())]
    if prompt is None or overall(findings) is not CheckOutcome.RIGHT:
        return findings
    exact, checked = same_arithmetic(receipt, engine), spans(receipt, config.sample, config.challenge)
    note = engine.arithmetic if exact else f"{receipt.served.arithmetic or 'unknown'} there, {engine.arithmetic} here"
    findings.append(Finding("arithmetic", CheckOutcome.RIGHT if exact else None, note))
    began = time.perf_counter()
    try:
        redrawn = await redraw(receipt, engine, prompt, checked, exact)
    except InvalidField as error:
        return [*findings, Finding("tokens", CheckOutcome.CANNOT_CHECK, str(error))]
    seconds = time.perf_counter() - began
    return [*findings, *_findings(redrawn, receipt, exact, config.margin, seconds)]


def candidates(loaded: Loaded, config: CheckConfig) -> list[tuple[int, ...]]:
    """Returns the tokens a prompt may mean: plain or chat, with or without its last newline."""
    if isinstance(config.prompt, tuple):
        return [config.prompt]
    tokenizer = loaded.tokenizer
    if config.chat is not None:
        return [tuple(chat_tokens(tokenizer, config.chat))]
    text, found = config.prompt or "", []
    for variant in dict.fromkeys((text, text.removesuffix("\n"))):
        for chat in (False, True):
            try:
                found.append(tuple(tokenizer.encode(variant, chat)))
            except ValueError:  # the model has no template
                continue
    return found


def _findings(redrawn: Redrawn, receipt: Receipt, exact: bool, margin: float, seconds: float) -> list[Finding]:
    count, found = len(receipt.token_ids), []
    drawn = f"{redrawn.tokens - redrawn.wrong} of {count} drawn again in {seconds:.2f} s"
    if redrawn.tokens < count and not redrawn.wrong:
        drawn = f"{redrawn.tokens} of {count}, in a sample of spans, drawn again in {seconds:.2f} s"
    worst = max(redrawn.gaps or (), default=0.0)
    if redrawn.first is None:
        found.append(Finding("tokens", CheckOutcome.RIGHT, drawn))
    elif exact or worst > margin:
        at, there, here = redrawn.first
        note = f"output token {at} is {there} in the receipt, and {here} was drawn"
        found.append(
            Finding("tokens", CheckOutcome.FORGED, note if exact else f"{note}; one is {worst:.3g} logits off")
        )
    else:
        note = f"{drawn}; {redrawn.wrong} differ, by {worst:.3g} logits at most (margin {margin:g}): other arithmetic"
        found.append(Finding("tokens", CheckOutcome.CANNOT_CHECK, note))
    if receipt.logprobs and redrawn.logprobs < redrawn.tokens - redrawn.wrong:
        found.append(Finding("log-probabilities", CheckOutcome.CANNOT_CHECK, "not computed here"))
    elif receipt.logprobs:
        off = redrawn.logprobs_off
        said = f"{redrawn.logprobs - redrawn.logprobs_wrong} of {redrawn.logprobs} equal"
        outcome = CheckOutcome.RIGHT if not redrawn.logprobs_wrong else CheckOutcome.CANNOT_CHECK
        if redrawn.logprobs_wrong and (exact or off > margin):
            outcome = CheckOutcome.FORGED
        found.append(Finding("log-probabilities", outcome, said if not off else f"{said}; {off:.3g} off at most"))
    return found


def read_file(field: str, path: Path) -> str:
    # A pipe may never end.
    try:
        with path.open("rb") as opened:
            data = opened.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise InvalidField(field, f"{path}: longer than {MOST_BYTES} bytes")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidField(field, f"{path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None


def _show(findings: Sequence[Finding], as_json: bool) -> None:
    outcome = overall(findings)
    if as_json:
        lines = [{**asdict(each), "outcome": each.word} for each in findings]
        print(json.dumps({"outcome": outcome.name.lower().replace("_", " "), "findings": lines}, indent=1))
        return
    for each in findings:
        print(f"{each.what:18} {each.word:14} {each.note}")
    print(f"{'receipt':18} {outcome.name.lower().replace('_', ' ')}")
