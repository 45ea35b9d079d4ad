"""Signing in at a server elsewhere, by OAuth as the MCP SDK's client does it: discovery, registration, PKCE,
tokens and their refresh. This module only carries its requests, each to a host that the policy lists.

The SDK writes the flow as a generator of requests. A sign-in drives it from the first refused request to the
last; a refresh drives it up to the request that would have the new token.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import ExitStack, aclosing
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import trio
from mcp.client.auth import AuthorizationCodeResult, OAuthClientProvider
from mcp.shared.auth import (
    OAuthClientInformationFull,
    OAuthClientMetadata,
    OAuthMetadata,
    OAuthToken,
    ProtectedResourceMetadata,
)

from runner import __version__
from runner.approvals.record import ApprovalsUnusable
from runner.exceptions import PluginFailure
from runner.gateway.callback import Callback, open_callback
from runner.gateway.listed_hosts import Ask, asking, require_listed
from runner.gateway.logins import Login, LoginRecord
from runner.gateway.settings import RemoteSettings
from runner.outcome import Code, Outcome
from runner.protocol import wire
from runner.protocol.https.failure import FetchFailed
from runner.protocol.https.request import Headers, HttpsRequest
from runner.serve.peer import read_token
from sandbox.document.diagnostic import cut, printable
from sandbox.policy.policy import NetworkRule

LOGIN_SECONDS = 600.0  # that a person has for it
VERSION = "2025-11-25"  # of the protocol, as the gateway speaks it with servers elsewhere
_REQUEST_SECONDS = 30.0
_MOST_BYTES = 512 << 10  # of one answer
_EARLY_SECONDS = 30.0  # before a token is over, it is renewed
_MOST_MESSAGE = 500  # characters of what a server says
_NO_TOKEN = 401
_SESSION = "mcp-session-id"
_CHALLENGE = "www-authenticate"
_KEPT = ("content-type", _CHALLENGE, _SESSION)  # headers of answers that the flow reads
_SCOPE = re.compile(r'(?<![\w-])scope=(?:"([!#-\[\]-~ ]{1,1000})"|([!#-+\--\[\]-~]{1,1000}))')
_CODES: Mapping[str, Code] = {"denied": "policy_denied", "timeout": "timeout"}

_GREETING: Mapping[str, Any] = {
    "method": "initialize",
    "params": {
        "protocolVersion": VERSION,
        "capabilities": {},
        "clientInfo": {"name": "runner", "version": __version__},
    },
}
_FIRST: Mapping[str, Any] = {"method": "tools/list", "params": {}}
_HEADERS = {
    "Content-Type": "application/json",
    "Accept": "application/json, text/event-stream",
    "MCP-Protocol-Version": VERSION,
}

# The SDK would print a traceback for each flow that fails. What failed is told by the exception.
logging.getLogger("mcp.client.auth").addHandler(logging.NullHandler())
logging.getLogger("mcp.client.auth").propagate = False


class _Storage:
    """The SDK's TokenStorage, in memory. What is found there after a flow is kept as one file."""

    def __init__(self, client: OAuthClientInformationFull | None, token: OAuthToken | None) -> None:
        self.client, self.token = client, token

    async def get_tokens(self) -> OAuthToken | None:
        return self.token

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self.token = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self.client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self.client = client_info


