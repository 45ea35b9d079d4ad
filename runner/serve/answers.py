"""What routes share: JSON of a request's body, numbers and times of its query, and JSON as the answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import trio
from starlette.requests import Request
from starlette.responses import JSONResponse

from runner.protocol import wire
from runner.serve.refusal import Refused

_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)\Z", re.ASCII)
_SHORT_BYTES = 64 << 10  # a longer body is parsed in a thread


class Json(JSONResponse):
    """In ASCII: the name of a file may have bytes that are not UTF-8."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


async def read_document(request: Request) -> dict[str, Any]:
    """The body, a JSON object. Raises Refused."""
    raw = await request.body()
    try:
        if len(raw) <= _SHORT_BYTES:
            found = wire.decode(raw)
        else:
            found = await trio.to_thread.run_sync(wire.decode, raw)
    except ValueError as error:
        raise Refused(400, "invalid_json", f"the body is not JSON that can be used: {error}") from None
    if not isinstance(found, dict):
        raise Refused(400, "invalid_body", "the body has to be a JSON object")
    return found


def read_most(word: str | None) -> int:
    """How many rows a query asks for. Raises Refused."""
    if word is None:
        return 100
    if not word.isascii() or not word.isdigit() or len(word) > 6:
        raise Refused(400, "invalid_query", "most: it has to be a number of rows")
    return int(word)


def read_moment(query: Mapping[str, str], key: str) -> float | None:
    """A time in a query, as seconds since 1970. Raises Refused."""
    word = query.get(key)
    if word is None:
        return None
    try:
        if _TIME.match(word):
            return datetime.fromisoformat(word.replace("Z", "+00:00")).astimezone(UTC).timestamp()
        if re.fullmatch(r"\d{1,11}(\.\d{1,6})?", word, re.ASCII):
            return float(word)
    except (ValueError, OverflowError):
        pass
    message = f"{key} is not a time: write 2026-01-31T12:00:00Z, or seconds since 1970"
    raise Refused(400, "invalid_query", message)
