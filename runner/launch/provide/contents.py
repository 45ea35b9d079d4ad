"""The contents of the cage's memory files: whether each has one, and fits."""

from __future__ import annotations

from runner.outcome import EXEC_REFUSED, Failure, Outcome
from sandbox.cell.contents import Contents
from sandbox.document.diagnostic import quoted
from sandbox.paths.mounts import contains
from sandbox.typed import TYPE_CHECKING
from sandbox.units import format_limit

if TYPE_CHECKING:
    from runner.launch.stages import Planned


def require_contents(planned: Planned, contents: Contents | None) -> None:
    """Refuse a launch whose memory files have no content, or more than fits. Raises Failure."""
    files, given = planned.plan.memory_files, contents or Contents()
    slots = [file.secret for file in files if file.secret]
    listed_slots = ", ".join(slots) or "none"
    if strays := given.strays(files):
        message = (
            f"the plugin asks for no secret or file {quoted(strays[0])}; its secrets are: {listed_slots}"
        )
        raise _contents_refused(message, f"leave out --secret {strays[0]}=…")
    lacking = [file for file in files if given.of(file) is None]
    for file in lacking:
        if file.secret:
            message = f"the plugin needs the secret {quoted(file.secret)}, and it was not given"
            hint = f"--secret {file.secret}=@FILE, or --secret {file.secret}=env:NAME for a variable"
            raise _contents_refused(message, f"{hint}; its secrets are: {listed_slots}")
        message = f"{file.dest} exists only in memory, and this call brings no content for it"
        raise _contents_refused(message, "use `runner call`, which makes it")
    scratch, size = planned.grant.scratch, planned.grant.scratch_bytes
    if scratch is not None and size is not None:
        held = sum(len(given.of(file) or b"") for file in files if contains(scratch.dest, file.dest))
        if held > size:
            message = (
                f"the files for {scratch.dest} take {held} bytes, and it has {format_limit('disk', size)}"
            )
            raise _contents_refused(
                message, "raise the disk limit: --limit disk=SIZE, or in manifest and policy"
            )


def _contents_refused(message: str, hint: str) -> Failure:
    return Failure(Outcome("policy_denied", "plan", message, "memory_file", hint), EXEC_REFUSED)
