"""Guarded names in folders that a plugin may write: there, as long as the plugin runs."""

from __future__ import annotations

from sandbox.paths.stand_in import GuardedPlace, StandInRefused, held_places
from sandbox.plan.plan import OpenPlan, PlanRefused
from sandbox.scopes import ExitStack
from sandbox.spec import Denial


def hold_guarded(opened: OpenPlan, stack: ExitStack) -> None:
    """Make the guarded names that are missing in writable folders, for as long as the plugin runs. Raises
    PlanRefused."""
    for guard in opened.plan.guards:
        if guard.access == "write" or guard.state == "optional":
            continue
        # Also what was there before: it may have been another launch's, and be gone.
        place = GuardedPlace(opened.descriptors[guard.dest], guard.path, guard.content)
        try:
            stack.enter_context(held_places([place]))
        except StandInRefused as refused:
            reason = f"{guard.dest} cannot be written by a plugin: {refused}"
            raise PlanRefused([Denial("guarded", guard.dest, reason, refused.hint)]) from None
