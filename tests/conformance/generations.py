"""Cases of Generate, which every architecture answers alike."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc

from tandem.receipts.keys import signature_right
from tandem.receipts.receipt import read_signed
from tandem.rpc.received_errors import TandemError
from tandem.speculation.chat import ChatMessage
from tandem.speculation.request import Drafts
from tandem.speculation.types import Chunk, FinishReason, GenerationRequest, InvalidField, SamplingParams
from tandem.v1 import generation_pb2
from tests.conformance.bench import Bench
from tests.reliability.faults import Fault, Schedule
from tests.services.prefill_sites import asks, prefill_site, wake
from tests.support import HANG, Answer, answer, toy
from tests.support import refusal as refused

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=7)
COUNT = 16


async def _equals_plain(bench: Bench, sampling: SamplingParams, number: int = 0, **rest: Any) -> None:
    prompt = bench.prompt(number)
    expected = await bench.expected(prompt, sampling, COUNT)
    got = await bench.ask(prompt, COUNT, sampling=sampling, **rest)
    assert list(got.token_ids) == expected, f"{sampling} {rest}: not what the target alone says"
    stats = got.completion.stats
    counts = stats.acceptance_histogram
    assert (sum(counts), sum(n * rounds for n, rounds in enumerate(counts))) == (stats.rounds, stats.accepted), stats


def _lengths(bench: Bench) -> range:
    return range(bench.info.max_speculation_length + 1)


async def greedy_output_equals_plain(bench: Bench) -> None:
    """Greedy output is that of plain target decoding, at every speculation length."""
    for k in _lengths(bench):
        await _equals_plain(bench, GREEDY, speculation_length=k)


async def sampled_output_depends_on_seed_only(bench: Bench) -> None:
    """Sampled output follows from prompt and seed, at every speculation length; another seed, other tokens."""
    for k in _lengths(bench):
        await _equals_plain(bench, SAMPLED, speculation_length=k)
    other = await bench.ask(bench.prompt(), COUNT, sampling=SamplingParams(temperature=0.9, top_k=40, seed=8))
    assert list(other.token_ids) != await bench.expected(bench.prompt(), SAMPLED, COUNT)


async def k_zero_equals_plain(bench: Bench) -> None:
    """A request without drafts is plain decoding and says so: nothing drafted, one token a round."""
    await _equals_plain(bench, GREEDY, speculation_length=0)
    stats = (await bench.ask(bench.prompt(), COUNT, speculation_length=0)).completion.stats
    assert (stats.drafted, stats.accepted) == (0, 0)


async def chosen_drafts_equal_plain(bench: Bench) -> None:
    """Whatever a request chooses to draft with, output is plain decoding's; what is not there is refused by name."""
    refusals = []
    for drafts in Drafts:
        for sampling in (GREEDY, SAMPLED):
            try:
                await _equals_plain(bench, sampling, drafts=drafts)
            except (InvalidField, TandemError) as refusal:
                assert f"drafts: {drafts.value} is not available" in str(refusal), refusal
                refusals.append(drafts)
    assert not {Drafts.AUTO, Drafts.NONE} & set(refusals) and len(set(refusals)) < 3, refusals


async def predictions_change_no_token(bench: Bench) -> None:
    """Whatever was predicted, output is plain decoding's, also where nothing else drafts."""
    for sampling in (GREEDY, SAMPLED):
        for prediction in ("a", "the answer, or so it was thought"):
            await _equals_plain(bench, sampling, prediction=prediction)


async def messages_equal_a_chat(bench: Bench) -> None:
    """A chat of one message says what its text with the option `chat` says; each further message is in the prompt."""

    async def asked(**prompt: Any) -> Answer:
        request = GenerationRequest(max_new_tokens=COUNT, ignore_end_of_sequence=True, **prompt)
        return await asyncio.wait_for(answer(bench.generate, request), HANG)

    last = ChatMessage("user", "Name a colour.")
    one, same = await asked(messages=(last,)), await asked(text=last.content, chat=True)
    assert one.token_ids == same.token_ids and one.completion.prompt_tokens == same.completion.prompt_tokens
    turns = (ChatMessage("user", "Hello."), ChatMessage("assistant", "Hello, what shall I do?"), last)
    assert (await asked(messages=turns)).completion.prompt_tokens > one.completion.prompt_tokens


