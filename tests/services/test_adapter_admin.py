"""Adapters that come and go while the server runs: by those who may, from one folder, and never under a request."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem import Client, DraftSession
from tandem.checkpoints.adapter_files import Adapter, AdapterChoice
from tandem.checkpoints.locate import CheckpointError
from tandem.cli.configuration import adapter_admin
from tandem.rpc.channel import TARGET, open_channel
from tandem.rpc.generation_client import GenerationClient
from tandem.runners.toy import BACKEND
from tandem.services.adapter_admin import AdapterAdminConfig, AdapterAdminService
from tandem.services.security import identity
from tandem.speculation.types import Chunk
from tandem.v1 import adapter_admin_pb2 as pb
from tandem.v1 import target_verifier_pb2
from tandem.v1.adapter_admin_pb2_grpc import AdapterAdminStub, add_AdapterAdminServicer_to_server
from tests.engine.test_adapters import truth
from tests.services.test_adapters import PROMPT, asking, generated
from tests.services.test_target_verifier import opening
from tests.support import GREEDY, Site, listening, raw_stub, run, run_client, run_here, server_process, target_site


def read(choice: AdapterChoice) -> Adapter:
    """Reads a toy adapter that is named by its folder, which has to be there."""
    if not Path(choice.source).is_dir():
        raise CheckpointError(f"adapters: {choice.name}: {choice.source} is not a folder")
    return BACKEND.adapter(AdapterChoice(choice.name, Path(choice.source).name))


@contextlib.asynccontextmanager
async def administered(folder: Path, *admins: str) -> AsyncIterator[tuple[Site, AdapterAdminStub]]:
    for name in ("red", "blue"):
        (folder / name).mkdir(exist_ok=True)
    async with target_site() as site:
        assert site.engine
        service = AdapterAdminService(site.engine.adapters, read, AdapterAdminConfig(folder, frozenset(admins)))
        async with (
            listening(partial(add_AdapterAdminServicer_to_server, service)) as address,
            open_channel(address) as channel,
        ):
            yield site, AdapterAdminStub(channel)


async def refusal(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return caught.value.code().name, str(caught.value.details())


def test_an_adapter_is_added_used_and_removed_while_others_are_served(tmp_path: Path) -> None:
    async def test() -> None:
        async with administered(tmp_path) as (site, admin), raw_stub(site.address) as target:
            added = await admin.AddAdapter(pb.AddAdapterRequest(name="red"))
            assert (added.adapter.name, added.adapter.revision) == ("red", "toy:red")
            await admin.AddAdapter(pb.AddAdapterRequest(name="other", folder="blue"))
            listed = (await admin.ListAdapters(pb.ListAdaptersRequest())).adapters
            assert [(each.name, each.revision) for each in listed] == [("red", "toy:red"), ("other", "toy:blue")]
            assert await generated(site, asking("other", GREEDY)) == truth("blue", GREEDY, 14, PROMPT)
            await target.OpenSession(opening(adapter="red"))
            code, said = await refusal(admin.RemoveAdapter(pb.RemoveAdapterRequest(name="red")))
            assert code == "FAILED_PRECONDITION" and "adapter red is in use by 1 requests or sessions" in said
            await target.CloseSession(target_verifier_pb2.CloseSessionRequest(session_id="s"))
            await admin.RemoveAdapter(pb.RemoveAdapterRequest(name="red"))
            code, said = await refusal(target.OpenSession(opening("t", adapter="red")))
            assert (code, said) == ("INVALID_ARGUMENT", "adapter: 'red' is not one of: other")
            await admin.AddAdapter(pb.AddAdapterRequest(name="red", folder="blue"))
            assert await generated(site, asking("red", GREEDY)) == truth("blue", GREEDY, 14, PROMPT)

    run(test())


@pytest.mark.parametrize(
    ("asked", "code", "said"),
    [
        ({"name": "green"}, "INVALID_ARGUMENT", "green is not a folder"),
        ({"name": "red", "folder": "../red"}, "INVALID_ARGUMENT", "'../red'"),
        ({"name": "red", "folder": ".."}, "INVALID_ARGUMENT", "'..'"),
        ({"name": "red", "folder": "/etc"}, "INVALID_ARGUMENT", "'/etc'"),
        ({"name": "a/b", "folder": "red"}, "INVALID_ARGUMENT", "'a/b'"),
        ({"name": ""}, "INVALID_ARGUMENT", "''"),
        ({"name": "toy", "folder": "red"}, "INVALID_ARGUMENT", "model's own name"),
        ({"name": "blue"}, "ALREADY_EXISTS", "there already"),
    ],
)
def test_what_cannot_be_added_is_refused_and_nothing_outside_the_folder_is_read(
    asked: dict[str, str], code: str, said: str, tmp_path: Path
) -> None:
    async def test() -> None:
        async with administered(tmp_path) as (site, admin):
            await admin.AddAdapter(pb.AddAdapterRequest(name="blue"))
            refused = await refusal(admin.AddAdapter(pb.AddAdapterRequest(**asked)))
            assert refused[0] == code and said in refused[1]
            assert site.engine and list(site.engine.adapters.revisions) == ["blue"]
            code_of_removal, _ = await refusal(admin.RemoveAdapter(pb.RemoveAdapterRequest(name="green")))
            assert code_of_removal == "INVALID_ARGUMENT"

    run(test())


def test_where_identities_are_named_nobody_else_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with administered(tmp_path, "alice") as (site, admin):
            calls = (
                (admin.AddAdapter, pb.AddAdapterRequest(name="red")),
                (admin.ListAdapters, pb.ListAdaptersRequest()),
                (admin.RemoveAdapter, pb.RemoveAdapterRequest(name="red")),
            )
            for call, request in calls:
                assert (await refusal(call(request)))[0] == "PERMISSION_DENIED"
            assert site.engine and site.engine.adapters.revisions == {}
            monkeypatch.setattr("tandem.services.adapter_admin.caller", lambda: "alice")
            for call, request in calls:
                await call(request)

    run(test())
    assert identity.caller() == ""


def test_flags_say_from_where_and_by_whom(tmp_path: Path) -> None:
    def config(root: Path | None, admins: str | None = None, tokens: str | None = None) -> AdapterAdminConfig | None:
        folder = root and str(root)
        return adapter_admin(
            argparse.Namespace(adapter_root=folder, adapter_admins=admins, accept_tokens=tokens, tls_client_ca=None)
        )

    assert config(None, tokens="F") is None
    assert config(tmp_path) == AdapterAdminConfig(tmp_path)
    assert config(tmp_path, "alice, bob", "F") == AdapterAdminConfig(tmp_path, frozenset({"alice", "bob"}))
    with pytest.raises(ValueError, match="name those who may add adapters"):
        config(tmp_path, tokens="F")
    with pytest.raises(ValueError, match=r"adapter_root: .* is not a folder"):
        config(tmp_path / "none")


class Wrong:
    """Drafts that are right for no adapter."""

    def propose(self, tokens: Sequence[int], k: int) -> Sequence[int]:
        return truth("", GREEDY, k, tokens)


def said_by_the_api(address: str, adapter: str) -> list[tuple[int, ...]]:
    """What a Client and a DraftSession get."""
    with Client(address) as client:
        wish = {"max_new_tokens": 14, "ignore_end_of_sequence": True}
        said = [client.generate(list(PROMPT), GREEDY, adapter=adapter, **wish).token_ids]
    with DraftSession(address, Wrong()) as session:
        said.append(session.generate(list(PROMPT), GREEDY, max_new_tokens=14, adapter=adapter).token_ids)
    return [tuple(each) for each in said]


def test_a_server_process_has_the_adapters_of_its_command_line_and_takes_more(tmp_path: Path) -> None:
    async def talk(address: str) -> None:
        async with open_channel(address) as channel:
            client = GenerationClient(channel, TARGET)
            names = [name for name, _ in (await client.model_info()).adapters]
            admin = AdapterAdminStub(channel)
            await admin.AddAdapter(pb.AddAdapterRequest(name="green"))
            more = [name for name, _ in (await client.model_info()).adapters]
            assert (names, more) == (["red", "blue"], ["red", "blue", "green"])
            for name in more:
                events = [event async for event in client.generate(asking(name, GREEDY))]
                said = [token for event in events if isinstance(event, Chunk) for token in event.token_ids]
                source = str(tmp_path / "green") if name == "green" else f"of-{name}"
                assert tuple(said) == truth(source, GREEDY, 14, PROMPT)

    flags = ("--role", "target", "--adapters", "red=of-red,blue=of-blue", "--adapter_root", str(tmp_path))
    with server_process(tmp_path, *flags) as server:
        run(talk(server.wait_ready()))
        assert said_by_the_api(server.wait_ready(), "blue") == [truth("of-blue", GREEDY, 14, PROMPT)] * 2
        printed = run_client(
            tmp_path,
            *("--target_host", server.wait_ready(), "--prompt", bytes(PROMPT).decode()),
            *("--adapter", "red", "--max_new_tokens", "14", "--ignore_eos"),
        )
        assert bytes(t for t in truth("of-red", GREEDY, 14, PROMPT) if t < 256).decode("latin-1") in printed.stdout


def test_a_server_that_cannot_have_an_adapter_says_so_in_one_line(tmp_path: Path) -> None:
    for flags, said in (
        (("--adapters", "toy=x"), "the model's own name"),
        (("--adapters", "red"), "red=DIR"),
        (
            (
                *("--role", "fused_target", "--draft_model", "head", "--draft", "eagle"),
                *("--adapters", "red=x", "--draft_adapters", "red=x"),
            ),
            "an EAGLE head has none of its own",
        ),
    ):
        ran = run_here(tmp_path, "--role", "target", "--backend", "toy", "--port", "0", *flags)
        assert ran.returncode == 2 and said in ran.stderr and ran.stderr.count("\n") < 6, ran.stderr
