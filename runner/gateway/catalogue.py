"""What all plugins offer. A plugin is asked once, and again when something about it has changed.

One that is slow or does not start keeps nobody else's list back: who asks waits for a bounded time, and is
told later that there is more. Until a plugin has answered, its list is what it listed the last time, as it is
recorded: so a host's first list is whole at once. Calls wait for the plugin's own list.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping
from time import thread_time
from typing import NamedTuple

import trio

from runner.approvals.record import ApprovalsUnusable
from runner.approvals.tools import MOST_OTHERS, ToolRecord, WithheldTool
from runner.exceptions import PluginError, PluginFailure
from runner.gateway.names import SEPARATOR, plugin_part
from runner.gateway.settings import LIST_SECONDS
from runner.gateway.tool_source import Lists, ToolSource
from runner.gateway.translate import LISTS, MOST_VALUES, Shown, UnfitEntry, count_values, shown
from runner.lifecycle.spec import LifecycleNews
from runner.protocol.dialect import Notice, Progress
from runner.session.verdict import MORE_SECONDS
from sandbox.document.diagnostic import printable, quoted

MOST_ENTRIES = MOST_OTHERS  # of one list of one plugin
_AGAIN_SECONDS = 10.0  # after a failure, before the plugin is asked again for a list
_PAUSE_SECONDS = 1.0  # between two lists of one plugin
_REST = 20  # times as long as its last list took to judge, a plugin's next one waits: it says how large it is
_MOST_WITHHELD_TOLD = 10


class KnownSource:
    """What is known about one plugin."""

    def __init__(self, source: ToolSource) -> None:
        self.source = source
        self.lists: Lists | None = None  # as the plugin gave them
        # Name of a list -> public name -> entry. Empty until the plugin has answered and was judged.
        self.shown: Mapping[str, Mapping[str, Shown]] = {}
        self.withheld: tuple[WithheldTool, ...] = ()
        self.fault = ""  # why there is nothing
        self.remarks: tuple[str, ...] = ()  # what is withheld, and why
        self.failed_at = -_AGAIN_SECONDS
        self.ask_after = 0.0  # seconds, by trio's clock
        self.missed = False  # somebody was answered without it
        self.recalled = False  # `shown` is of the record, and the plugin has not answered yet
        self.looked: trio.Event | None = None  # whether the record was read; None: nobody asked
        self.asking = False
        self.stale = False  # it has changed while it was asked
        self.done = trio.Event()


class _MadeLists(NamedTuple):
    """What clients see of the lists of one plugin."""

    shown: Mapping[str, Mapping[str, Shown]]
    withheld: tuple[WithheldTool, ...]
    remarks: tuple[str, ...]
    seconds: float  # of processor time that it took


class Catalogue:
    def __init__(
        self,
        nursery: trio.Nursery,
        sources: Callable[[], Iterable[ToolSource]],
        record: ToolRecord,
        say: Callable[[str], None],
        *,
        seconds: float = LIST_SECONDS,
        trust_first: bool = True,
    ) -> None:
        """`sources`: those that there are now; of two with one name the first counts. `seconds`: how long a
        list waits for plugins. `trust_first`: whether tools of a plugin that was never seen are shown."""
        self._nursery = nursery
        self._sources = sources
        self._record = record
        self._seconds = seconds
        self._trust_first = trust_first
        self._say = say
        self._known: dict[str, KnownSource] = {}  # by the plugin's part of public names
        self._left_out: set[tuple[str, str]] = set()  # plugins of which that was said
        self.on_changed: list[Callable[[str], None]] = []  # called with the name of a list
        # Called with a plugin's name and what is wrong with its lists: many hosts ask for lists only once.
        self.on_remark: list[Callable[[str, str], None]] = []

    async def all(self) -> list[KnownSource]:
        """All plugins, with what is known after a bounded time."""
        self._follow()
        known = list(self._known.values())
        for each in known:
            self._ask(each)
        with trio.move_on_after(self._seconds):
            for each in known:
                if each.asking and each.looked is not None:
                    await each.looked.wait()
                if each.asking and not each.shown:
                    await each.done.wait()
        for each in known:
            each.missed = each.missed or not each.shown
        return known

    async def find(self, what: str, public: str) -> Shown | None:
        """The entry of this name. Only its own plugin is asked, and waited for."""
        part, _, _ = public.partition(SEPARATOR)
        known = await self.plugin(part)
        return None if known is None else known.shown.get(what, {}).get(public)

    def known(self, part: str) -> KnownSource | None:
        """What is known now, by the plugin's part of public names."""
        return self._known.get(part)

    async def plugin(self, part: str) -> KnownSource | None:
        if part not in self._known:
            self._follow()
        known = self._known.get(part)
        if known is not None and (not known.shown or known.recalled):
            self._ask(known)
            if known.asking:
                await known.done.wait()
        return known

    def withheld(self) -> Iterator[tuple[ToolSource, WithheldTool]]:
        """The tools that no client sees, each with its plugin."""
        return ((known.source, tool) for known in self._known.values() for tool in known.withheld)

    def hear(self, name: str, event: Notice | Progress) -> None:
        """What a plugin says beside its answers."""
        value = event.value if isinstance(event, Notice) and event.kind == "changed" else None
        if isinstance(value, dict) and "list" in value:
            self.changed(name)

    def changed(self, name: str) -> None:
        """A plugin says that its lists have changed, or it was started again."""
        known = self._known.get(plugin_part(name))
        if known is None or known.source.name != name:
            return
        known.stale, known.failed_at = True, -_AGAIN_SECONDS
        self._ask(known)

    async def follow(self, news: AsyncIterable[LifecycleNews]) -> None:
        """Ask a plugin that was started again: it may be another version of itself."""
        async for each in news:
            known = self._known.get(plugin_part(each.name))
            if each.what == "state" and each.state == "ready" and known is not None and not known.asking:
                self.changed(each.name)

    async def reload(self) -> None:
        """The configuration or the record of approved tools may have changed."""
        before = {part: known.source.mark for part, known in self._known.items()}
        self._follow()
        if before and before != {part: known.source.mark for part, known in self._known.items()}:
            self._tell(LISTS)
        for known in list(self._known.values()):
            known.failed_at = -_AGAIN_SECONDS
            if known.fault:  # it may have been approved
                self._ask(known)
            elif known.lists is not None and not known.asking:
                try:
                    await self._show(known)
                except ApprovalsUnusable as unusable:
                    self._failed(known, str(unusable), unusable.hint)
                except Exception as error:  # noqa: BLE001 -- a full disk, or a bug; the other plugins stay
                    self._failed(known, f"internal: {type(error).__name__}: {error}", "")

    def _follow(self) -> None:
        """Take notice of plugins that have come, changed or gone."""
        by_part: dict[str, list[ToolSource]] = {}
        for source in sorted(self._sources(), key=lambda each: each.name):
            by_part.setdefault(plugin_part(source.name), []).append(source)
        found: dict[str, KnownSource] = {}
        for part, rivals in by_part.items():
            known = self._known.get(part)
            one = _owner(rivals, known)
            for source in rivals:
                if source is not one and (source.name, source.look) not in self._left_out:
                    self._left_out.add((source.name, source.look))  # once, and not at every list
                    others = ", ".join(each.name for each in rivals if each is not source)
                    self._say(f"{source.name} is left out: {others} has the same name or short name")
            if one is not None:
                same = known is not None and _mark(known.source) == _mark(one)
                found[part] = known if same and known is not None else KnownSource(one)
        self._known = found

    def _ask(self, known: KnownSource) -> None:
        failed = known.fault and trio.current_time() - known.failed_at < _AGAIN_SECONDS
        if known.asking or failed or (known.lists is not None and not known.stale):
            return
        known.asking, known.done = True, trio.Event()
        self._nursery.start_soon(self._learn, known)
        if known.looked is None:
            known.looked = trio.Event()
            self._nursery.start_soon(self._recall, known, known.looked)

    async def _recall(self, known: KnownSource, looked: trio.Event) -> None:
        """Show what is recorded until the plugin has answered. One that may not start shows nothing."""
        found = None
        if not known.source.held:
            try:
                found = await trio.to_thread.run_sync(self._make_recalled, known.source)
            except Exception:  # noqa: BLE001 -- a damaged record, which the plugin's own list tells
                pass
        if found is not None and known.asking and known.lists is None and not known.shown:
            known.shown, known.recalled = found, True
        looked.set()

    async def _learn(self, known: KnownSource) -> None:
        try:
            while True:
                # A plugin may announce changes as often as it likes.
                await trio.sleep_until(known.ask_after)
                known.ask_after = trio.current_time() + _PAUSE_SECONDS
                known.stale, known.fault = False, ""
                known.lists = await known.source.lists()
                await self._show(known)
                if not known.stale:
                    break
        except (PluginError, PluginFailure) as error:
            self._failed(known, f"{error.outcome.code}: {error.outcome.message}", error.outcome.hint)
        except ApprovalsUnusable as unusable:
            self._failed(known, str(unusable), unusable.hint)
        except LookupError:
            self._failed(known, "it is gone", "")
        except Exception as error:  # noqa: BLE001 -- a bug; the other plugins stay
            self._failed(known, f"internal: {type(error).__name__}: {error}", "")
        finally:
            known.asking = False
            known.done.set()
        if known.missed and not known.fault:
            known.missed = False
            self._tell(LISTS)

    def _failed(self, known: KnownSource, why: str, hint: str) -> None:
        was, known.shown, known.recalled = known.shown, {}, False
        known.lists, known.failed_at = None, trio.current_time()
        known.withheld = ()
        hint = hint.removeprefix(MORE_SECONDS).removeprefix(", or ")  # nobody can: the gateway made the call
        known.fault = printable(
            f"{known.source.name}: its tools are missing: {why}" + f"; {hint}" * bool(hint)
        )
        self._remark(known, known.fault)
        self._tell(what for what in LISTS if was.get(what))

    async def _show(self, known: KnownSource) -> None:
        """Make what clients see of what the plugin gave."""
        given = known.lists
        # In a thread: a plugin can make this work take seconds, and other plugins must not wait for it.
        made = await trio.to_thread.run_sync(self._make_lists, known.source, given or {})
        known.ask_after = max(known.ask_after, trio.current_time() + _REST * made.seconds)
        if known.lists is not given:
            return  # it gave another list meanwhile, which is judged too
        known.withheld, found, remarks = made.withheld, made.shown, made.remarks
        was, known.shown, known.recalled = known.shown, found, False
        told, known.remarks = frozenset(known.remarks), remarks
        for each in [each for each in remarks if each not in told][:_MOST_WITHHELD_TOLD]:
            self._remark(known, each)
        if was and was != found and not known.missed:
            self._tell(what for what in LISTS if was.get(what) != found[what])

    def _make_lists(self, source: ToolSource, lists: Lists) -> _MadeLists:
        began, name = thread_time(), source.name
        trust_first = self._trust_first and not source.moved
        origin = source.origin()
        judged = self._record.judge(source.identity, lists, trust_first=trust_first, origin=origin)
        look = f"; to see the change and accept it: {source.look}"
        remarks = [
            f"{name}: {quoted(one.name)} is withheld: {one.reason}{look * one.acceptable}"
            for one in judged.withheld
        ]
        found, unfit = _public(source, judged.shown)
        for what in LISTS:
            if max(len(judged.shown.get(what, ())), len(lists.get(what, ()))) > MOST_ENTRIES:
                unfit.append(f"{name}: only the first {MOST_ENTRIES} of its {what} are shown")
        told = tuple(map(printable, [*remarks, *unfit]))
        return _MadeLists(found, tuple(judged.withheld), told, thread_time() - began)

    def _make_recalled(self, source: ToolSource) -> Mapping[str, Mapping[str, Shown]] | None:
        lists = self._record.remembered(source.identity, source.origin())
        return None if lists is None else _public(source, lists)[0]

    def _remark(self, known: KnownSource, text: str) -> None:
        self._say(text)
        for tell in self.on_remark:
            tell(known.source.name, text)

    def _tell(self, lists: Iterable[str]) -> None:
        for what in lists:
            for tell in self.on_changed:
                tell(what)