class SignIn:
    """Of one server elsewhere."""

    def __init__(
        self, settings: RemoteSettings, rule: NetworkRule, record: LoginRecord, ask: Ask | None = None
    ) -> None:
        """`rule`: of the policy. `ask`: sends a request; None: to its host."""
        self._settings = settings
        self._rule = rule
        self._record = record
        self._ask = ask or asking(_REQUEST_SECONDS, _MOST_BYTES)
        self._turn = trio.Lock()
        self._scope = ""  # rights to ask for, whatever the server asks for first
        self.number = ""  # of the sign-in whose token was asked for last; empty: there was none

    @property
    def command(self) -> str:
        return self._settings.login_command

    async def token(self, refused: str = "") -> str:
        """A token that may be good, renewed if it is over; '' if nobody has signed in. `refused`: the server
        did not take this one. Raises PluginFailure."""
        async with self._turn:
            login = await self._read()
            if login is None or _is_good(login, refused):
                return self._use(login)
            try:
                with ExitStack() as stack:
                    await trio.to_thread.run_sync(stack.enter_context, self._record.locked())
                    # Finished and kept even if the client that needs it goes away: a refresh token may be
                    # good for one use, and the server has had it. At most _REQUEST_SECONDS.
                    with trio.CancelScope(shield=True):
                        login = await self._read()  # another gateway may have renewed it meanwhile
                        if login is not None and not _is_good(login, refused):
                            login = await self._renew(login)
                            await trio.to_thread.run_sync(self._record.write, login)
            except ApprovalsUnusable as unusable:
                raise _failure("launch_failed", str(unusable), unusable.hint) from None
            return self._use(login)

    def _use(self, login: Login | None) -> str:
        self.number = "" if login is None else login.number
        return "" if login is None else _access(login)

    async def run(self, show: Callable[[str], None], scope: str = "") -> None:
        """Sign in. `show`: shows the person a URL to open. `scope`: rights beside those that the server asks
        for first, and those that the person has. Raises PluginFailure, OSError, ValueError and
        ApprovalsUnusable."""
        login = await self._read() if scope else None
        self._scope = " ".join((str((login.token if login else {}).get("scope") or ""), scope)).strip()
        require_listed(self._rule, self._settings.url)
        failure: Exception | None = None
        with trio.move_on_after(LOGIN_SECONDS) as time_limit:
            async with open_callback(self._settings.callback_port) as callback:
                try:
                    await self._run(callback, show)
                except Exception as error:  # noqa: BLE001 -- raised below: a nursery would wrap it
                    failure = error
        if failure is not None:
            raise failure
        if time_limit.cancelled_caught:
            raise _failure("timeout", f"nobody signed in within {LOGIN_SECONDS:g} s")

    async def _run(self, callback: Callback, show: Callable[[str], None]) -> None:
        async def redirect(url: str) -> None:
            require_listed(self._rule, url)
            callback.state = parse_qs(urlsplit(url).query)["state"][-1]
            _choose_method(provider)
            show(url)

        async def returned() -> AuthorizationCodeResult:
            found = await callback.parameters()
            if "code" not in found:
                why = found.get("error_description") or found.get("error") or "it gave no code"
                raise _failure("policy_denied", f"the sign-in was refused: {_told(why)}")
            return AuthorizationCodeResult(code=found["code"], state=found["state"], iss=found.get("iss"))

        storage = _Storage(await self._own_client(callback.url), None)
        url, metadata = self._settings.url, _metadata(callback.url)
        provider = OAuthClientProvider(url, metadata, storage, redirect, returned)
        answer = await self._drive(provider, _message(_GREETING))
        if storage.token is None and answer is not None and answer.status_code == 200:
            # Some greet everybody, and want a token for what follows.
            session = {_SESSION: answer.headers[_SESSION]} if _SESSION in answer.headers else {}
            answer = await self._drive(provider, _message(_FIRST), session)
        status = 0 if answer is None else answer.status_code
        if storage.token is None:
            message = f"the server answers with the status {status} before anybody has signed in"
            raise _failure("policy_denied", f"{message}: it asks for no sign-in")
        if status in (401, 403):
            raise _failure("policy_denied", f"the server refuses the token it was sent ({status})")
        with ExitStack() as stack:
            await trio.to_thread.run_sync(stack.enter_context, self._record.locked())
            login = _login(provider, storage, secrets.token_hex(8))
            await trio.to_thread.run_sync(self._record.write, login)

    async def _read(self) -> Login | None:
        try:
            return await trio.to_thread.run_sync(self._record.read)
        except ApprovalsUnusable as unusable:
            raise _failure("launch_failed", str(unusable), unusable.hint) from None

    async def _renew(self, login: Login) -> Login:
        """Raises PluginFailure."""
        try:
            client = OAuthClientInformationFull.model_validate(login.client)
            storage = _Storage(client, OAuthToken.model_validate(login.token))
            provider = OAuthClientProvider(self._settings.url, _metadata("http://127.0.0.1/"), storage)
            # The SDK keeps these only as long as a process lives.
            if login.server is not None:
                provider.context.oauth_metadata = OAuthMetadata.model_validate(login.server)
            if login.resource is not None:
                resource = ProtectedResourceMetadata.model_validate(login.resource)
                provider.context.protected_resource_metadata = resource
        except ValueError as error:
            raise self._over(f"what is kept of the sign-in is damaged: {_told(str(error))}") from None
        provider.context.token_expiry_time = 1.0  # over: whatever the clock says, the server refused it
        before = storage.token
        await self._drive(provider, _message(_GREETING), only_renew=True)
        if storage.token is before:
            raise self._over("the sign-in is over")
        return _login(provider, storage, login.number)

    def _over(self, message: str) -> PluginFailure:
        return _failure("policy_denied", message, f"run: {self.command}")

    async def _drive(
        self,
        provider: OAuthClientProvider,
        message: bytes,
        session: Mapping[str, str] | None = None,
        *,
        only_renew: bool = False,
    ) -> httpx2.Response | None:
        """Carry the requests of a flow, which begins with our own. Returns the last answer to that. Raises
        PluginFailure."""
        own = httpx2.Request(
            "POST", self._settings.url, headers={**_HEADERS, **(session or {})}, content=message
        )
        answer = None
        async with aclosing(provider.async_auth_flow(own)) as flow:
            request = await _next(flow, None)
            while request is not None and not (only_renew and request is own):
                response = await self._send(request)
                answer = response if request is own else answer
                request = await _next(flow, response)
        return answer

    async def _send(self, request: httpx2.Request) -> httpx2.Response:
        """Raises PluginFailure."""
        url, body = str(request.url), await request.aread()
        require_listed(self._rule, url)
        skipped = ("host", "content-length", "transfer-encoding", "connection")
        headers = tuple((name, text) for name, text in request.headers.items() if name not in skipped)
        try:
            answer = await self._ask(HttpsRequest(url, request.method, headers, body or None))
        except FetchFailed as error:
            raise _failure(_CODES.get(error.kind, "launch_failed"), str(error)) from None
        # Without those that say where else to go, or how the body is packed. The SDK takes ASCII only.
        kept = [
            (name, text.encode("ascii", "replace").decode())
            for name, text in answer.headers
            if name.lower() in _KEPT
        ]
        if self._scope and answer.status == _NO_TOKEN:
            challenge = next((text for name, text in kept if name.lower() == _CHALLENGE), "")
            kept = [each for each in kept if each[0].lower() != _CHALLENGE]
            kept.append((_CHALLENGE, self._with_scope(challenge)))
        return httpx2.Response(answer.status, headers=kept, content=answer.body, request=request)

    def _with_scope(self, challenge: str) -> str:
        """The SDK asks for what the server's challenge names."""
        found = _SCOPE.search(challenge)
        words = [*(found[1] or found[2]).split()] if found is not None else []
        scope = " ".join(dict.fromkeys((*words, *self._scope.split())))
        rest = challenge if found is None else challenge[: found.start()] + challenge[found.end() :]
        return f'{rest.rstrip(", ") or "Bearer"}{"," if "=" in rest else ""} scope="{scope}"'

    async def _own_client(self, callback: str) -> OAuthClientInformationFull | None:
        """As the settings say. None: the server is asked to register us. Raises ValueError."""
        if not self._settings.client_id:
            return None
        secret = None
        if self._settings.client_secret_file:
            path = self._settings.client_secret_file
            secret = (await trio.to_thread.run_sync(read_token, path, 1)).decode()
        method = "none" if secret is None else "client_secret_basic"
        return OAuthClientInformationFull.model_validate(
            {
                "client_id": self._settings.client_id,
                "client_secret": secret,
                "redirect_uris": [callback],
                "token_endpoint_auth_method": method,
                "issuer": self._settings.issuer or None,
            }
        )