async def receipts_are_of_the_answer(bench: Bench) -> None:
    """A receipt is of the answer, signed by the key that is published; a server without keys refuses by name."""
    front, message = bench.front
    wanted = {"token_ids": {"ids": bench.prompt()}, "max_new_tokens": COUNT, "receipt": True}
    call = front.Generate(message(generation=generation_pb2.Generation(ignore_end_of_sequence=True, **wanted)))
    if not bench.info.receipt_key:
        refusal = await refused(call)
        assert (refusal.code, refusal.field) == ("INVALID_ARGUMENT", "receipt"), refusal
        return
    replies = [reply async for reply in call]
    signed = read_signed(replies[-1].completion.receipt)
    receipt, tokens = signed.receipt, [token for reply in replies for token in reply.chunk.token_ids]
    assert receipt.key == bench.info.receipt_key and signature_right(signed)
    assert tokens == list(receipt.token_ids) == await bench.expected(bench.prompt(), GREEDY, COUNT)
    assert receipt.chained() and receipt.of_prompt(signed.salt, bench.prompt())
    both = generation_pb2.Generation(rule=generation_pb2.VERIFICATION_RULE_REJECTION, **wanted)
    refusal = await refused(front.Generate(message(generation=both)))
    assert (refusal.code, refusal.field) == ("INVALID_ARGUMENT", "receipt"), refusal


async def neighbours_change_nothing(bench: Bench) -> None:
    """More requests at once than there are slots: each gets its own tokens."""
    numbers = range(bench.info.kv_slots + 2)
    await asyncio.gather(*(_equals_plain(bench, SAMPLED if n % 2 else GREEDY, n) for n in numbers))


async def adapters_are_kept_apart(bench: Bench) -> None:
    """Requests of each adapter and of none at once: each says what the target with its adapter says alone."""
    expected = {name: await bench.expected(bench.prompt(), SAMPLED, COUNT, name) for name in ("", *bench.adapters())}
    names = [name for name in expected for _ in range(2)]
    got = await asyncio.gather(*(bench.ask(bench.prompt(), COUNT, sampling=SAMPLED, adapter=name) for name in names))
    assert [list(answer.token_ids) for answer in got] == [expected[name] for name in names]
    assert len(set(map(tuple, expected.values()))) == len(expected), "the adapters change nothing"


async def unknown_adapter_is_named(bench: Bench) -> None:
    """An adapter that is not there is INVALID_ARGUMENT and named."""
    front, message = bench.front
    fields = {"token_ids": {"ids": bench.prompt()}, "adapter": "no-adapter-is-called-so"}
    refusal = await refused(front.Generate(message(generation=generation_pb2.Generation(**fields))))
    assert refusal.code == "INVALID_ARGUMENT", refusal
    assert "no-adapter-is-called-so" in refusal.message


async def prefill_elsewhere_equals_plain(bench: Bench) -> None:
    """Prompts that a PrefillWorker computes, whole or until it is lost: same output, and no slot stays behind."""
    assert bench.inside and bench.inside.sites[0].engine
    engine = bench.inside.sites[0].engine
    async with prefill_site(toy(max_length=engine.runner.limits.max_length)) as worker:
        elsewhere = await asks(engine, worker.address)
        try:
            for number, answers in enumerate((None, lost_midway, None)):
                worker.faults.answer = answers
                wake(engine)
                for sampling in (GREEDY, SAMPLED):
                    prompt = bench.prompt(100 + 2 * number + sampling.greedy, 90)
                    expected = await bench.expected(prompt, sampling, COUNT)
                    assert list((await bench.ask(prompt, COUNT, sampling=sampling)).token_ids) == expected
            await bench.inside.all_free()
            counts = engine.remote_prefill
            assert counts and counts.pages >= 4 * 5 and sum(counts.fallbacks.values()) >= 1
        finally:
            engine.remote_prefill = engine.prefixes = None
            await elsewhere.close()


async def lost_midway(replies: Any, context: Any) -> Any:
    for _ in range(3):
        yield await anext(replies)
    await context.abort(grpc.StatusCode.UNAVAILABLE, "lost")


async def ends_at_a_stop_token(bench: Bench) -> None:
    """A stop token ends the output, is its last token, and nothing follows; otherwise the length does."""
    expected = await bench.expected(bench.prompt(), GREEDY, COUNT)
    stop = expected[9]
    got = await bench.ask(bench.prompt(), COUNT, stop_token_ids=(stop,))
    assert list(got.token_ids) == expected[: expected.index(stop) + 1]
    assert got.completion.finish_reason is FinishReason.STOP_TOKEN
    assert (await bench.ask(bench.prompt(), 5)).completion.finish_reason is FinishReason.LENGTH


async def cancel_frees_slot(bench: Bench) -> None:
    """More requests than slots are left in the middle, one after another; the next one is served."""
    for _ in range(bench.info.kv_slots + 1):
        request = GenerationRequest(token_ids=tuple(bench.prompt()), max_new_tokens=COUNT, ignore_end_of_sequence=True)
        async with contextlib.aclosing(bench.generate(request)) as events:
            await asyncio.wait_for(anext(events), HANG)
    if bench.inside:
        await bench.inside.all_free()
    await asyncio.wait_for(_equals_plain(bench, GREEDY), HANG)


