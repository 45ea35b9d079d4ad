"""A secret that a plugin repeats where a message is cut: no beginning of it is shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from runner.protocol.secrets import Secrets
from runner.session.state import without_secrets
from tests.runner.contracts.vai.conversation import (
    HELLO,
    WHO,
    called,
    dialect,
    event,
    frame,
    hear,
    ready,
    refused,
    response,
)

SECRET = "sk-live-51Hq8ZtYw0aBcDeFgHiJkLmNoPqRsTuVwXyZ"


def failed(**error: str) -> dict[str, Any]:
    return response({"status": "failed", "error": error})


def header(text: str) -> Any:
    framer = dialect().framer()
    framer.feed(text.encode() + b"\r\n\r\n")
    assert framer.fault is not None
    return framer.fault.message  # which `SessionState.fail` hides


# Characters that are shown, and where.
CUT: list[tuple[str, int, Callable[[str], Any]]] = [
    ("message", 2000, lambda text: hear(called(), refused("E", text))),
    ("code", 200, lambda text: hear(called(), refused(text, "no"))),
    ("message of a failure", 2000, lambda text: hear(called(), failed(code="E", message=text))),
    ("code of a failure", 200, lambda text: hear(called(), failed(code=text))),
    ("package", 60, lambda text: hear(dialect(), {**HELLO, "plugin": {**WHO, "package_id": text}})),
    ("claimed package", 200, lambda text: hear(dialect(), {**HELLO, "plugin": {**WHO, "package_id": text}})),
    ("version", 60, lambda text: hear(dialect(), {**HELLO, "plugin": {**WHO, "version": text}})),
    ("first frame", 60, lambda text: hear(dialect(), frame(text))),
    ("protocol", 60, lambda text: hear(ready(), {**HELLO, "protocol": text})),
    ("type", 60, lambda text: hear(ready(), frame(text))),
    ("event of no request", 60, lambda text: hear(called(), event(text))),
    ("long event", 60, lambda text: hear(called(), event(text, text="." * 70_000))),
    ("type of an event", 60, lambda text: hear(called(), event(kind=text))),
    ("response to no request", 60, lambda text: hear(ready(), response({}, text))),
    ("header", 60, header),
]


@pytest.mark.parametrize(("what", "most", "spill"), CUT, ids=[what for what, _, _ in CUT])
def test_no_beginning_of_a_secret_is_shown_where_a_text_is_cut(
    what: str, most: int, spill: Callable[[str], Any]
) -> None:
    secrets = Secrets({"token": SECRET})
    for shown in (4, 8, len(SECRET) - 1):
        said = spill("x" * (most - 1 - shown) + SECRET + ", and more")
        assert f"x{SECRET[:shown]}…" in repr(said)  # the control
        if isinstance(said, str):
            hidden = secrets.hide(said)
        else:
            hidden = repr([without_secrets(each, secrets) for each in said])
        assert SECRET[:4] not in hidden and "x[secret]…" in hidden
