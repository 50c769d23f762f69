"""Receipts survive resumption and failover, and every forgery is found and named."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tandem.checkpoints.adapter_files import AdapterChoice
from tandem.cli.main import main
from tandem.engine.batcher import Batcher
from tandem.engine.load_models import Loaded
from tandem.receipts.check_command import CheckConfig, check, checked_by
from tandem.receipts.checking import CheckOutcome, Finding, overall
from tandem.receipts.keys import Keys, open_keys, signature_right
from tandem.receipts.receipt import EVERY, Receipt, Signed, prefix_digests, prompt_digest, read_signed
from tandem.receipts.redraw import redraw
from tandem.receipts.redraw import spans as spans_of
from tandem.rpc.channel import DRAFT
from tandem.services.receipts import Receipts, generated
from tandem.speculation.types import FinishReason, GenerationRequest, SpeculationStats, Structure, StructureKind
from tandem.speculation.verification_mode import Pipeline
from tests.daily import daily
from tests.http.site import door
from tests.support import (
    GREEDY,
    HANG,
    SAMPLED,
    Generate,
    ServerProcess,
    answer,
    distributed,
    draft_config,
    engine_of,
    fused_site,
    ids,
    let_all_expire,
    oracle,
    run,
    server_process,
    target_site,
    toy,
    worker_site,
)
from tests.toy import BACKEND, ToyConfig, ToyTokenizer

PROMPT, COUNT = b"again and again and again and ", 100
LOOKUP_FIRST = draft_config(None, 4, 160, kind="hybrid", model="miss=0.3")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return open_keys(tmp_path_factory.mktemp("keys"), 90)


def _own(generator: Any, keys: Keys) -> Generate:
    """The generator of a role without a server, signed like one's."""
    signing = Receipts(keys, "none", lambda: {"red": "toy:red"})
    return lambda request: generated(signing, generator, request, SpeculationStats())


@contextlib.asynccontextmanager
async def _signing(site: AbstractAsyncContextManager[Any], keys: Keys) -> AsyncIterator[Generate]:
    async with site as found, found.client() as client:
        adapters = found.engine.adapters if found.service != DRAFT else None
        if adapters:
            await adapters.add(AdapterChoice("red", "red"), BACKEND.adapter)
        found.method.receipts = Receipts(keys, found.service, lambda: adapters.revisions if adapters else {})
        yield client.generate


def _plain(keys: Keys) -> AbstractAsyncContextManager[Generate]:
    return _signing(target_site(toy()), keys)


PENALISED = replace(SAMPLED, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2, logit_bias=((65, 2),))
STRUCTURED = replace(SAMPLED, structure=Structure(StructureKind.REGEX, "[a-z]{20,60}"))
REQUESTS = {
    "greedy": {"sampling": GREEDY},
    "sampled": {"sampling": SAMPLED},
    "penalised": {"sampling": PENALISED, "logprobs": 2},
    "structured": {"sampling": STRUCTURED},
    "adapted": {"sampling": SAMPLED, "adapter": "red"},
    "stopped": {"sampling": replace(GREEDY, seed=5), "stop_token_ids": tuple(range(100, 140)), "logprobs": 0},
}


async def _receipt(generate: Generate, **options: Any) -> Signed:
    request = {"count": COUNT, "receipt": True, "ignore_end_of_sequence": True} | options
    if request["sampling"] is STRUCTURED:
        request["ignore_end_of_sequence"] = False  # which ends it
    got = await answer(generate, ids(PROMPT, **request))
    signed = read_signed(got.completion.receipt)
    assert signed.receipt.token_ids == got.token_ids and signature_right(signed)
    return signed


def _answered(signed: Signed) -> dict[str, Any]:
    """What all receipts of a request share: without server and salt."""
    said = signed.receipt.json
    del said["served"], said["key"], said["prompt"]["digest"], said["output"]["digests"]
    return said


