"""A server elsewhere that wants people to sign in, and its authorization server: the official SDK's, by TLS.

`python tracker.py CERTIFICATE KEY [SOCKET ...]`: serves both names on the Unix sockets, or on a port of
127.0.0.1, which it prints. Each line on stdin is obeyed and answered with a line.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import sys
import time
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from mcp.server.auth.provider import (
    AccessToken,
    AuthorizationCode,
    AuthorizationParams,
    RefreshToken,
    construct_redirect_uri,
)
from mcp.server.auth.routes import create_auth_routes
from mcp.server.auth.settings import AuthSettings, ClientRegistrationOptions
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.auth import OAuthClientInformationFull, OAuthToken
from pydantic import AnyHttpUrl, BaseModel
from starlette.applications import Starlette
from starlette.routing import Host

LOGIN, TRACKER = "login.example.com", "tracker.example.com"
URL = f"https://{TRACKER}/mcp"
KNOWN = "known-client"  # registered by hand, with the secret below
SECRET = "its-secret-0123456789"


class Provider:
    """Says yes to everybody at once. A refresh token is good for one use."""

    def __init__(self) -> None:
        self.clients: dict[str, OAuthClientInformationFull] = {}
        self.codes: dict[str, AuthorizationCode] = {}
        self.access: dict[str, AccessToken] = {}
        self.refresh: dict[str, RefreshToken] = {}
        self.log: list[str] = []

    async def get_client(self, client_id: str) -> OAuthClientInformationFull | None:
        return self.clients.get(client_id)

    async def register_client(self, client_info: OAuthClientInformationFull) -> None:
        self.log.append("registered")
        self.clients[client_info.client_id] = client_info

    async def authorize(self, client: OAuthClientInformationFull, params: AuthorizationParams) -> str:
        code = secrets.token_urlsafe(24)
        self.codes[code] = AuthorizationCode(
            code=code,
            scopes=params.scopes or [],
            expires_at=time.time() + 60,
            client_id=client.client_id,
            code_challenge=params.code_challenge,
            redirect_uri=params.redirect_uri,
            redirect_uri_provided_explicitly=params.redirect_uri_provided_explicitly,
            resource=params.resource,
        )
        return construct_redirect_uri(str(params.redirect_uri), code=code, state=params.state)

    async def load_authorization_code(
        self, client: OAuthClientInformationFull, authorization_code: str
    ) -> AuthorizationCode | None:
        return self.codes.get(authorization_code)

    async def exchange_authorization_code(
        self, client: OAuthClientInformationFull, authorization_code: AuthorizationCode
    ) -> OAuthToken:
        del self.codes[authorization_code.code]
        self.log.append("exchanged")
        return self._give(client.client_id, authorization_code.scopes, authorization_code.resource)

    async def load_refresh_token(
        self, client: OAuthClientInformationFull, refresh_token: str
    ) -> RefreshToken | None:
        self.log.append("refreshed" if refresh_token in self.refresh else "refused")
        return self.refresh.get(refresh_token)

    async def exchange_refresh_token(
        self, client: OAuthClientInformationFull, refresh_token: RefreshToken, scopes: list[str]
    ) -> OAuthToken:
        del self.refresh[refresh_token.token]
        return self._give(client.client_id, scopes, refresh_token.resource)

    async def load_access_token(self, token: str) -> AccessToken | None:
        return self.access.get(token)

    async def verify_token(self, token: str) -> AccessToken | None:
        return self.access.get(token)

    async def revoke_token(self, token: AccessToken | RefreshToken) -> None:
        raise NotImplementedError

    async def exchange_identity_assertion(self, client: Any, params: Any) -> OAuthToken:
        raise NotImplementedError

    def _give(self, client: str, scopes: list[str], resource: str | None) -> OAuthToken:
        access, refresh = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        self.access[access] = AccessToken(token=access, client_id=client, scopes=scopes, resource=resource)
        self.refresh[refresh] = RefreshToken(
            token=refresh, client_id=client, scopes=scopes, resource=resource
        )
        return OAuthToken(access_token=access, refresh_token=refresh, expires_in=3600, scope="issues")


class Answer(BaseModel):
    sure: bool


def make_tracker(provider: Provider) -> MCPServer:
    settings = AuthSettings(
        issuer_url=AnyHttpUrl(f"https://{LOGIN}"),
        resource_server_url=AnyHttpUrl(URL),
        required_scopes=["issues"],
        validate_token_resource=True,
    )
    server = MCPServer("tracker", token_verifier=provider, auth=settings)

    @server.tool()
    def close(number: int) -> str:
        """Closes an issue."""
        return f"closed {number}"

    @server.tool()
    async def count(to: int, context: Context) -> str:
        """Counts, and tells how far it is."""
        for number in range(1, to + 1):
            await context.report_progress(number, to, f"at {number}")
        return f"counted to {to}"

    @server.tool()
    async def ask(context: Context) -> str:
        """Asks the person."""
        answer = await context.elicit("Really?", Answer)
        return answer.action + (f" {answer.data.sure}" if answer.action == "accept" else "")

    @server.tool()
    async def ask_beside(context: Context) -> str:
        """Asks on the server's own stream, as many servers do."""
        schema = {"type": "object", "properties": {"sure": {"type": "boolean"}}}
        answer = await context.request_context.session.elicit_form("Really?", schema)
        return f"{answer.action} {answer.content}"

    @server.tool()
    async def wait(context: Context) -> str:
        """Waits until nobody wants the answer."""
        await context.report_progress(1, 2, "waiting")
        try:
            await asyncio.sleep(3600)
        finally:
            provider.log.append("given up")
        return ""

    return server


