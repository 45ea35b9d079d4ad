"""host/network/fetch: HTTPS requests to hosts that both the manifest and the policy allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from runner.contracts.ainb.host.params import denied, invalid
from runner.protocol.host_services import Fetched, Fetcher, Granted, HostError, granting
from runner.protocol.https.failure import FetchFailed
from runner.protocol.jsonrpc import INTERNAL_ERROR
from sandbox.network.addresses import vet
from sandbox.network.rules import HostRule, covers, parse_rule

if TYPE_CHECKING:
    from runner.protocol.https.request import HttpsRequest, Target
    from runner.protocol.https.response import HttpsResponse

CAPABILITY = "network"
PORT = 443
# Bytes of an answer's body: with its headers, as base64, it fits into a frame.
BODY_MOST_BYTES = 8 << 20

_SHOWN = 1000  # characters of a reason


def common_rules(listed: Sequence[str] | None, allowed: Sequence[str]) -> tuple[HostRule, ...]:
    """What a manifest and a policy both allow, on the port of HTTPS.

    `listed`: the manifest's exact names; None: it says `true`. `allowed`: the policy's patterns. An entry
    that is no rule allows nothing.
    """
    asked = [HostRule("any", "", ((PORT, PORT),))] if listed is None else list(_parse(listed, exact=True))
    return tuple(dict.fromkeys(_common(asked, list(_parse(allowed, exact=False)))))


def _parse(texts: Sequence[str], *, exact: bool) -> Iterator[HostRule]:
    for text in texts:
        try:
            rule = parse_rule(text, default_ports=(PORT,), ranges=not exact)
        except ValueError:
            continue
        if exact and rule.kind not in ("name", "address"):
            continue
        if any(first <= PORT <= last for first, last in rule.ports):
            yield rule._replace(ports=((PORT, PORT),))


def _common(asked: Sequence[HostRule], allowed: Sequence[HostRule]) -> Iterator[HostRule]:
    for one in asked:
        for other in allowed:
            if covers(other, one):
                yield one
            elif covers(one, other):
                yield other


class GuardedFetcher:
    """Fetches only URLs that a rule allows, by itself or through a fetcher of the host."""

    def __init__(self, rules: Sequence[HostRule], own: Fetcher | None = None) -> None:
        self.rules = tuple(rules)
        self._own = own

    async def fetch(
        self, url: str, method: str, headers: Sequence[tuple[str, str]], body: bytes | None
    ) -> Fetched:
        # Few plugins fetch anything, and TLS takes a while to import.
        from runner.protocol.https.fetch import fetch, follow
        from runner.protocol.https.request import HttpsRequest

        request = HttpsRequest(url, method, tuple(headers), body)
        try:
            if self._own is None:
                answer = await fetch(request, self.rules, most_bytes=BODY_MOST_BYTES)
            else:
                hosts = tuple(str(rule) for rule in self.rules)
                with granting(Granted.current()._replace(hosts=hosts)):
                    answer = await follow(request, self.rules, partial(_ask, self._own))
        except FetchFailed as failed:
            reason = str(failed)[:_SHOWN]
            if failed.kind == "denied":
                raise denied(CAPABILITY, reason=reason) from None
            if failed.kind == "invalid":
                raise invalid(reason) from None
            raise HostError(INTERNAL_ERROR, f"fetch failed: {reason}", {"kind": failed.kind}) from None
        return Fetched(answer.status, answer.headers, answer.body)


async def _ask(own: Fetcher, request: HttpsRequest, target: Target) -> HttpsResponse:
    """Ask the host's own fetcher for a URL that was checked. Raises FetchFailed, and what the fetcher
    raises."""
    from runner.protocol.https.response import HttpsResponse

    if target.host.version and (reason := vet(target.host.text)):
        raise FetchFailed("denied", f"{target.origin} was not asked: its address {reason}")
    fetched = await own.fetch(target.url, request.method, request.headers, request.body)
    if len(fetched.body) > BODY_MOST_BYTES:
        raise FetchFailed("too_large", f"the body of the answer has more than {BODY_MOST_BYTES} bytes")
    return HttpsResponse(fetched.status, tuple(fetched.headers), fetched.body, target.url)