async def _findings(signed: Signed, sample: int | None = None, adapter: str = "red", **there: Any) -> list[Finding]:
    """What the toy target makes of a receipt."""
    batcher = Batcher("test-check")
    try:
        engine = engine_of(toy(**there), batcher)
        await engine.adapters.add(AdapterChoice("red", adapter), BACKEND.adapter)
        config = CheckConfig(Path(), tuple(PROMPT), draft_config(None, 1, 160), sample=sample)
        return await checked_by(Loaded(engine, ToyTokenizer()), signed, config)
    finally:
        await batcher.close()


@pytest.mark.parametrize(
    ("name", "pipeline"),
    daily([("penalised", Pipeline.OFF), ("structured", Pipeline.ON), ("adapted", Pipeline.NEVER_WAITING)], 2),
)
async def test_a_session_that_was_resumed_changes_no_receipt(name: str, pipeline: Pipeline, keys: Keys) -> None:
    """The target forgets its sessions after every chunk of the first half; who drafts opens them again."""
    options = REQUESTS[name]
    async with _plain(keys) as generate:
        plain = await _receipt(generate, **options)
    resumed = 0
    async with target_site(toy(ToyConfig(step_seconds=0.001))) as target:
        assert target.engine and target.verifier
        await target.engine.adapters.add(AdapterChoice("red", "red"), BACKEND.adapter)
        worker = worker_site(target.address, config=LOOKUP_FIRST, pipeline=pipeline, reconnect_seconds=HANG)

        async def interrupted(generate: Generate, request: GenerationRequest) -> AsyncIterator[Any]:
            nonlocal resumed
            seen = 0
            async for event in generate(request):
                yield event
                seen += len(getattr(event, "token_ids", ()))
                if seen < len(plain.receipt.token_ids) // 2:
                    resumed += len(target.verifier.sessions)
                    await let_all_expire(target)

        async with _signing(worker, keys) as generate:
            signed = await _receipt(lambda request: interrupted(generate, request), **options)
    assert resumed and _answered(signed) == _answered(plain)
    assert len(signed.receipt.served.verifiers) == 1 and signed.receipt.chained()


def _resigned(keys: Keys, signed: Signed, **changes: Any) -> Signed:
    """What a server with the key may claim instead: everything about it is consistent."""
    receipt = replace(signed.receipt, **changes)
    receipt = replace(receipt, digests=prefix_digests(receipt.prompt_digest, receipt.token_ids))
    return keys.signed(receipt, signed.salt)


def _swapped(tokens: tuple[int, ...]) -> tuple[int, ...]:
    at = next(i for i in range(40, len(tokens)) if tokens[i] != tokens[i + 1])
    return (*tokens[:at], tokens[at + 1], tokens[at], *tokens[at + 2 :])


def _asked(receipt: Receipt, **changes: Any) -> dict[str, Any]:
    return {"request": replace(receipt.request, sampling=replace(receipt.request.sampling, **changes))}


FORGERIES: dict[str, tuple[Callable[[Receipt], dict[str, Any]], str]] = {
    "one token": (lambda it: {"token_ids": (*it.token_ids[:70], it.token_ids[70] ^ 1, *it.token_ids[71:])}, "tokens"),
    "the last token": (lambda it: {"token_ids": (*it.token_ids[:-1], it.token_ids[-1] ^ 1)}, "tokens"),
    "a swap": (lambda it: {"token_ids": _swapped(it.token_ids)}, "tokens"),
    "another seed": (lambda it: _asked(it, seed=it.request.sampling.seed + 1), "tokens"),
    "another temperature": (lambda it: _asked(it, temperature=0.5), "tokens"),
    "no penalty": (lambda it: _asked(it, repetition_penalty=1.0), "tokens"),
    "a cut": (lambda it: {"token_ids": it.token_ids[:60], "logprobs": it.logprobs[:60]}, "end"),
    "another end": (lambda it: {"finish_reason": FinishReason.STOP_TOKEN}, "end"),
    "no adapter": (lambda it: {"adapter": None}, "tokens"),
    "better log-probabilities": (
        lambda it: {"logprobs": tuple(replace(each, logprob=each.logprob / 2) for each in it.logprobs)},
        "log-probabilities",
    ),
}


