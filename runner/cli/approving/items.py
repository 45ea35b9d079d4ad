"""What a plugin asks for or was allowed, one line each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from runner.launch.advice.places import WIDE_PATHS
from sandbox.network.credentials import looks_secret
from sandbox.network.ssh import is_key
from sandbox.paths.mounts import contains
from sandbox.policy.policy import is_loopback, private_fault, steers
from sandbox.spec import Approval, Limits
from sandbox.units import format_limit


class AskedItem(NamedTuple):
    kind: str  # read, write, staged, network, host, variable, hidden, ssh, image, seccomp, project, limit
    what: str
    unusual: str = ""  # why it stands out; empty: it does not


def items_of(approval: Approval, homes: Sequence[str] = (), project: str = "") -> tuple[AskedItem, ...]:
    """The items of an approval, unusual ones first. `project`: the folder the plugin works on."""
    found = [
        *(AskedItem("write", path, _of_path(path, homes, write=True)) for path in approval.write),
        *(AskedItem("read", path, _of_path(path, homes)) for path in approval.read),
        *_network(approval),
        *_variables(approval),
    ]
    if approval.seccomp == "compat":
        found.append(AskedItem("seccomp", "compat", "more system calls than the default filter lets through"))
    elif approval.seccomp != "strict":
        found.append(AskedItem("seccomp", approval.seccomp))
    if approval.staged:
        found.append(AskedItem("staged", "what it writes waits for you: runner diff, runner apply"))
    for each in approval.hide:
        name, _, host = each.partition("@")
        found.append(AskedItem("hidden", name, f"its value goes to {host or 'the hosts above'} only"))
    for each in approval.ssh:
        what = "it logs in with this key of yours" if is_key(each) else "it logs in at this host as you"
        found.append(AskedItem("ssh", each, what))
    found += [AskedItem("image", each, "in place of this machine's own files") for each in approval.images]
    if approval.project != "none":
        found.append(AskedItem("project", project or "the folder it works on", _of_path(project, homes)))
    return tuple(sorted(found, key=lambda item: not item.unusual))


def limit_items(limits: Limits) -> tuple[AskedItem, ...]:
    named = ((name, getattr(limits, name)) for name in limits._fields)
    return tuple(
        AskedItem("limit", f"{name} {format_limit(name, value)}")
        for name, value in named
        if value is not None
    )


def _of_path(path: str, homes: Sequence[str], *, write: bool = False) -> str:
    if not path:
        return ""
    why = ["it can change what is there"] if write else []
    if path in WIDE_PATHS:
        why.append("a large part of this machine")
    elif path in homes:
        why.append("a whole home directory")
    elif any(contains(home, path) for home in homes):
        why.append("in your home directory")
    return "; ".join(why)


def _network(approval: Approval) -> Iterator[AskedItem]:
    if approval.network == "host":
        why = "this machine's own network: every host, and all that listens on localhost; nothing is recorded"
        yield AskedItem("network", "host", why)
    elif approval.network == "open":
        yield AskedItem("network", "open", "every host by name, on every port")
    for host in approval.hosts:
        yield AskedItem("host", host, _of_host(host))


def _of_host(host: str) -> str:
    why = []
    if host.startswith("*"):
        why.append("a wildcard")
    if host.endswith(":*"):
        why.append("every port")
    if is_loopback(host):
        why.append("any server on that port of this machine")
    if fault := private_fault(host):
        why.append(f"it {fault}")
    return "; ".join(why)


def _variables(approval: Approval) -> Iterator[AskedItem]:
    for name in dict.fromkeys((*approval.steering, *approval.env)):
        why = []
        if steers(name):
            why.append("it decides which code runs")
        if looks_secret(name):
            why.append("it looks like a secret")
        yield AskedItem("variable", name, "; ".join(why))


def item_lines(items: Iterable[AskedItem], notes: dict[AskedItem, str] | None = None) -> list[str]:
    """One line each, aligned. What is unusual has a ! in front."""
    rows = list(items)
    kinds = max((len(item.kind) for item in rows), default=0)
    words = min(max((len(item.what) for item in rows), default=0), 48)
    lines = []
    for item in rows:
        why = "; ".join(text for text in (item.unusual, (notes or {}).get(item, "")) if text)
        mark = "!" if item.unusual else " "
        lines.append(f"  {mark} {item.kind.ljust(kinds)}  {item.what.ljust(words)}  {why}".rstrip())
    return lines
