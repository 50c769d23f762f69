"""The gateway's worker protocol, as its stub sees it: same tokens, refusals by name, aborts, loads, the tokenizer."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tokenizers import Tokenizer

from tandem.engine.generator import RequestDefaults
from tandem.runners.toy import END, ToyConfig
from tandem.services.load import TokenRate
from tandem.speculation.types import SamplingParams
from tests.openai.site import PROMPT, asking, engine_site, one, told
from tests.services.test_errors import refusal
from tests.support import ForgetfulRunner, oracle, run, until

SAMPLED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01}
SLOW = ToyConfig(step_seconds=0.02)
LONG = 140


async def rest_of(call: Any) -> list[Any]:
    replies = []
    while (reply := await call.read()) is not grpc.aio.EOF:
        replies.append(reply)
    return replies


def drawn(seed: int, count: int = 12, **fields: Any) -> tuple[int, ...]:
    return oracle(PROMPT, SamplingParams(seed=seed, **fields), count)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("drafts", [False, True], ids=["lookup", "model"])
def test_the_tokens_are_what_the_target_alone_would_draw(stream: bool, drafts: bool) -> None:
    async def test() -> None:
        async with engine_site(ToyConfig(miss=0.3), drafts=drafts) as site:
            for fields in ({"temperature": 0.0}, {**SAMPLED, "seed": 7}):
                answer = await one(site, asking(24, stream=stream, **fields))
                expected = oracle(PROMPT, SamplingParams(**fields), 24, ToyConfig(miss=0.3))
                assert answer.tokens == expected
                assert answer.end.prompt_tokens == len(PROMPT) and answer.end.completion_tokens == len(expected)
                assert bool(answer.chunks) == stream
                if stream:
                    assert answer.chunks[-1].completion_tokens == len(expected)

    run(test())


def test_what_a_request_leaves_out_is_the_servers_default_where_it_was_given_one() -> None:
    async def test() -> None:
        async with engine_site() as site:
            given = RequestDefaults(
                SamplingParams(temperature=0.5, seed=9), 5, {"temperature": "file", "seed": "--seed"}
            )
            site.generate.generator = replace(site.generate.generator, defaults=given)
            silent = asking(n=2, ignore_eos=True)
            silent.sampling_params.ClearField("max_tokens")
            choices = await told(site, silent)
            assert [choices[i].tokens for i in range(2)] == [drawn(9 + i, 5, temperature=0.5) for i in range(2)]
            assert (await one(site, asking(temperature=0.0, seed=1))).tokens == drawn(1)

    run(test())


def test_accepted_and_rejected_draft_tokens_are_counted() -> None:
    async def test() -> None:
        async with engine_site(drafts=True) as site:
            end = (await one(site, asking(24, temperature=0.0, ignore_eos=True))).end
            assert end.spec_draft_tokens >= end.spec_accepted_tokens >= 12

    run(test())


def test_metadata_of_a_call_choose_what_drafts_and_the_tokens_stay_the_same() -> None:
    async def test() -> None:
        async with engine_site(drafts=True) as site:
            expected = oracle(PROMPT, SamplingParams(), 24)
            for drafts in ("auto", "none", "model"):
                call = site.stub.Generate(asking(24, temperature=0.0), metadata=(("x-tandem-drafts", drafts),))
                (reply,) = await rest_of(call)
                assert tuple(reply.complete.output_ids) == expected
                assert bool(reply.complete.spec_draft_tokens) == (drafts != "none")
            for drafts, named in (("lookup", "this server has auto, none, model"), ("ngram", "'ngram' is not one of")):
                call = site.stub.Generate(asking(), metadata=(("x-tandem-drafts", drafts),))
                with pytest.raises(grpc.aio.AioRpcError, match=f"drafts: .*{named}") as caught:
                    await rest_of(call)
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(test())


@pytest.mark.parametrize(("key", "said"), [("receipt", "receipt: this protocol has no place"), ("draft", "draft: not")])
def test_metadata_of_ours_that_are_not_served_are_refused_by_name(key: str, said: str) -> None:
    async def test() -> None:
        async with engine_site() as site:
            call = site.stub.Generate(asking(), metadata=((f"x-tandem-{key}", "true"), ("x-other", "true")))
            with pytest.raises(grpc.aio.AioRpcError, match=said) as caught:
                await rest_of(call)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (await rest_of(site.stub.Generate(asking(), metadata=(("x-other", "true"),))))[0].HasField(
                "complete"
            )

    run(test())


def test_choice_i_draws_with_the_seed_plus_i() -> None:
    async def test() -> None:
        async with engine_site(slots=2) as site:
            for stream in (False, True):
                choices = await told(site, asking(n=3, seed=2**31 - 2, stream=stream, **SAMPLED))
                assert {i: choice.tokens for i, choice in choices.items()} == {
                    i: drawn(2**31 - 2 + i, **SAMPLED) for i in range(3)
                }

    run(test())


@pytest.mark.parametrize("seeds", [4, pytest.param(20, marks=pytest.mark.thorough)])
def test_choices_that_are_not_streamed_come_in_order_whichever_ends_first(seeds: int) -> None:
    """The gateway numbers them as they come."""
    fields = {"temperature": 2.0}

    async def test() -> None:
        async with engine_site() as site:
            for seed in range(seeds):
                replies = await rest_of(site.stub.Generate(asking(LONG, n=3, seed=seed, **fields)))
                assert [reply.complete.index for reply in replies] == [0, 1, 2]
                tokens = [tuple(reply.complete.output_ids) for reply in replies]
                assert tokens == [drawn(seed + i, LONG, **fields) for i in range(3)]
                lengths.append([len(each) for each in tokens])

    lengths: list[list[int]] = []
    run(test())
    assert sum(each != sorted(each) for each in lengths) >= seeds // 4, "later choices end first"


def test_a_negative_seed_is_one_of_its_own_and_wraps_over_zero() -> None:
    async def test() -> None:
        async with engine_site() as site:
            choices = await told(site, asking(n=2, seed=-1, **SAMPLED))
            assert (choices[0].tokens, choices[1].tokens) == (drawn(2**64 - 1, **SAMPLED), drawn(0, **SAMPLED))

    run(test())


def test_without_temperature_and_seed_a_request_is_drawn_anew_at_temperature_1(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = iter((11, 12))
    monkeypatch.setattr("tandem.services.engine_port.conversion.random.getrandbits", lambda bits: next(seeds))

    async def test() -> None:
        async with engine_site() as site:
            for seed in (11, 12):
                assert (await one(site, asking())).tokens == drawn(seed, temperature=1.0)

    run(test())


def test_stops_and_lengths_end_a_generation_and_say_so() -> None:
    async def test() -> None:
        async with engine_site() as site:
            truth = oracle(PROMPT, SamplingParams(), LONG)
            token = next(t for t in truth if t < 128)
            ending = await one(site, asking(LONG, temperature=0.0, stop_token_ids=[token]))
            cut = truth.index(token) + 1
            assert ending.tokens == truth[:cut]
            assert (ending.end.finish_reason, ending.end.matched_token_id) == ("stop", token)
            ending = await one(site, asking(LONG, temperature=0.0, stop=[chr(token)]))
            assert ending.tokens == truth[:cut]
            assert (ending.end.finish_reason, ending.end.matched_stop_str) == ("stop", chr(token))
            ending = await one(site, asking(2, temperature=0.0))
            assert (ending.end.finish_reason, ending.end.WhichOneof("matched_stop")) == ("length", None)

    run(test())


def test_the_end_of_sequence_ends_it_unless_it_is_ignored() -> None:
    async def test() -> None:
        async with engine_site() as site:
            seed = next(s for s in range(200) if END in drawn(s, 40, temperature=2.0))
            ended = await one(site, asking(40, temperature=2.0, seed=seed))
            assert ended.tokens[-1] == END and ended.end.finish_reason == "stop"
            went_on = await one(site, asking(40, temperature=2.0, seed=seed, ignore_eos=True))
            assert len(went_on.tokens) == 40 and went_on.end.finish_reason == "length"

    run(test())


REFUSED: dict[str, Any] = {"prompt_logprobs": 1, "min_tokens": 1, "truncate_prompt_tokens": 3, "structural_tag": "a"}


@pytest.mark.parametrize(("name", "value"), REFUSED.items())
def test_what_is_not_served_is_refused_by_name(name: str, value: Any) -> None:
    async def test() -> None:
        async with engine_site() as site:
            refused = await refusal(site.stub.Generate(asking(**{name: value})))
            assert (refused.code, refused.message) == ("INVALID_ARGUMENT", f"{name}: not served")

    run(test())


def test_every_field_of_a_request_is_read_or_refused() -> None:
    """A field that the protocol gains, and nobody here knows, would be left out in silence."""
    read = {
        *("temperature", "top_p", "top_k", "min_p", "seed", "n", "logprobs"),
        *("max_tokens", "stop", "stop_token_ids", "ignore_eos"),
        *("logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("json_schema", "json_object", "regex", "choice", "grammar"),
    }
    theirs = {  # the gateway makes the text of what we send as token ids
        *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
        "grammar_from_first_token",  # ours always does: no server parses thoughts
    }
    assert {field.name for field in pb.SamplingParams.DESCRIPTOR.fields} == read | theirs | REFUSED.keys()
    from tandem.services.engine_port.conversion import _INPUTS_NOT_SERVED

    known = {"request_id", "tokenized", "text", "sampling_params", "stream"}
    assert {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields} == known | set(_INPUTS_NOT_SERVED)


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        (lambda r: r.sampling_params.MergeFrom(pb.SamplingParams(temperature=-1.0)), "INVALID_ARGUMENT", "temperature"),
        (lambda r: r.sampling_params.MergeFrom(pb.SamplingParams(n=129)), "INVALID_ARGUMENT", "n"),
        (lambda r: r.sampling_params.stop.extend(["x"] * 65), "INVALID_ARGUMENT", "stop"),
        (lambda r: r.tokenized.input_ids.append(258), "INVALID_ARGUMENT", "prompt"),
        (lambda r: r.ClearField("tokenized"), "INVALID_ARGUMENT", "prompt"),
        (lambda r: r.sampling_params.logit_bias.update({-1: 2.0}), "INVALID_ARGUMENT", "logit_bias"),
        (lambda r: r.sampling_params.MergeFrom(pb.SamplingParams(logprobs=21)), "INVALID_ARGUMENT", "logprobs"),
        (lambda r: r.sampling_params.MergeFrom(pb.SamplingParams(regex="(")), "INVALID_ARGUMENT", "structure"),
        (lambda r: r.mm_inputs.SetInParent(), "INVALID_ARGUMENT", "mm_inputs"),
        (lambda r: r.tokenized.input_ids.extend([1] * 200), "OUT_OF_RANGE", "the prompt has 205 tokens"),
    ],
)
def test_a_wrong_request_is_refused_with_the_field(change: Callable[[Any], object], code: str, named: str) -> None:
    async def test() -> None:
        async with engine_site() as site:
            request = asking()
            change(request)
            refused = await refusal(site.stub.Generate(request))
            assert refused.code == code and refused.message.startswith(named)

    run(test())


@pytest.mark.parametrize("how", ["Abort", "cancel"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_request_that_ends_early_frees_its_slots_within_a_step(how: str, n: int) -> None:
    async def test() -> None:
        async with engine_site(SLOW, slots=4) as site:
            call = site.stub.Generate(asking(LONG, n=n, stream=True, ignore_eos=True, request_id="mine"))
            assert (await call.read()).HasField("chunk")
            await until(lambda: site.engine.slots.free == 4 - n)
            if how == "cancel":
                call.cancel()
            else:
                await site.stub.Abort(pb.AbortRequest(request_ids=["unknown", "mine"]))
            steps = site.runner.steps
            await until(lambda: site.engine.slots.free == 4)
            assert site.runner.steps <= steps + 1
            if how == "Abort":
                ends = [reply.complete for reply in await rest_of(call) if reply.HasField("complete")]
                assert sorted((end.index, end.finish_reason) for end in ends) == [(i, "abort") for i in range(n)]
            assert (await one(site, asking(4, temperature=0.0))).tokens == drawn(0, 4)

    run(test())


def test_a_request_that_waits_for_a_slot_can_be_aborted() -> None:
    async def test() -> None:
        async with engine_site(SLOW, slots=1) as site:
            first = site.stub.Generate(asking(LONG, ignore_eos=True, stream=True))
            await first.read()
            waiting = site.stub.Generate(asking(LONG, request_id="waits"))
            await until(lambda: site.engine.slots.waiting == 1)
            await site.stub.Abort(pb.AbortRequest(request_ids=["waits"]))
            assert (await waiting.read()).complete.finish_reason == "abort"
            assert site.engine.slots.waiting == 0

    run(test())


def test_a_full_server_refuses_all_choices_or_none() -> None:
    async def test() -> None:
        async with engine_site(SLOW, slots=1, queue=0) as site:
            first = site.stub.Generate(asking(LONG, ignore_eos=True, stream=True))
            await first.read()
            refused = await refusal(site.stub.Generate(asking()))
            assert refused.code == "RESOURCE_EXHAUSTED" and "1 requests are under way" in refused.message
            first.cancel()
            await until(lambda: site.engine.slots.free == 1)
            refused = await refusal(site.stub.Generate(asking(LONG, n=2, ignore_eos=True)))
            assert refused.code == "RESOURCE_EXHAUSTED"
            await until(lambda: site.engine.slots.free == 1 and site.generate.under_way == 0)

    run(test())


def test_a_stopping_server_takes_nothing_new_and_is_not_healthy() -> None:
    async def test() -> None:
        async with engine_site() as site:
            assert (await site.stub.HealthCheck(pb.HealthCheckRequest())).healthy
            site.lifecycle.accepting = False
            assert not (await site.stub.HealthCheck(pb.HealthCheckRequest())).healthy
            assert (await site.stub.GetServerInfo(pb.GetServerInfoRequest())).is_paused
            assert (await refusal(site.stub.Generate(asking()))).code == "UNAVAILABLE"

    run(test())


def test_a_failing_choice_ends_the_request_with_its_reason() -> None:
    async def test() -> None:
        async with engine_site(ToyConfig(fails=3)) as site:
            assert (await refusal(site.stub.Generate(asking(LONG, n=2, ignore_eos=True)))).code == "UNAVAILABLE"

    run(test())


def test_loads_are_those_of_the_moment() -> None:
    async def test() -> None:
        async with engine_site(SLOW, slots=2) as site:

            async def load() -> Any:
                (found,) = (await site.stub.GetLoads(pb.GetLoadsRequest())).loads
                return found

            assert (await load()).num_total_reqs == 0
            calls = [site.stub.Generate(asking(LONG, ignore_eos=True, stream=True)) for _ in range(3)]
            await until(lambda: site.engine.slots.waiting == 1 and float(site.generate.produced) > 0)
            busy = await load()
            assert (busy.num_running_reqs, busy.num_waiting_reqs, busy.max_running_requests) == (2, 1, 2)
            assert busy.token_usage == busy.utilization == 1.0 and busy.gen_throughput > 0
            assert (await site.stub.GetServerInfo(pb.GetServerInfoRequest())).active_requests == 3
            for call in calls:
                call.cancel()
            await until(lambda: site.engine.slots.free == 2)
            assert (await load()).num_total_reqs == 0

    run(test())


def test_the_token_rate_is_that_of_the_last_ten_seconds() -> None:
    now = 100.0
    rate = TokenRate(lambda: now)
    rate.add(30)
    assert float(rate) == 30.0  # less than a second counts as one
    now = 103.0
    rate.add(30)
    assert float(rate) == 20.0
    now = 111.5
    assert float(rate) == 3.0
    now = 200.0
    assert float(rate) == 0.0


def test_the_tokenizer_comes_as_a_zip_with_its_hash_and_is_the_server_s() -> None:
    async def test() -> None:
        async with engine_site() as site:
            for _ in range(2):
                chunks = [chunk async for chunk in site.stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
                data = b"".join(chunk.data for chunk in chunks)
                assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [
                    hashlib.sha256(data).hexdigest()
                ]
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                tokenizer = Tokenizer.from_str(archive.read("tokenizer.json").decode())
            text = "héllo\n\t ☃ wörld"
            assert tokenizer.encode(text).ids == list(text.encode())
            assert tokenizer.decode([*text.encode(), END]) == text

    run(test())


def test_the_model_is_described() -> None:
    async def test() -> None:
        async with engine_site() as site:
            info = await site.stub.GetModelInfo(pb.GetModelInfoRequest())
            assert (info.served_model_name, info.is_generation, info.vocab_size) == ("toy", True, 258)
            assert (info.max_context_length, list(info.eos_token_ids)) == (160, [END])

    run(test())


@pytest.mark.parametrize("method", ["Embed", "FlushCache", "StartProfile", "StopProfile", "SubscribeKvEvents"])
def test_methods_that_are_not_served_say_so(method: str) -> None:
    async def test() -> None:
        async with engine_site() as site:
            requests = {"Embed": pb.EmbedRequest, "SubscribeKvEvents": common_pb2.SubscribeKvEventsRequest}
            request = requests.get(method) or getattr(common_pb2, f"{method}Request")
            assert (await refusal(getattr(site.stub, method)(request()))).code == "UNIMPLEMENTED"

    run(test())


def test_lookup_speculates_here_too_and_changes_no_token() -> None:
    async def test() -> None:
        async with engine_site(ToyConfig(step_seconds=0.002), kind=ForgetfulRunner) as site:  # where copies pay
            answer = await one(site, asking(60, temperature=0.0, ignore_eos=True))
            assert answer.tokens == oracle(PROMPT, SamplingParams(), 60, past_the_end=True, memory=1)
            assert answer.end.spec_accepted_tokens > 0

    run(test())


def test_many_aborts_and_answers_at_once_leave_nothing_behind() -> None:
    async def test() -> None:
        async with engine_site(ToyConfig(step_seconds=0.001), slots=2) as site:

            async def ask(i: int) -> None:
                call = site.stub.Generate(asking(30, n=1 + i % 3, stream=True, request_id=str(i)))
                if i % 2:
                    await call.read()
                    await site.stub.Abort(pb.AbortRequest(request_ids=[str(i)]))
                await rest_of(call)
                assert await call.code() is grpc.StatusCode.OK

            await asyncio.gather(*(ask(i) for i in range(12)))
            await until(lambda: site.engine.slots.free == 2 and site.generate.under_way == 0)

    run(test())