def _public(source: ToolSource, lists: Lists) -> tuple[Mapping[str, Mapping[str, Shown]], list[str]]:
    """The entries by their public names, and which are left out and why."""
    found: dict[str, dict[str, Shown]] = {}
    unfit: list[str] = []
    for what in LISTS:
        found[what] = {}
        left = MOST_VALUES
        for entry in lists.get(what, ())[:MOST_ENTRIES]:
            try:
                left -= count_values(entry, left)
                if left < 0:
                    raise UnfitEntry(f"with it they have more than {MOST_VALUES} lists, objects and keys")
                one = shown(what, source.name, entry, passes=source.passes)
                if one.public in found[what]:
                    raise UnfitEntry("another one has the same name")
            except UnfitEntry as reason:
                own = quoted(str(entry.get(LISTS[what][2], "")))
                unfit.append(f"{source.name}: {own} of its {what} is left out: {reason}")
                continue
            found[what][one.public] = one
    return found, unfit


def _owner(rivals: list[ToolSource], known: KnownSource | None) -> ToolSource | None:
    """Who has the plugin's part of public names. A plugin chooses its name itself, so that it may be made for
    this: what the settings name comes first, then who had it before. Of several others nobody has it."""
    if len(rivals) > 1:
        elsewhere = [each for each in rivals if each.maker is not None]
        before = [each for each in rivals if known is not None and known.source.identity == each.identity]
        rivals = elsewhere or before or rivals
    return rivals[0] if len(rivals) == 1 else None


def _mark(source: ToolSource) -> tuple[str, str]:
    return source.name, source.mark