@pytest.fixture(scope="module")
def penalised(keys: Keys) -> Signed:
    """A right receipt of a request that has a penalty, an adapter and log-probabilities."""

    async def made() -> Signed:
        async with _signing(fused_site(toy(), toy(ToyConfig(miss=0.3))), keys) as generate:
            signed = await _receipt(generate, sampling=PENALISED, adapter="red", logprobs=1)
        assert overall(await _findings(signed)) is CheckOutcome.RIGHT
        return signed

    return run(made())  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", FORGERIES)
async def test_what_a_server_with_the_key_forges_is_found_and_named(name: str, keys: Keys, penalised: Signed) -> None:
    made, found = FORGERIES[name]
    forged = _resigned(keys, penalised, **made(penalised.receipt))
    assert signature_right(forged) and forged.receipt.chained()
    findings = await _findings(forged)
    assert overall(findings) is CheckOutcome.FORGED
    assert next(each.what for each in findings if each.outcome is CheckOutcome.FORGED) == found


@pytest.mark.thorough
async def test_a_beacon_finds_a_forged_span_as_often_as_the_page_says(penalised: Signed) -> None:
    """One of 10 spans is forged, and what follows is the target's own: 3 of 10 checks of 3 spans find it."""
    spans, size, count = 10, 3, 1_000
    batcher, found = Batcher("test-check"), 0
    try:
        engine = engine_of(toy(max_length=1024), batcher)
        for forgery in range(20):
            forged = tuple(oracle(PROMPT, GREEDY, EVERY * (forgery % spans), past_the_end=True))
            forged += (oracle((*PROMPT, *forged), GREEDY, 1, past_the_end=True)[0] ^ 1,)
            forged += oracle((*PROMPT, *forged), GREEDY, EVERY * spans - len(forged), past_the_end=True)
            request = replace(penalised.receipt.request, sampling=GREEDY, logprobs=None)
            receipt = replace(penalised.receipt, adapter=None, request=request, token_ids=forged, logprobs=())
            for beacon in range(count // 20):
                chosen = spans_of(receipt, size, sha256(bytes((forgery, beacon))).digest())
                found += (await redraw(receipt, engine, tuple(PROMPT), chosen, True)).wrong
    finally:
        await batcher.close()
    expected = count * size / spans
    assert abs(found - expected) < 3.3 * math.sqrt(expected * (1 - size / spans))  # by chance once in 1,000


async def test_tokens_of_another_model_under_this_ones_name_are_forged_and_under_their_own_other_weights(
    keys: Keys,
) -> None:
    async with _signing(target_site(toy(ToyConfig(salt=1))), keys) as generate:
        signed = await _receipt(generate, sampling=SAMPLED)
    there = await _findings(signed)
    assert overall(there) is CheckOutcome.OTHER_WEIGHTS and "weights_revision" in there[0].note
    model = replace(signed.receipt.model, weights_revision=toy().identity.weights_revision)
    assert overall(await _findings(_resigned(keys, signed, model=model))) is CheckOutcome.FORGED
    assert overall(await _findings(signed, config=ToyConfig(salt=1))) is CheckOutcome.RIGHT


async def test_another_prompt_or_adapter_is_named_and_what_is_not_here_cannot_be_checked(keys: Keys) -> None:
    async with _plain(keys) as generate:
        signed = await _receipt(generate, sampling=SAMPLED, adapter="red")
    other = prompt_digest(signed.salt, b"other")
    forged = _resigned(keys, signed, prompt_digest=other, prompt_tokens=5)
    assert [each.what for each in await _findings(forged) if each.outcome is CheckOutcome.FORGED] == ["prompt"]
    assert overall(await _findings(signed, adapter="blue")) is CheckOutcome.OTHER_WEIGHTS
    unknown = _resigned(keys, signed, adapter=("green", "toy:green"))
    findings = await _findings(unknown)
    assert overall(findings) is CheckOutcome.CANNOT_CHECK and "--adapters green=DIR" in str(findings)


async def test_bits_of_another_arithmetic_are_no_forgery_while_scores_are_near(keys: Keys) -> None:
    async with _plain(keys) as generate:
        signed = await _receipt(generate, sampling=SAMPLED)
    served = replace(signed.receipt.served, arithmetic="tokens, avx512_bf16")
    findings = await _findings(_resigned(keys, signed, served=served))
    assert overall(findings) is CheckOutcome.RIGHT, "every token was drawn again all the same"
    assert [each.outcome for each in findings if each.what == "arithmetic"] == [None]
    token = signed.receipt.token_ids[5] ^ 1
    wrong = (*signed.receipt.token_ids[:5], token, *signed.receipt.token_ids[6:])
    assert overall(await _findings(_resigned(keys, signed, served=served, token_ids=wrong))) is CheckOutcome.FORGED


async def test_no_prompt_and_no_key_leave_with_a_receipt(tmp_path: Path) -> None:
    keys = open_keys(tmp_path, 90)
    secret = "my password is Swordfish-7"
    async with _signing(target_site(toy()), keys) as generate:
        request = GenerationRequest(text=secret, max_new_tokens=8, receipt=True, sampling=SAMPLED)
        text = (await answer(generate, request)).completion.receipt
        private = (tmp_path / "signing.pem").read_text()
        tokens = ",".join(map(str, secret.encode()))
        for hidden in (secret, "Swordfish", secret.encode().hex(), tokens, tokens.replace(",", ", "), private):
            assert hidden not in text
        for line in private.splitlines()[1:-1]:
            assert line not in text
        raw = keys.private.private_bytes_raw()
        assert raw.hex() not in text
        bare = json.loads(text)
        del bare["salt"]  # then nobody can try prompts
        assert secret.encode().hex() not in json.dumps(bare)


async def test_over_http_each_choice_has_its_receipt_and_the_keys_are_published(keys: Keys) -> None:
    async with door() as site:
        assert (await site.http.get("/v1/receipt_keys")).json() == {"keys": []}
        refusal = await site.refused("/v1/completions", {"prompt": "hello", "receipt": True})
        assert "signs none" in str(refusal)
        site.generate.receipts = Receipts(keys, "FusedSpeculativeServer", dict)
        assert (await site.http.get("/v1/receipt_keys")).json() == keys.json
        body = {"prompt": list(PROMPT), "receipt": True, "n": 2, "max_tokens": 70, "seed": 4, "temperature": 0.8}
        whole = (await site.post("/v1/completions", body)).json()
        for choice in whole["choices"]:
            signed = read_signed(json.dumps(choice["receipt"]))
            assert signature_right(signed) and signed.receipt.request.sampling.seed == 4 + choice["index"]
            assert overall(await _findings(signed)) is CheckOutcome.RIGHT
        events = await site.events("/v1/completions", {**body, "n": 1, "stream": True})
        (ending,) = [each for each in events if each["choices"] and "receipt" in each["choices"][0]]
        assert ending["choices"][0]["finish_reason"]
        again = read_signed(json.dumps(ending["choices"][0]["receipt"]))
        assert _answered(again) == _answered(read_signed(json.dumps(whole["choices"][0]["receipt"])))


def _check(tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["check", str(tmp_path / "out" / "receipt_0.json"), *arguments])
    return code, capsys.readouterr().out


def test_at_a_terminal_a_receipt_is_asked_for_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT.decode().strip() + "\n")
    prompt, out = str(tmp_path / "prompt.txt"), tmp_path / "out"
    with server_process(tmp_path, "--role", "target", "--receipt_keys", str(tmp_path / "keys")) as server:
        asking = ["client", "--port", str(server.port), "--prompt", PROMPT.decode().strip(), "--receipts", str(out)]
        assert main([*asking, "--temperature", "0.8", "--max_new_tokens", "20"]) == 0
    capsys.readouterr()
    toy_model = ("--backend", "toy", "--prompt", prompt)
    code, said = _check(tmp_path, capsys, *toy_model, "--keys", str(tmp_path / "keys" / "published.json"))
    assert code == 0 and said.splitlines()[-1].split() == ["receipt", "right"], said
    assert _check(tmp_path, capsys, *toy_model, "--model", "salt=1")[0] == CheckOutcome.OTHER_WEIGHTS
    code, said = _check(tmp_path, capsys, "--signature_only", "--json")
    assert code == 0 and json.loads(said)["outcome"] == "right"
    open_keys(tmp_path / "others", 90)
    others = str(tmp_path / "others" / "published.json")
    assert _check(tmp_path, capsys, "--signature_only", "--keys", others)[0] == CheckOutcome.FORGED
    document = json.loads((out / "receipt_0.json").read_text())
    document["receipt"]["served"]["rounds"] += 1
    (out / "receipt_0.json").write_text(json.dumps(document))
    code, said = _check(tmp_path, capsys, "--signature_only")
    assert code == CheckOutcome.FORGED and "not of the key that the receipt names" in said
    (out / "receipt_0.json").write_text("{}")
    assert main(["check", str(out / "receipt_0.json"), "--signature_only"]) == 2
    assert main(["check", str(out / "receipt_0.json")]) == 2


