"""Requests of the gateway itself, to hosts that the policy lists: servers elsewhere, and where people sign in
for them. Private addresses are refused, and a redirect is followed only within its host."""

from __future__ import annotations

from typing import Protocol

from runner.exceptions import PluginFailure
from runner.outcome import Outcome
from runner.protocol.https.failure import FetchFailed
from runner.protocol.https.fetch import OnPart, fetch
from runner.protocol.https.request import HttpsRequest, parse_url
from runner.protocol.https.response import HttpsResponse
from sandbox.network.rules import parse_rules
from sandbox.policy.policy import NetworkRule, host_matches


class Ask(Protocol):
    """Sends a request, and returns the whole answer. `on_part`: hears of it as it comes. Raises
    FetchFailed."""

    async def __call__(self, request: HttpsRequest, on_part: OnPart | None = None, /) -> HttpsResponse: ...


def require_listed(rule: NetworkRule, url: str) -> None:
    """Raises PluginFailure if the policy does not list the host of a URL, or it is not https."""
    try:
        origin = parse_url(url).origin
    except FetchFailed as error:
        raise PluginFailure(Outcome("policy_denied", "call", str(error), "url")) from None
    listed = any(host_matches(pattern, origin) for pattern in rule.hosts)
    if rule.ceiling == "open" or (rule.ceiling == "allowlist" and listed):
        return
    message = f"the policy does not list the host {origin}"
    hint = f'the operator can add "{origin}" to hosts under [network] in the policy'
    raise PluginFailure(Outcome("policy_denied", "call", message, "host", hint))


def asking(seconds: float, most_bytes: int) -> Ask:
    """Sends a request to the host and port of its URL alone, also after a redirect."""

    async def ask(request: HttpsRequest, on_part: OnPart | None = None) -> HttpsResponse:
        only = parse_rules((parse_url(request.url).origin,))
        return await fetch(request, only, seconds=seconds, most_bytes=most_bytes, on_part=on_part)

    return ask
