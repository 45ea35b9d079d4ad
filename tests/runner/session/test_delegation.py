"""A call prepared on trio: its deadline, the credentials that the host makes for it, and refusals."""

from __future__ import annotations

import functools
import traceback
from pathlib import Path
from typing import Any

import pytest
import trio

import runner
from runner.exceptions import InvalidCall, PluginFailure
from runner.launch.stages import Invocation
from runner.protocol.dialect import Call
from runner.protocol.host_services import Delegation, DelegationRequest, Granted, Services
from runner.session.pending import Deadline
from runner.session.prepared import PreparedCall, complete_call, prepare_call
from tests.conftest import ROOT

DEVKIT = Invocation(str(ROOT / "tests/plugins/vai_devkit"))
SECRETS = {"api_key": "correct-horse-battery"}
TOKEN = "delegated-token-1"


class Gateway:
    """Gives what it was made with."""

    def __init__(self, *given: Any) -> None:
        self.given = Delegation(*given)
        self.asked: list[DelegationRequest] = []

    async def delegate(self, request: DelegationRequest) -> Delegation:
        self.asked.append(request)
        self.plugin = Granted.current().plugin.id
        return self.given


async def prepared(gateway: Any, name: str = "triage", **more: Any) -> PreparedCall:
    services = Services(gateway=gateway)
    return await prepare_call(DEVKIT, Call("export", name, {}), secrets=SECRETS, services=services, **more)


@pytest.mark.trio
async def test_credentials_reach_the_request_and_nothing_else() -> None:
    gateway = Gateway("https://gateway.example.com", TOKEN, ("chains:read",))
    found = await prepared(gateway, seconds=7.0)
    sent = found.call.input["context"]["gateway"]
    assert (sent["base_url"], sent["scopes"]) == ("https://gateway.example.com", ["chains:read"])
    assert str(sent["delegation_token"]) == TOKEN
    assert found.secrets.hide(f"{TOKEN} and {SECRETS['api_key']}") == "[secret] and [secret]"
    assert TOKEN not in repr(found) and SECRETS["api_key"] not in repr(found)
    assert TOKEN not in str(found.invocation) and SECRETS["api_key"] not in str(found.invocation)
    [asked] = gateway.asked
    assert gateway.plugin == found.plugin.id
    assert asked.seconds == 7.0 + 10.0  # its deadline and its grace
    assert asked.call == dict(found.invocation.options)["invocation_id"]
    assert 0.0 < found.deadline.at - trio.current_time() <= 7.0 == found.deadline.seconds


class Stuck:
    def __init__(self) -> None:
        self.asked = trio.Event()

    async def delegate(self, request: DelegationRequest) -> Delegation:
        self.asked.set()
        await trio.sleep_forever()
        raise AssertionError


@pytest.mark.trio
async def test_a_service_that_hangs_is_named() -> None:
    with pytest.raises(PluginFailure) as caught:
        await prepared(Stuck(), seconds=0.2)
    outcome = caught.value.outcome
    assert (outcome.code, outcome.phase, outcome.cause) == ("timeout", "launch", "deadline_exceeded")
    assert outcome.message.startswith("the gateway service of the host gave no credentials within the 200ms")


@pytest.mark.trio
async def test_a_caller_that_gives_up_has_a_record() -> None:
    records: list[Any] = []
    stuck = Stuck()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(functools.partial(prepared, stuck, on_given_up=records.append))
        await stuck.asked.wait()
        nursery.cancel_scope.cancel()
    [record] = records
    assert (record["status"], record["code"]) == ("cancelled", "runner.cancelled")
    assert record["export"]["id"] == "triage"


def test_a_deadline_of_less_than_a_millisecond_is_not_nothing() -> None:
    assert "within the 0.1ms that" in Deadline(0.0, 0.0001).passed("launch").message


@pytest.mark.trio
async def test_without_a_service_there_is_no_gateway() -> None:
    found = await prepared(None)
    assert "gateway" not in found.call.input["context"]


@pytest.mark.trio
async def test_an_export_without_scopes_gets_no_credentials() -> None:
    gateway = Gateway("https://gateway.example.com", TOKEN, ())
    assert "gateway" not in (await prepared(gateway, "reader")).call.input["context"]
    assert gateway.asked == []


@pytest.mark.trio
async def test_more_than_was_asked_for_is_refused() -> None:
    gateway = Gateway("https://gateway.example.com", TOKEN, (f"all-of-{TOKEN}",))
    with pytest.raises(InvalidCall) as caught:
        await prepared(gateway)
    assert caught.value.invocation is not None and caught.value.invocation["status"] == "failed"
    assert TOKEN not in str(caught.value) and TOKEN not in str(caught.value.invocation)


def test_each_call_has_ids_of_its_own() -> None:
    calls = [complete_call(DEVKIT, Call("export", "reader", {})) for _ in range(2)]
    ids = [dict(call.invocation.options)["invocation_id"] for call in calls]
    assert ids[0] != ids[1] and all(ids)


def test_a_secret_option_is_no_option_of_the_launch() -> None:
    options = (("gateway_url", "https://gateway.example.com"), ("gateway_token", TOKEN))
    call = Call("export", "triage", {})
    found = complete_call(DEVKIT._replace(options=options), call, secrets=SECRETS)
    assert "gateway_token" not in dict(found.invocation.options)
    assert found.call.input["context"]["gateway"]["delegation_token"] == TOKEN


@pytest.mark.trio
async def test_a_traceback_with_local_variables_shows_no_secret() -> None:
    """Nothing is launched: the package has no such export."""
    call = Call("export", "no_such_export", {})
    with pytest.raises(PluginFailure) as prepared_here:
        complete_call(DEVKIT, call, secrets=SECRETS)
    with pytest.raises(PluginFailure) as in_library:
        await runner.run(DEVKIT.manifest, "no_such_export", {}, kind="export", secrets=SECRETS)
    with pytest.raises(ValueError, match="sends its plugins none") as without_secrets:
        await runner.run(ROOT / "tests/plugins/rune_echo", "echo", {}, secrets=SECRETS)
    for caught, names in (
        (prepared_here, ("given", "secrets")),
        (in_library, ("opening", "given", "secrets")),
        (without_secrets, ("opening", "secrets", "settings")),
    ):
        frames = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
        text = "".join(frames.format())
        assert all(f"    {name} = " in text for name in names), text
        assert SECRETS["api_key"] not in text


def test_a_manifest_with_a_fault(tmp_path: Path) -> None:
    (tmp_path / "vai-plugin.toml").write_text('api_version = "vai.plugin.v1"\n')
    with pytest.raises(PluginFailure) as caught:
        complete_call(Invocation(str(tmp_path)), Call("export", "x"))
    assert caught.value.outcome.code == "manifest_invalid" and caught.value.explanation