def obey(provider: Provider, line: str) -> str:
    if line == "expire":
        provider.access.clear()
    elif line == "forget":
        provider.access.clear()
        provider.refresh.clear()
    elif line.startswith("know "):
        client = {
            "client_id": KNOWN,
            "client_secret": SECRET,
            "scope": "issues",
            "redirect_uris": [f"http://127.0.0.1:{line[5:]}/callback"],
            "token_endpoint_auth_method": "client_secret_basic",
        }
        provider.clients[KNOWN] = OAuthClientInformationFull.model_validate(client)
    return json.dumps(provider.log)


def tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def serve(certificate: str, key: str, *paths: str) -> None:
    provider = Provider()
    server = make_tracker(provider)
    options = ClientRegistrationOptions(enabled=True, valid_scopes=["issues"], default_scopes=["issues"])
    login = create_auth_routes(provider, AnyHttpUrl(f"https://{LOGIN}"), client_registration_options=options)
    anywhere = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    tracker = server.streamable_http_app(transport_security=anywhere)

    @asynccontextmanager
    async def lifespan(application: Starlette) -> AsyncIterator[None]:
        async with server.session_manager.run():
            yield

    application = Starlette(
        routes=[Host(LOGIN, Starlette(routes=login)), Host(TRACKER, tracker)], lifespan=lifespan
    )
    sockets = [socket.socket(socket.AF_UNIX) for _ in paths] or [socket.socket()]
    places: tuple[Any, ...] = paths or (("127.0.0.1", 0),)
    for each, place in zip(sockets, places, strict=True):
        each.bind(place)
        each.listen()
    config = uvicorn.Config(
        application, ssl_certfile=certificate, ssl_keyfile=key, log_level="error", ws="none"
    )
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    serving = asyncio.create_task(uvicorn.Server(config).serve(sockets=sockets))
    tell("0" if paths else str(sockets[0].getsockname()[1]))
    while line := (await reader.readline()).decode().strip():
        tell(obey(provider, line))
    serving.cancel()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    asyncio.run(serve(*sys.argv[1:]))
