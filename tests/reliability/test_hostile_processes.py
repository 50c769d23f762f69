"""A DraftWorker process with native steps, whose target lies: only a real process can die of a number."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from tandem.engine.batcher import Batcher
from tandem.engine.generators import plain_generator
from tandem.engine.loading import load
from tandem.engine.model_config import DraftChoice
from tandem.rpc.channel import DRAFT, TARGET
from tandem.rpc.generation_client import GenerationClient
from tandem.runners.eagle.files import write_head
from tests.reliability.hostile_peers import Change, changes, lying
from tests.reliability.test_hostile_peers import REFUSED, believed, outcome
from tests.runners.test_eagle import a_head, models
from tests.runners.tiny import model_folder
from tests.support import HANG, SAMPLED, ServerProcess, answer, ids, run, target_site

REQUEST = ids(b"hello there", 16, sampling=SAMPLED, ignore_end_of_sequence=True, speculation_length=3)  # no rest
LAYERS = (1, 2)
PIPELINES = ("off", "on", "never-waiting")
DRAFTS = ("model", "hybrid", "head")
DEADLY = ("258", "2147483647", "2147483648", "4294967295", "more")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), seed=5)


async def survives(
    folder: Path, place: Path, pipeline: str, draft: Sequence[str], lies: Sequence[Change], afters: Sequence[int]
) -> None:
    """A worker process meets every lie from a reply on. It stays, and says the target's tokens once that is honest."""
    batcher = Batcher("test-loading")
    loaded = await load(models(folder, "native", "float32", DraftChoice("ngram"), slots=4), batcher)
    async with (
        target_site(loaded.runner, tokenizer=loaded.tokenizer, features=LAYERS) as site,
        lying(site.address) as liar,
    ):
        tokens = (await answer(plain_generator(loaded).generate, REQUEST)).token_ids
        flags = ("--target_host", liar.address, "--pipeline", pipeline, "--port", "0", "--sequence_length", "96")
        worker = ServerProcess(place, "--role", "draft_worker", *draft, *flags)
        try:
            address = await asyncio.to_thread(worker.wait_ready, 2 * HANG)
            async with GenerationClient.connect(address, DRAFT) as client:
                drafted = (await answer(client.generate, REQUEST)).completion.stats
                assert drafted.drafted + drafted.stale_drafts
                for change in lies:
                    for after in afters:
                        liar.lie(change, after)
                        got, told = await outcome(client, REQUEST), liar.told
                        liar.lie(None)
                        assert worker.process.poll() is None, f"{change.name}: the worker ended"
                        lied = told and believed(change)
                        assert lied or got == tokens or got in REFUSED, f"{change.name}, after {after}: {got}"
                assert (await answer(client.generate, REQUEST)).token_ids == tokens
            log = worker.log.read_text()
            assert "Traceback" not in log and "unexpected error" not in log and " a step failed" not in log
        finally:
            with contextlib.suppress(ProcessLookupError):
                worker.process.kill()
            worker.process.wait()
    await batcher.close()


@pytest.mark.thorough
def test_no_number_of_a_target_ends_a_worker_with_native_steps(folder: Path, tmp_path: Path) -> None:
    """A2 of the audit: a token id outside the vocabulary was read from the embedding, which is a segmentation fault."""
    fields = ("token_ids", "accepted", "drafted", "committed_length")
    lies = [c for c in changes(TARGET, "VerifyStream") if c.path[0] in fields and c.how.endswith(DEADLY)]
    assert len(lies) > 20
    draft = ("--draft", "model", "--draft_model", str(folder))
    run(survives(folder, tmp_path, "never-waiting", draft, lies, (1,)))


@pytest.mark.thorough
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("drafts", DRAFTS)
def test_no_lie_of_a_target_ends_a_worker_with_native_steps(
    folder: Path, tmp_path: Path, drafts: str, pipeline: str
) -> None:
    """Every lie meets every pipeline and every kind of draft: those that share one divide the lies among them."""
    draft = ["--draft", drafts, "--draft_model", str(folder)]
    if drafts == "head":
        write_head(tmp_path / "head", a_head())
        draft = ["--draft", "eagle", "--draft_model", str(tmp_path / "head"), "--target_model", str(folder)]
    lies = [*changes(TARGET, "VerifyStream"), *changes(TARGET, "OpenSession"), *changes(TARGET, "CloseSession")]
    share = lies[(PIPELINES.index(pipeline) + DRAFTS.index(drafts)) % 3 :: 3]
    asyncio.run(survives(folder, tmp_path, pipeline, draft, share, (0, 2)))
