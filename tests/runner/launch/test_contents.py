"""A launch whose memory files have no content, or more than fits, is refused before anything is made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from runner.launch.acquire import require_contents
from runner.launch.read import secret_contents
from runner.outcome import Failure
from sandbox.cell.contents import MOST_SECRET_BYTES, Contents
from sandbox.spec import MemoryFile, Scratch

KEY, OTHER = MemoryFile("/box/secrets/key", secret="key"), MemoryFile("/box/secrets/other", secret="other")
BIG = MemoryFile("/box/scratch/1/big")
SECRET = "s3cret-of-the-test"


def planned(*files: MemoryFile, size: int = 100) -> Any:
    grant = SimpleNamespace(scratch=Scratch("/box/scratch/1"), scratch_bytes=size, decided_by=())
    return SimpleNamespace(plan=SimpleNamespace(memory_files=files), grant=grant)


@pytest.mark.parametrize(
    ("files", "given", "message"),
    [
        ((KEY,), None, "needs the secret 'key'"),
        ((KEY, OTHER), Contents({"key": b"x"}), "needs the secret 'other'"),
        ((KEY,), Contents({"key": b"x", "third": SECRET.encode()}), "no secret or file 'third'"),
        ((), Contents({"key": SECRET.encode()}), "its secrets are: none"),
        ((BIG,), None, "/box/scratch/1/big exists only in memory"),
        ((BIG,), Contents(files={"/box/scratch/1/big": b"x" * 101}), "take 101 bytes, and it has 100"),
        ((KEY,), Contents({"key": b"x"}, {"/etc/passwd": b""}), "no secret or file '/etc/passwd'"),
    ],
)
def test_refused(files: tuple[MemoryFile, ...], given: Contents | None, message: str) -> None:
    with pytest.raises(Failure) as refused:
        require_contents(planned(*files), given)
    outcome = refused.value.outcome
    assert (outcome.code, outcome.cause) == ("policy_denied", "memory_file") and message in outcome.message
    assert outcome.hint and SECRET not in outcome.message + outcome.hint


def test_the_message_says_how_to_give_it() -> None:
    with pytest.raises(Failure) as refused:
        require_contents(planned(KEY, OTHER), None)
    hint = refused.value.outcome.hint
    assert "--secret key=@FILE" in hint and "its secrets are: key, other" in hint


def test_taken() -> None:
    given = Contents({"key": b"x" * 1000}, {"/box/scratch/1/big": b"x" * 100})
    require_contents(planned(KEY, BIG), given)


FILED: Any = SimpleNamespace(name="filed", takes=("secret_files",))
UNFILED: Any = SimpleNamespace(name="unfiled", takes=())


def test_which_secrets_are_files() -> None:
    given = {"key": "né", "raw": b"\xff", "--token": SECRET}
    found = secret_contents(FILED, given)
    assert found is not None and found.secrets == {"key": "né".encode(), "raw": b"\xff"}
    assert secret_contents(UNFILED, given) is None and secret_contents(FILED, None) is None
    with pytest.raises(ValueError, match="'key' has to be text or bytes"):
        secret_contents(FILED, {"key": {"a": 1}})
    with pytest.raises(ValueError, match="more than 1 MiB"):
        secret_contents(FILED, {"key": b"x" * (MOST_SECRET_BYTES + 1)})