async def bad_fields_are_named(bench: Bench) -> None:
    """Each bad field is INVALID_ARGUMENT and named, and the server goes on."""
    front, message = bench.front
    vocabulary, most = bench.info.vocab_size, bench.info.max_speculation_length
    good = {"ids": bench.prompt()}
    too_many = ("speculation_length", {"token_ids": good, "speculation_length": most + 1})  # where something drafts
    for field, fields in (
        ("prompt", {}),
        ("prompt", {"text": ""}),
        ("prompt", {"token_ids": {"ids": [1, vocabulary]}}),
        ("temperature", {"token_ids": good, "sampling": {"temperature": float("nan")}}),
        ("temperature", {"token_ids": good, "sampling": {"temperature": -1.0}}),
        ("top_p", {"token_ids": good, "sampling": {"top_p": 0.0}}),
        ("min_p", {"token_ids": good, "sampling": {"min_p": 1.5}}),
        ("max_new_tokens", {"token_ids": good, "max_new_tokens": 0}),
        ("stop_token_ids", {"token_ids": good, "stop_token_ids": [vocabulary]}),
        ("stop_strings", {"token_ids": good, "stop_strings": [""]}),
        ("rule", {"token_ids": good, "rule": 77}),
        ("drafts", {"token_ids": good, "drafts": 77}),
        ("messages", {"messages": {}}),
        ("messages[0].role", {"messages": {"messages": [{"role": "nobody", "content": "x"}]}}),
        *(() if bench.combination.architecture == "distributed" else (too_many,)),
    ):
        request = message(generation=generation_pb2.Generation(**fields))
        refusal = await refused(front.Generate(request))
        assert (refusal.code, refusal.field) == ("INVALID_ARGUMENT", field), f"{fields}: {refusal}"
    await _equals_plain(bench, GREEDY)


async def too_long_is_out_of_range(bench: Bench) -> None:
    """What cannot fit into the sequence length is OUT_OF_RANGE, before anything is computed."""
    front, message = bench.front
    longest = bench.info.max_sequence_length
    for fields in (
        {"token_ids": {"ids": [1] * longest}},
        {"token_ids": {"ids": [1] * 10}, "max_new_tokens": longest},
        {"token_ids": {"ids": [1] * 10}, "max_total_tokens": longest + 1},
    ):
        refusal = await refused(front.Generate(message(generation=generation_pb2.Generation(**fields))))
        assert (refusal.code, refusal.reason) == ("OUT_OF_RANGE", "SEQUENCE_TOO_LONG"), refusal


async def model_info_states_limits(bench: Bench) -> None:
    """GetModelInfo says the limits and the tokenizer that requests are held to."""
    info = bench.info
    assert info.vocab_size > 0 and info.max_sequence_length > 0 and info.kv_slots > 0
    assert info.max_speculation_length > 0 and info.tokenizer_sha256


async def drain_refuses_new_and_finishes_running(bench: Bench) -> None:
    """A draining server refuses new work as UNAVAILABLE, and finishes what runs with every token."""
    assert bench.inside
    expected = await bench.expected(bench.prompt(), GREEDY, COUNT)
    lifecycle = bench.inside.sites[-1].lifecycle
    request = GenerationRequest(token_ids=tuple(bench.prompt()), max_new_tokens=COUNT, ignore_end_of_sequence=True)
    tokens: list[int] = []
    async with contextlib.aclosing(bench.generate(request)) as events:
        tokens += (await anext(events)).token_ids
        lifecycle.accepting = False
        front, message = bench.front
        refusal = await refused(front.Generate(message(generation={"token_ids": {"ids": bench.prompt()}})))
        assert (refusal.code, refusal.reason) == ("UNAVAILABLE", "DRAINING"), refusal
        async for event in events:
            if isinstance(event, Chunk):
                tokens += event.token_ids
    lifecycle.accepting = True
    assert tokens == expected


async def resume_after_expiry(bench: Bench) -> None:
    """A session whose lease runs out after every chunk is opened again with its tokens: same output."""
    assert bench.inside
    expected = await bench.expected(bench.prompt(), SAMPLED, COUNT)
    request = GenerationRequest(
        token_ids=tuple(bench.prompt()), max_new_tokens=COUNT, sampling=SAMPLED, ignore_end_of_sequence=True
    )
    tokens: list[int] = []
    expired = 0
    async for event in bench.generate(request):
        tokens += event.token_ids if isinstance(event, Chunk) else ()
        expired += await bench.inside.expire()
    assert tokens == expected
    assert expired or bench.combination.transport != "unary", "no lease ran out"


async def lost_replies_cost_no_token(bench: Bench) -> None:
    """Half of the replies between draft and target are lost after they were applied: same output."""
    bench.faults.schedule = Schedule(seed=1, rate=0.5, in_a_row=3, most=50, only=(Fault.ABORT_AFTER,))
    before = len(bench.faults.history.events)
    try:
        for sampling in (GREEDY, SAMPLED):
            await _equals_plain(bench, sampling)
    finally:
        bench.faults.schedule = None
    assert [e for e in bench.faults.history.events[before:] if e.kind == "fault"], "no reply was lost"