def run_sign_in(signing: SignIn, show: Callable[[str], None], scope: str) -> None:
    """`SignIn.run`, for a process that does nothing else."""
    try:
        trio.run(signing.run, show, scope)
    except BaseExceptionGroup as group:  # Ctrl-C may interrupt any of trio's tasks
        if group.subgroup(KeyboardInterrupt) is None:
            raise
        raise KeyboardInterrupt from None


def is_scope(text: str) -> bool:
    return _SCOPE.fullmatch(f'scope="{text}"') is not None


def wanted_scope(headers: Headers) -> str:
    """The rights for lack of which a server refuses a request; '' if that is not why."""
    for name, text in headers:
        if name.lower() == _CHALLENGE and "insufficient_scope" in text and (found := _SCOPE.search(text)):
            return " ".join((found[1] or found[2]).split())
    return ""


def _message(message: Mapping[str, Any]) -> bytes:
    return wire.encode({"jsonrpc": "2.0", "id": 1, **message})


def _metadata(callback: str) -> OAuthClientMetadata:
    return OAuthClientMetadata.model_validate(
        {"client_name": "runner", "redirect_uris": [callback], "token_endpoint_auth_method": "none"}
    )


def _choose_method(provider: OAuthClientProvider) -> None:
    """A secret of the settings is sent as the server takes it; every server should take it by Basic."""
    context = provider.context
    known = context.oauth_metadata and context.oauth_metadata.token_endpoint_auth_methods_supported
    client = context.client_info
    if client is None or client.token_endpoint_auth_method != "client_secret_basic" or not known:
        return
    if "client_secret_basic" not in known and "client_secret_post" in known:
        client.token_endpoint_auth_method = "client_secret_post"


