"""Tells a web server of the operator's about confirmations that wait for a person.

Each is sent once, to a host that the policy lists. It is a notice: whoever gets it cannot answer by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from runner.exceptions import PluginFailure
from runner.gateway.listed_hosts import Ask, asking, require_listed
from runner.protocol import wire
from runner.protocol.https.failure import FetchFailed
from runner.protocol.https.request import HttpsRequest
from runner.serve.news import NewsQueue
from sandbox.policy.policy import NetworkRule

_SECONDS = 20.0
_MOST_BYTES = 64 << 10  # of an answer, which nobody reads


class Webhook:
    def __init__(
        self, url: str, rule: NetworkRule, say: Callable[[str], None], ask: Ask | None = None
    ) -> None:
        """`rule`: of the policy. `ask`: sends a request; None: to its host."""
        self._url = url
        self._rule = rule
        self._say = say
        self._ask = ask or asking(_SECONDS, _MOST_BYTES)
        self._news = NewsQueue[Mapping[str, Any]]()  # if the server is slow, some are lost

    def tell(self, row: Mapping[str, Any]) -> None:
        self._news.put(row, row)

    async def run(self) -> None:
        async for row in self._news:
            headers = (("Content-Type", "application/json"),)
            try:
                require_listed(self._rule, self._url)
                body = wire.encode({"type": "confirmation", **row})
                answer = await self._ask(HttpsRequest(self._url, "POST", headers, body))
                fault = f"it answers with the status {answer.status}" if answer.status >= 400 else ""
            except PluginFailure as failure:
                fault = f"{failure.outcome.message}; {failure.outcome.hint}"
            except (FetchFailed, ValueError) as error:
                fault = str(error)
            if fault:
                self._say(f"the webhook was not told of the confirmation {row.get('id')}: {fault}")