@pytest.mark.thorough
def test_after_failover_one_receipt_names_each_verifier_by_its_key(tmp_path: Path) -> None:
    """The first of two targets is killed in the middle; the worker goes on at the second, and signs one answer."""
    targets: dict[str, tuple[str, ServerProcess]] = {}
    toys = ("--backend", "toy", "--port", "0")
    try:
        for name in ("first", "second"):
            role = ("--role", "target", "--model", "step=0.01", "--receipt_keys", str(tmp_path / name))
            server = ServerProcess(tmp_path, *toys, *role, ready_file=f"{name}.json")
            targets[server.wait_ready()] = name, server

        async def test() -> None:
            keys, killed = open_keys(tmp_path / "worker", 90), ""
            async with distributed(",".join(targets), config=LOOKUP_FIRST) as (generator, client):
                request = ids(PROMPT, COUNT, receipt=True, sampling=SAMPLED, ignore_end_of_sequence=True)
                seen = 0
                async for event in _own(generator, keys)(request):
                    seen += len(getattr(event, "token_ids", ()))
                    if seen > 10 and not killed:
                        killed, server = targets[client.address]
                        os.kill(server.process.pid, signal.SIGKILL)
                        server.process.wait()
                    end = event
            signed, (other,) = read_signed(end.receipt), {"first", "second"} - {killed}
            published = [open_keys(tmp_path / name, 90).public for name in (killed, other)]
            assert [each.key for each in signed.receipt.served.verifiers] == published
            assert signed.receipt.token_ids == oracle(PROMPT, SAMPLED, COUNT, past_the_end=True)
            assert overall(await _findings(signed)) is CheckOutcome.RIGHT

        run(test())
    finally:
        for _, server in targets.values():
            if server.process.poll() is None:
                server.process.kill()
                server.process.wait()


async def test_a_forged_signature_ends_the_check_before_a_model_is_loaded(keys: Keys) -> None:
    async with _plain(keys) as generate:
        signed = await _receipt(generate, sampling=GREEDY)
    config = CheckConfig(Path(), tuple(PROMPT), replace(draft_config(None, 1, 160), model="no"))
    assert overall(await check(config, replace(signed, signature=bytes(64)))) is CheckOutcome.FORGED


def test_a_file_without_end_is_refused_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "/dev/zero", "--signature_only"]) == 2
    assert "receipt: /dev/zero: longer than 16777216 bytes" in capsys.readouterr().err
