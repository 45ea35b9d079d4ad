"""The trial of a plugin, from the command line."""

from __future__ import annotations

from runner.cli.live.session import cancelled_by_signals, interrupted, run_on_trio
from runner.conformance.engine import TrialSubject, try_plugin
from runner.conformance.report import Verdict
from runner.conformance.rules import RuleBook
from runner.exceptions import PluginFailure


def try_on_trio(book: RuleBook, subject: TrialSubject, seconds: float) -> tuple[Verdict, ...]:
    """The verdicts. Raises PluginFailure if the plugin cannot be launched, or a signal ended the trial."""

    async def work() -> tuple[Verdict, ...]:
        verdicts: tuple[Verdict, ...] = ()
        failed: PluginFailure | None = None
        async with cancelled_by_signals(lambda *_: None) as numbers:
            try:
                verdicts = await try_plugin(book, subject, seconds)
            except PluginFailure as failure:
                failed = failure  # raised after the nursery, which would put it into a group
        if numbers or failed is not None:
            raise failed or interrupted(numbers[0])
        return verdicts

    return run_on_trio(work)
