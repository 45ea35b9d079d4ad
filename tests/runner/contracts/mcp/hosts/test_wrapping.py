from __future__ import annotations

import pytest

from runner.contracts.mcp.hosts.wrapping import WrappedLine, split_wrapped

OPTIONS = ("--wrapped", "{}", "--name", "files", "--env", "TOKEN")


def test_takes_the_command_line_apart() -> None:
    argv = ("/opt/bin/runner", "run", *OPTIONS, "--", "npx-server", "--", "-x")
    assert split_wrapped(argv) == WrappedLine("/opt/bin/runner", OPTIONS, ("npx-server", "--", "-x"))


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("/opt/bin/runner",),
        ("/opt/bin/runner", "run", "--", "server"),  # by hand, not by wrap
        ("/opt/bin/runner", "run", "--", "server", "--wrapped", "{}"),
        ("/opt/bin/runner", "run", *OPTIONS),
        ("/opt/bin/runner", "run", *OPTIONS, "--"),
        ("/opt/bin/runner", "exec", *OPTIONS, "--", "server"),
        ("/opt/bin/walker", "run", *OPTIONS, "--", "server"),
    ],
)
def test_anything_else_is_no_wrapped_command_line(argv: tuple[str, ...]) -> None:
    assert split_wrapped(argv) is None
