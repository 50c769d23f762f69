"""`import tandem`, Client and AsyncClient against toy servers: outputs, failover, deadlines, TLS, tokens, forks."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

import tandem
from tandem.launch import free_port
from tandem.services.security.access import Security
from tandem.services.security.callers import AcceptedTokens
from tests.services.certificates import Authority, token_file
from tests.support import GREEDY, HANG, REPOSITORY, SAMPLED, fused_site, oracle, run, server_process, target_site, toy
from tests.toy import ToyConfig

T = TypeVar("T")
PROMPT = b"the public interface"
SAID = oracle(PROMPT, GREEDY, 12)


def text_of(tokens: tuple[int, ...]) -> str:
    return "".join(bytes([token]).decode("latin-1") for token in tokens if token < 256)


def beside(site: Callable[..., object], ask: Callable[[str], T], **options: object) -> T:
    """What `ask` returns for the address of a site, called in a thread: it blocks."""

    async def test() -> T:
        async with site(**options) as found:
            return await asyncio.to_thread(ask, found.address)

    return run(test())


@pytest.mark.parametrize("site", [target_site, fused_site])
def test_a_client_generates_with_whichever_service_answers(site) -> None:
    def ask(address: str) -> tuple[tandem.Completion, tandem.SpeculationStats | None]:
        with tandem.Client(address) as client:
            return client.generate(PROMPT.decode(), max_new_tokens=12), client.last_statistics

    completion, last = beside(site, ask)
    assert (completion.token_ids, completion.text) == (SAID, text_of(SAID))
    assert (completion.prompt_tokens, completion.output_tokens) == (len(PROMPT), 12)
    assert completion.finish_reason is tandem.FinishReason.LENGTH
    assert completion.statistics == last and last.rounds > 0


@pytest.mark.parametrize("timeout", [math.inf, 1e10])
def test_a_timeout_that_no_request_reaches_is_none(timeout: float) -> None:
    def ask(address: str) -> tandem.Completion:
        with tandem.Client(address, retry_seconds=1) as client:
            return client.generate(PROMPT, max_new_tokens=12, timeout=timeout)

    assert beside(target_site, ask).token_ids == SAID


def test_a_stream_yields_chunks_as_they_come_and_sampling_is_the_requests_own() -> None:
    def ask(address: str) -> list[tandem.Chunk]:
        with tandem.Client([address]) as client:
            sampling = tandem.SamplingParams(SAMPLED.temperature, SAMPLED.top_k, SAMPLED.top_p, SAMPLED.min_p, 7)
            return list(client.stream(PROMPT, sampling, max_new_tokens=12, ignore_end_of_sequence=True))

    chunks = beside(target_site, ask)
    tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
    assert tokens == oracle(PROMPT, SAMPLED, 12, past_the_end=True) and len(chunks) > 1
    assert "".join(chunk.text for chunk in chunks) == text_of(tokens)


def test_many_requests_and_threads_share_a_client() -> None:
    prompts = [f"prompt {i}" for i in range(12)]

    def ask(address: str) -> list[tandem.Completion]:
        found: dict[str, tandem.Completion] = {}
        with tandem.Client(address) as client:
            threads = [
                threading.Thread(target=lambda p=p: found.update({p: client.generate(p, max_new_tokens=6)}))
                for p in prompts
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return [found[prompt] for prompt in prompts]

    completions = beside(target_site, ask)
    assert [c.token_ids for c in completions] == [oracle(p.encode(), GREEDY, 6) for p in prompts]


async def test_leaving_a_stream_early_frees_the_slot() -> None:
    async with target_site(toy(ToyConfig(step_seconds=0.01))) as site:

        def ask() -> None:
            with tandem.Client(site.address) as client:
                for chunk in client.stream(PROMPT, ignore_end_of_sequence=True):
                    assert chunk.token_ids
                    break

        await asyncio.to_thread(ask)
        give_up = time.monotonic() + HANG
        while site.free < 4:
            assert time.monotonic() < give_up
            await asyncio.sleep(0.01)


# --- what goes wrong ---


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: 0"),
        ({"rule": "majority"}, "rule"),
        ({"stop": [""]}, "stop: an empty string"),
    ],
)
def test_a_wrong_request_is_a_value_error_before_anything_is_sent(arguments: dict, said: str) -> None:
    with tandem.Client(f"127.0.0.1:{free_port()}") as client:
        for method in (client.generate, client.stream):
            with pytest.raises(ValueError, match=said):
                method("x", **arguments)


def test_a_deadline_ends_a_request_and_says_what_came_before_it() -> None:
    def ask(address: str) -> None:
        with tandem.Client(address) as client:
            client.model_info()
            client.generate(PROMPT, ignore_end_of_sequence=True, timeout=0.5)

    with pytest.raises(tandem.TandemError) as late:
        beside(target_site, ask, runner=toy(ToyConfig(step_seconds=0.02)))
    assert late.value.code == "DEADLINE_EXCEEDED"
    produced = late.value.produced
    assert produced == oracle(PROMPT, GREEDY, len(produced), past_the_end=True)


def test_a_closed_client_refuses_and_closing_ends_what_is_under_way() -> None:
    codes: list[str] = []

    def ask(address: str) -> None:
        client = tandem.Client(address)
        started = threading.Event()

        def stream() -> None:
            try:
                for _ in client.stream(PROMPT, ignore_end_of_sequence=True):
                    started.set()
            except tandem.TandemError as error:
                codes.append(error.code)

        thread = threading.Thread(target=stream)
        thread.start()
        assert started.wait(HANG)
        client.close()
        thread.join(HANG)
        client.close()
        with pytest.raises(tandem.TandemError, match="closed"):
            client.generate("x")

    beside(target_site, ask, runner=toy(ToyConfig(step_seconds=0.05)))
    assert codes == ["CANCELLED"]


# --- TLS and tokens ---


def test_tls_and_a_token_let_a_client_in(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    accepted = AcceptedTokens(token_file(tmp_path / "accepted", "alice one-long-enough-token\n"))
    shown = token_file(tmp_path / "shown", "one-long-enough-token\n")
    security = Security(tls=authority.server(), tokens=accepted)

    def ask(address: str) -> tuple[int, ...]:
        credentials = tandem.Credentials(ca=str(authority.ca), token_file=shown)
        with tandem.Client(address, credentials=credentials) as client:
            return client.generate(PROMPT, max_new_tokens=12).token_ids

    assert beside(target_site, ask, security=security) == SAID


CHILD = """
import asyncio, os, signal, sys
import tandem

