"""What probes print, and what it means."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sandbox.attacks.attacks import Attack
from sandbox.document.diagnostic import printable

Verdict = Literal["held", "not_held", "not_counted"]
_MOST_CHARACTERS = 60  # of an observation
# What a control says of a call, a protocol or a file that is not there.
_ABSENT = ("ENOSYS", "ENOENT", "ENOPROTOOPT", "EAFNOSUPPORT")


class Row(NamedTuple):
    attack: Attack
    verdict: Verdict
    observed: str  # in the cage
    control: str  # without the layer
    note: str = ""  # why it does not count


def program(nonce: str, attempts: Sequence[Sequence[str]]) -> bytes:
    """A Python program that makes these attempts, and needs no file but itself."""
    text = Path(__file__).with_name("probe.py").read_bytes()
    return text + f"\nmain({nonce!r}, {json.dumps(attempts)})\n".encode()


def read_answers(output: bytes, nonce: str, count: int) -> dict[int, str]:
    """What was observed, by the number of the attempt.

    Lines without the nonce are not the probe's. An attempt that is answered twice was not answered by the
    probe alone, so none of its answers counts.
    """
    found: dict[int, str] = {}
    twice: set[int] = set()
    for line in output.splitlines():
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(answer, dict) or answer.get("nonce") != nonce:
            continue
        number = answer.get("attempt")
        if type(number) is not int or not 0 <= number < count:
            continue
        if number in found:
            twice.add(number)
        found[number] = describe(answer).replace(nonce, "the decoy")
    return {number: words for number, words in found.items() if number not in twice}


def describe(answer: dict[str, Any]) -> str:
    """An answer in a few words: an errno, a signal, or `done` with what was got."""
    if "done" in answer:
        done = answer["done"]
        return "done" if done is True else f"done: {_short(done)}"
    for key in ("refused", "ended"):
        if isinstance(words := answer.get(key), str):
            return _short(words)
    return f"failed: {_short(answer.get('failed', ''))}"


def _short(value: object) -> str:
    text = printable(str(value)[: 2 * _MOST_CHARACTERS])
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"


def is_refusal(observed: str) -> bool:
    return not observed.startswith(("done", "failed"))


def judge(attack: Attack, observed: str | None, control: str | None, excuse: str = "") -> Row:
    """For our own cage. `observed`, `control`: None if there is no answer. `excuse`: why there is none."""
    if excuse:
        return Row(attack, "not_counted", observed or "-", control or "-", excuse)
    if observed is None:
        return Row(attack, "not_held", "no answer", control or "-")
    if observed not in attack.held:
        if observed == control and observed in _ABSENT:
            return Row(attack, "not_counted", observed, control, "this machine does not have it")
        return Row(attack, "not_held", observed, control or "-")
    if control is None:
        return Row(attack, "not_counted", observed, "-", "the control could not run")
    if control in attack.held or control.startswith("failed"):
        return Row(attack, "not_counted", observed, control, "without the layer it is refused too")
    if control in _ABSENT:
        return Row(attack, "not_counted", observed, control, "this machine does not have it")
    # If the control was refused with another errno, something behind the layer refused it: in the cage it was
    # the layer that answered.
    return Row(attack, "held", observed, control)


def judge_foreign(attack: Attack, observed: str | None, control: str | None, excuse: str = "") -> Row:
    """For another sandbox, whose layers are not known. `control`: without any sandbox."""
    if excuse:
        return Row(attack, "not_counted", observed or "-", control or "-", excuse)
    if observed is None or observed.startswith("failed"):
        return Row(
            attack, "not_counted", observed or "no answer", control or "-", "the probe could not try it"
        )
    if not is_refusal(observed):
        return Row(attack, "not_held", observed, control or "-")
    if control is None or control.startswith("failed"):
        return Row(attack, "not_counted", observed, control or "no answer", "the control could not run")
    if control in attack.held or control in _ABSENT:
        return Row(attack, "not_counted", observed, control, "refused without a sandbox, too")
    return Row(attack, "not_held" if observed == control else "held", observed, control)


def all_held(rows: Sequence[Row]) -> bool:
    """Whether something counts, and all that counts held."""
    verdicts = {row.verdict for row in rows}
    return "held" in verdicts and "not_held" not in verdicts
