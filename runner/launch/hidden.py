"""The values of credentials that a plugin uses and does not get: found at each launch, in no plan."""

from __future__ import annotations

import os

from runner.outcome import EXEC_REFUSED, Failure, Outcome
from sandbox.broker.placeholder import make_placeholder
from sandbox.cell.contents import Contents
from sandbox.network.credentials import BrokerPlan, Credential, written_values
from sandbox.spec import LITERAL, SLOT
from sandbox.speed.typed import TYPE_CHECKING, Mapping

if TYPE_CHECKING:
    from runner.launch.stages import Planned

_MOST_BYTES = 16 << 10
_MOST_ROOTS_BYTES = 4 << 20
_FEWEST_BYTES = 8  # a shorter text occurs by accident in what a server sends
_COMMAND_SECONDS = 30.0
# Where the programs of a policy's commands are for an entry of a configuration. The PATH of such a start may
# be the entry's own, and the entry may have come with a project. So may the agent at SSH_AUTH_SOCK.
_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"


def literal_values(planned: Planned) -> Mapping[str, str]:
    """Values that are in the manifest, or on the command line."""
    return {**written_values(planned.plugin.spec.env), **dict(planned.invocation.overrides.env)}


def with_hidden(
    contents: Contents | None,
    broker: BrokerPlan,
    given: Mapping[str, str],
    literals: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Contents:
    """The contents of the launch, with the values. `given`: the variables that can be passed on to the
    plugin. `environ`: of the runner, for the commands of the policy; by default `given`. If that is another
    one, a host has started an entry. Raises Failure."""
    outside = given if environ is None else environ
    if outside is not given:
        outside = {name: value for name, value in outside.items() if name != "SSH_AUTH_SOCK"}
        outside["PATH"] = _SYSTEM_PATH
    for path in dict.fromkeys(file for each in broker.authorities for file in each.files):
        _require_roots(path)
    values = {}
    for credential in broker.credentials:
        if credential.source == SLOT:
            # A copy: where the file's own is overwritten, the broker still needs it.
            value = bytes(bytearray((contents or Contents()).secrets.get(credential.name, b"")))
        else:
            value = _find(credential, given, literals or {}, outside)
        if fault := _fault(value):
            raise _refused(
                credential, f"its value {fault}", "hide only what travels in requests, as tokens do"
            )
        try:
            make_placeholder(value)
        except ValueError as error:
            raise _refused(credential, f"its value {error}", "nobody may guess the placeholder") from None
        values[credential.name] = value
        # Others that the variable has somewhere, and that may be filled in elsewhere: never sent, and hidden.
        for place in () if credential.source == SLOT else (given, literals or {}):
            other = os.fsencode(place.get(credential.name, ""))
            if other != value and not _fault(other):
                values[f"{credential.name} {len(values)}"] = other
    if contents is None:
        return Contents(hidden=values)
    return Contents(contents.secrets, contents.files, values)


def _require_roots(path: str) -> None:
    try:
        with open(path, "rb") as file:
            found = b"-----BEGIN CERTIFICATE-----" in file.read(_MOST_ROOTS_BYTES)
    except OSError as error:
        raise Failure(
            _outcome(f"{path}, which the policy names for roots, cannot be read: {error.strerror}"),
            EXEC_REFUSED,
        ) from None
    if not found:
        raise Failure(_outcome(f"{path}, which the policy names for roots, has no certificate"), EXEC_REFUSED)


def _find(
    credential: Credential, given: Mapping[str, str], literals: Mapping[str, str], environ: Mapping[str, str]
) -> bytes:
    kind, *words = credential.source or ("given", credential.name)
    if credential.source == LITERAL:
        return os.fsencode(literals.get(credential.name, ""))
    if kind == "command":
        return _answer(credential, tuple(words), environ)
    [place] = words
    if kind == "file":
        try:
            with open(place, "rb") as file:
                return file.read(_MOST_BYTES + 1).removesuffix(b"\n").removesuffix(b"\r")
        except OSError as error:
            raise _refused(
                credential, f"{place} cannot be read: {error.strerror}", "see the policy"
            ) from None
    value = (given if kind == "given" else environ).get(place)
    if value is None:
        raise _refused(credential, f"the variable {place} is not set", f"set {place} for the runner")
    return os.fsencode(value)


def _answer(credential: Credential, argv: tuple[str, ...], environ: Mapping[str, str]) -> bytes:
    """What the policy's command prints. It runs outside, as the caller."""
    import subprocess

    if credential.keep:
        from runner.launch.kept_answers import find_kept, keep

        if kept := find_kept(argv, environ, credential.keep):
            return kept
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(environ),
            timeout=_COMMAND_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        why = f"{argv[0]} has not answered within {_COMMAND_SECONDS:g} s"
        raise _refused(credential, why, "run it yourself to see what it waits for") from None
    except OSError as error:
        why = f"{argv[0]} cannot be started: {error.strerror}"
        hint = f"the policy names the command; for an entry of a host a path, or a name in {_SYSTEM_PATH}"
        raise _refused(credential, why, hint) from None
    if done.returncode:
        why = f"{argv[0]} ended with status {done.returncode}"
        raise _refused(credential, why, "run it yourself to see what it says")
    answer = done.stdout[: _MOST_BYTES + 2].removesuffix(b"\n").removesuffix(b"\r")
    if credential.keep and not _fault(answer):
        keep(argv, environ, answer, credential.keep)
    return answer


def _fault(value: bytes) -> str:
    if not value:
        return "is empty"
    if value.startswith(b"-----BEGIN"):
        return "is a key or a certificate, which signs and does not travel"
    if any(byte < 0x20 or byte == 0x7F for byte in value):
        return "has a control character, which no header may have"
    if value != value.strip(b" "):
        return "begins or ends with a blank, which no header keeps"
    if not _FEWEST_BYTES <= len(value) <= _MOST_BYTES:
        return f"has {len(value)} bytes; {_FEWEST_BYTES} to {_MOST_BYTES} can be hidden"
    return ""


def _refused(credential: Credential, why: str, hint: str) -> Failure:
    return Failure(_outcome(f"{credential.name} cannot be hidden: {why}", hint), EXEC_REFUSED)


def _outcome(message: str, hint: str = "the policy's table [credentials] names it") -> Outcome:
    return Outcome("launch_failed", "launch", message, "credential", hint)