address, used = sys.argv[1], sys.argv[2] == "used"
before, shared = tandem.Client(address), tandem.AsyncClient(address)
half = before.stream("ab", max_new_tokens=64)
if used:
    next(half)
if child := os.fork():
    status = os.waitpid(child, 0)[1]
    assert len(before.generate("ab", max_new_tokens=4).token_ids) == 4
    before.close()
    sys.exit(status)
signal.alarm(60)  # ends a child that hangs
after = tandem.Client(address)
asks = {
    "made before": lambda: before.generate("ab", max_new_tokens=4),
    "iterator": lambda: next(half),
    "made after": lambda: after.generate("ab", max_new_tokens=4),
    "asynchronous": lambda: asyncio.run(shared.generate("ab", max_new_tokens=4)),
}
for name, ask in asks.items():
    try:
        print(name, bool(ask()))
    except tandem.TandemError as error:
        print(name, error.code, error.reason, "spawn" in str(error), len(str(error).splitlines()))
before.close()
after.close()
os._exit(sys.stdout.flush() or 0)
"""
REFUSED = "FAILED_PRECONDITION FORKED True 1"


def test_a_forked_child_has_an_error_or_an_answer_at_once(tmp_path: Path) -> None:
    with server_process(tmp_path, "--role", "target") as server:
        address = server.wait_ready()
        for how, made_after in (("used", REFUSED), ("unused", "True")):
            command = (sys.executable, "-c", CHILD, address, how)
            done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, cwd=REPOSITORY, check=False)
            expected = {"made before": REFUSED, "iterator": REFUSED, "made after": made_after}
            lines = [f"{name} {outcome}" for name, outcome in expected.items()] + [f"asynchronous {made_after}"]
            assert (done.returncode, done.stdout.splitlines()) == (0, lines), done.stderr


HEAVY = ("torch", "transformers", "tokenizers", "safetensors")


def python(code: str, *flags: str) -> str:
    run = subprocess.run([sys.executable, *flags, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_importing_tandem_loads_the_standard_library_alone() -> None:
    """Some of our processes run without site-packages."""
    loaded = python("import sys, tandem; print(*sorted(n for n in sys.modules if n.startswith('tandem')))", "-ESs")
    assert loaded == "tandem"


def test_the_client_loads_no_model_library() -> None:
    code = f"import sys, tandem\ntandem.Client, tandem.DraftSession\nprint(*({set(HEAVY)} & sys.modules.keys()))"
    assert python(code) == ""


@pytest.mark.parametrize("name", [name for name in tandem.__all__ if name != "compare"])
def test_a_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(tandem, name)
    assert value.__name__ == name and value.__doc__ and not value.__doc__.startswith(f"{name}(")
    assert name in dir(tandem)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nobody"):
        _ = tandem.nobody