def _login(provider: OAuthClientProvider, storage: _Storage, number: str) -> Login:
    """Raises PluginFailure if its token cannot be used."""
    context = provider.context
    kept = (context.client_info, storage.token, context.oauth_metadata, context.protected_resource_metadata)
    client, token, server, resource = (None if each is None else _dump(each) for each in kept)
    login = Login(client or {}, token or {}, context.token_expiry_time, server, resource, number)
    _access(login)
    return login


def _dump(model: Any) -> dict[str, Any]:
    found: dict[str, Any] = model.model_dump(mode="json", by_alias=True, exclude_none=True)
    return found


def _access(login: Login) -> str:
    """Raises PluginFailure: what a server sends as its token becomes a header."""
    token = login.token.get("access_token")
    if not isinstance(token, str) or not token.isascii() or not token.isprintable() or " " in token:
        raise _failure("malformed_response", "the token that the authorization server gave cannot be used")
    return token


def _is_good(login: Login, refused: str) -> bool:
    if refused:
        return login.token.get("access_token") != refused
    return login.expires is None or time.time() < login.expires - _EARLY_SECONDS


async def _next(
    flow: AsyncGenerator[httpx2.Request, httpx2.Response], response: httpx2.Response | None
) -> httpx2.Request | None:
    """The next request of a flow. None: it is over. Raises PluginFailure."""
    try:
        return await (anext(flow) if response is None else flow.asend(response))
    except StopAsyncIteration:
        return None
    except (PluginFailure, OSError):
        raise
    except Exception as error:  # noqa: BLE001 -- a server can send what the SDK reads with any exception
        raise _failure("handshake_failed", f"the sign-in failed: {_told(str(error))}") from None


def _told(text: str) -> str:
    return printable(cut(text, _MOST_MESSAGE))


def _failure(code: Code, message: str, hint: str = "") -> PluginFailure:
    return PluginFailure(Outcome(code, "call", message, "sign_in", hint))
