"""The client that MCP's conformance suite asks for: a gateway whose server elsewhere is the suite's, with the
official client in front of it. Usage: python -m tests.published.suite_client URL

The suite's servers speak HTTP at localhost, and the gateway HTTPS with hosts of the policy. So this process
is between them, and writes https in the place of http, and http in the place of https.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import mcp_types as types
import trio
from mcp import Client
from mcp.shared.memory import create_client_server_memory_streams

from runner.approvals.tools import ToolRecord
from runner.exceptions import PluginFailure
from runner.gateway.catalogue import Catalogue
from runner.gateway.logins import LoginRecord
from runner.gateway.questions import ClientQuestions
from runner.gateway.remote import RemoteSource
from runner.gateway.server import ClientGateway
from runner.gateway.settings import ClientSettings, RemoteSettings
from runner.gateway.sign_in import SignIn
from runner.protocol.https.failure import FetchFailed
from runner.protocol.https.fetch import OnPart
from runner.protocol.https.request import HttpsRequest
from runner.protocol.https.response import HttpsResponse
from sandbox.policy.policy import NetworkRule
from tests.runner.gateway.test_sign_in import sign_in

_SECONDS = 250.0
_OPEN = NetworkRule(ceiling="open")
_GIVEN: Mapping[str, Any] = {"a": 5, "b": 3}


def _plain(text: str) -> str:
    return text.replace("https://localhost:", "http://localhost:").replace(
        "https%3A%2F%2Flocalhost%3A", "http%3A%2F%2Flocalhost%3A"
    )


def _secure(text: str) -> str:
    return text.replace("http://localhost:", "https://localhost:")


async def ask(request: HttpsRequest, on_part: OnPart | None = None) -> HttpsResponse:
    headers = [(name, _plain(value)) for name, value in request.headers]
    content = _plain((request.body or b"").decode()).encode()
    body = bytearray()
    try:
        async with (
            httpx2.AsyncClient(timeout=_SECONDS, trust_env=False) as http,
            http.stream(request.method, _plain(request.url), headers=headers, content=content) as answer,
        ):
            told = tuple((name, _secure(value)) for name, value in answer.headers.items())
            on_part = on_part if answer.status_code == 200 else None
            if on_part is not None:
                on_part(told, body)
            async for more in answer.aiter_bytes():
                body += more
                if on_part is not None:
                    on_part(told, body)
    except httpx2.HTTPError as error:
        raise FetchFailed("protocol", str(error)) from None
    return HttpsResponse(answer.status_code, told, _secure(body.decode()).encode(), request.url)


async def browse(url: str) -> None:
    """As a browser, whose person says yes."""
    async with httpx2.AsyncClient(timeout=_SECONDS, trust_env=False) as http:
        answer = await http.get(_plain(url))
        while answer.has_redirect_location:
            answer = await http.get(_plain(answer.headers["location"]))


class Rig:
    """The gateway, for one client in this process."""

    def __init__(self, url: str, folder: Path, nursery: trio.Nursery) -> None:
        context = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT") or "{}")
        settings = RemoteSettings("suite", _secure(url))
        if "client_id" in context:
            secret = folder / "secret"
            secret.write_text(context.get("client_secret", ""))
            secret.chmod(0o600)
            settings = settings._replace(client_id=context["client_id"], client_secret_file=str(secret))
        record = LoginRecord(settings.name, settings.url, {"HOME": str(folder)})
        self.sign_in = SignIn(settings, _OPEN, record, ask)
        self.remote = RemoteSource(settings, _OPEN, ask, self.sign_in)
        self._questions, self._nursery = ClientQuestions(), nursery
        record_of_tools = ToolRecord.at(folder / "tools")
        catalogue = Catalogue(nursery, lambda: [self.remote], record_of_tools, _say, seconds=_SECONDS)
        self._gateway = ClientGateway(
            catalogue, self.remote, self._questions, "me", ClientSettings(), nursery
        )
        self._gateway.on_first = self._load

    async def _load(self, context: Any) -> None:
        self.remote.services = partial(self._questions.services, "suite", context)
        self._gateway.on_first = None

    @asynccontextmanager
    async def transport(self) -> AsyncIterator[Any]:
        server = self._gateway.server()
        async with create_client_server_memory_streams() as (here, there):
            self._nursery.start_soon(server.run, *there, server.create_initialization_options())
            yield here


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


async def _answer(context: Any, params: Any) -> types.ElicitResult:
    """A person who takes what is suggested."""
    asked = params.requested_schema["properties"]
    content = {name: each["default"] for name, each in asked.items() if "default" in each}
    return types.ElicitResult(action="accept", content=content)


async def _use(url: str, folder: Path) -> None:
    """What a person does: sign in where that is wanted, list, and call; and once more after a refusal."""
    async with trio.open_nursery() as nursery:
        rig = Rig(url, folder, nursery)
        try:
            await rig.remote.lists()
        except PluginFailure as failure:
            _say(f"{failure} {failure.outcome.hint}")
            if "login" not in failure.outcome.hint:
                raise
            await sign_in(rig.sign_in, browse)
        async with Client(rig.transport(), mode="legacy", elicitation_callback=_answer) as client:
            for tool in (await client.list_tools()).tools:
                result = await client.call_tool(tool.name, dict(_GIVEN))
                said = "".join(part.text for part in result.content if isinstance(part, types.TextContent))
                _say(f"{tool.name}: {said}")
                if "run: runner gateway login" in said:
                    words = shlex.split(said.partition("run: ")[2])
                    scope = words[-1] if "--scope" in words else ""
                    await sign_in(rig.sign_in, browse, scope)
                    _say(str(await client.call_tool(tool.name, dict(_GIVEN))))
        nursery.cancel_scope.cancel()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trio.run(_use, sys.argv[1], Path(folder))


if __name__ == "__main__":
    main()
