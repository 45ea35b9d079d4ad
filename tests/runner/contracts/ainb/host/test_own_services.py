"""Files and network of the embedding host's own: asked for what was granted, and for nothing else."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from runner.contracts.ainb.declared import Declared
from runner.contracts.ainb.host import files, network
from runner.contracts.ainb.payload import decode
from runner.library import DirectoryEntry, Fetched, Granted, HostError, Services
from runner.plugin import Allowance
from runner.protocol.service_guard import ServiceGuard
from tests.runner.contracts.ainb.host.desk import Desk, make_plugin

pytestmark = pytest.mark.trio

READ, LIST, FETCH = "host/fs/read_file", "host/fs/read_dir", "host/network/fetch"
Headers = Sequence[tuple[str, str]]


class Eager:
    """Serves whatever it is asked for, by name: what a host's author writes first."""

    def __init__(self, *answers: Fetched) -> None:
        self.asked: list[Any] = []
        self.granted: list[Granted] = []
        self.answers = list(answers)

    async def read_file(self, path: str) -> bytes:
        self._note(path)
        # In a thread, as such services do: it has the same grant.
        self.granted.append(await trio.to_thread.run_sync(Granted.current))
        try:
            return await trio.Path(path).read_bytes()
        except FileNotFoundError:
            return b"made up"

    async def read_dir(self, path: str) -> Sequence[DirectoryEntry]:
        self._note(path)
        return [DirectoryEntry(name, False, 0) for name in sorted(os.listdir(path))]

    async def fetch(self, url: str, method: str, headers: Headers, body: bytes | None) -> Fetched:
        self._note((url, method, tuple(headers), body))
        return self.answers.pop(0) if self.answers else Fetched(200, [("X", "y")], b"fetched")

    def _note(self, asked: Any) -> None:
        self.asked.append(asked)
        self.granted.append(Granted.current())


def unguarded(own: Eager) -> Desk:
    desk = Desk(declared=Declared(granted=("network",)))
    plugin = make_plugin("notes", Declared())
    desk.guard = ServiceGuard(desk.methods, desk.services._replace(files=own, fetcher=own), ("*",), plugin)
    return desk


# --- files --------------------------------------------------------------------------------------------------


@pytest.fixture
def grant(tmp_path: Path) -> Path:
    folder = tmp_path / "grant"
    (folder / "sub").mkdir(parents=True)
    (folder / "file").write_text("inside")
    (tmp_path / "secret").write_text("secret")
    for link, target in (
        *(("in", "file"), ("in_absolute", f"{folder}/file"), ("up", ".."), ("out", "../secret")),
        *(("out_absolute", f"{tmp_path}/secret"), ("magic", "/proc/self/root"), ("nowhere", "missing")),
        ("nowhere_out", "../missing"),
    ):
        (folder / link).symlink_to(target)
    os.mkfifo(folder / "fifo")
    return folder


def files_desk(own: Eager, *roots: Path, declared: tuple[str, ...] = ("read_paths",), **more: Any) -> Desk:
    paths = tuple(map(str, roots))
    return Desk(
        declared=Declared(granted=declared, fs_roots=paths),
        allowance=Allowance(**{"readable": paths, **more}),
        services=Services(files=own),
    )


async def test_a_file_is_read_by_the_hosts_own_service(grant: Path) -> None:
    own = Eager()
    desk = files_desk(own, grant)
    for name in ("file", "in", "in_absolute", "sub/../file", "./sub//../file", "missing/../file"):
        assert decode((await desk.result(READ, {"path": f"{grant}/{name}"}))["bytes"]) == b"inside"
    assert set(own.asked) == {f"{grant}/file"}  # the judged name, without links
    own.asked.clear()
    listed = await desk.result(LIST, {"path": f"{grant}/sub/.."})
    assert own.asked == [str(grant)] and {"name": "file", "is_dir": False, "size": 0} in listed["entries"]
    plugin, method, folders, hosts = own.granted[-1]
    assert (plugin.id, plugin.contract, plugin.capabilities) == ("notes", "ainb", ("read_paths",))
    assert (method, folders, hosts) == (LIST, (str(grant),), ())
    assert {each.method for each in own.granted} == {READ, LIST}
    with pytest.raises(LookupError, match="is for services"):
        Granted.current()


async def test_a_name_that_does_not_exist_may_mean_something_to_the_service(grant: Path) -> None:
    own = Eager()
    desk = files_desk(own, grant, denied=(f"{grant}/sub",))
    for name, judged in (("missing", "missing"), ("x/y/z", "x/y/z"), ("x/../y", "y")):
        assert decode((await desk.result(READ, {"path": f"{grant}/{name}"}))["bytes"]) == b"made up"
        assert own.asked.pop() == f"{grant}/{judged}"
    # A link to nothing is a link, and what is denied is denied.
    for name, code in (
        ("nowhere", -32602),
        ("nowhere/x", -32602),
        ("nowhere_out", -32001),
        ("sub/x", -32001),
    ):
        assert (await desk.error(READ, {"path": f"{grant}/{name}"}))[0] == code, name
    assert own.asked == []


@pytest.mark.parametrize("method", [READ, LIST])
async def test_what_was_not_granted_does_not_reach_the_service(grant: Path, method: str) -> None:
    outside = grant.parent / "secret"
    refused = (
        *("/etc/shadow", "/", str(outside), f"{grant}/../secret", f"{grant}/sub/../../secret"),
        *(
            f"{grant}/{name}"
            for name in ("out", "out_absolute", "up", "up/secret", "magic", "magic/etc/passwd")
        ),
        *(f"{grant}-evil", "/proc/self/environ"),
    )
    own = Eager()
    desks = {
        "one folder": files_desk(own, grant),
        "no capability": files_desk(own, declared=()),
        "not granted by the policy": files_desk(own, grant, readable=()),
        "writable": files_desk(own, grant, writable=(str(grant / "sub"),)),
        "denied": files_desk(own, grant, denied=(str(grant),)),
        "a policy without the method": Desk(
            declared=Declared(granted=("read_paths",), fs_roots=(str(grant),)),
            allowance=Allowance(readable=(str(grant),)),
            services=Services(files=own),
            allowed=("host/log",),
        ),
    }
    for name, desk in desks.items():
        for path in refused if name == "one folder" else (*refused, f"{grant}/file", f"{grant}/missing"):
            assert (await desk.error(method, {"path": path}))[0] == -32001, (name, path)
    for path in ("", "file", "~/file", "/a\0b", "/" + "a" * 5000, f"{grant}/fifo", f"{grant}/file/x"):
        assert (await desks["one folder"].error(method, {"path": path}))[0] == -32602, path
    assert own.asked == []
    # The control: without the guard the service gives it all.
    for path in (str(outside), f"{grant}/out", f"{grant}/../secret"):
        assert decode((await unguarded(own).result(READ, {"path": path}))["bytes"]) == b"secret"
    own.asked.clear()
    assert (await desks["one folder"].ask(READ, {"path": f"{grant}/file"})).error is None
    assert own.asked == [f"{grant}/file"]


async def test_a_root_that_was_moved_is_not_asked_for(grant: Path, tmp_path: Path) -> None:
    own = Eager()
    desk = files_desk(own, grant)
    os.rename(grant, tmp_path / "aside")
    os.symlink("/etc", grant)
    for name in ("file", "passwd", "missing"):
        assert (await desk.error(READ, {"path": f"{grant}/{name}"}))[0] in (-32001, -32602)
    assert own.asked == [] and (grant / "passwd").exists()


@pytest.mark.needs("root")
async def test_what_the_plugin_could_not_read_in_its_cage_is_not_asked_for(grant: Path) -> None:
    (grant / "mine").write_text("mine")
    (grant / "mine").chmod(0o600)
    own = Eager()
    error = await files_desk(own, grant).error(READ, {"path": f"{grant}/mine"})
    assert error == (-32602, f"read {grant}/mine: Permission denied (os error 13)", None) and not own.asked
    (grant / "mine").chmod(0o604)  # the control
    assert (await files_desk(own, grant).ask(READ, {"path": f"{grant}/mine"})).error is None


async def test_an_answer_that_fits_into_no_frame(grant: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FILE_MOST_BYTES", 5)
    error = await files_desk(Eager(), grant).error(READ, {"path": f"{grant}/file"})
    assert error == (-32602, f"read {grant}/file: it has more than 5 bytes", None)
    monkeypatch.setattr(network, "BODY_MOST_BYTES", 6)
    code, message, data = await fetch_desk(Eager()).error(FETCH, {"url": "https://api.example.com/"})
    assert (code, data) == (-32603, {"kind": "too_large"}) and "more than 6 bytes" in message


# --- network ------------------------------------------------------------------------------------------------


def fetch_desk(
    own: Eager,
    listed: tuple[str, ...] | None = ("api.example.com", "xn--bcher-kva.example", "192.0.2.7", "8.8.8.8"),
    hosts: tuple[str, ...] = ("*:*", "0.0.0.0/0:443"),
    declared: tuple[str, ...] = ("network",),
) -> Desk:
    lists = {} if listed is None else {"network": listed}
    return Desk(
        declared=Declared(granted=declared, lists=lists),
        allowance=Allowance(hosts=hosts),
        services=Services(fetcher=own),
    )


@pytest.mark.parametrize(
    ("url", "judged"),
    [
        ("https://api.example.com", "https://api.example.com/"),
        ("https://api.example.com:443/a?b#c", "https://api.example.com/a?b"),
        ("HTTPS://API.Example.COM./x", "https://api.example.com/x"),
        ("https://bücher.example/", "https://xn--bcher-kva.example/"),
        ("https://8.8.8.8/x", "https://8.8.8.8/x"),
    ],
)
async def test_a_url_is_fetched_by_the_hosts_own_service(url: str, judged: str) -> None:
    own = Eager()
    desk = fetch_desk(own)
    answer = await desk.result(
        FETCH, {"url": url, "method": "post", "headers": [["A", " b "]], "body": "aGk="}
    )
    assert answer == {"status": 200, "headers": [["X", "y"]], "body": "ZmV0Y2hlZA=="}
    assert own.asked == [(judged, "POST", (("A", "b"),), b"hi")]
    assert own.granted[0].method == FETCH and own.granted[0].folders == ()
    assert own.granted[0].hosts[0] == "api.example.com:443"


REFUSED = {
    "another host": "https://other.example.com/",
    "below it": "https://x.api.example.com/",
    "its parent": "https://example.com/",
    "in front of another": "https://api.example.com.evil.com/",
    "another scheme": "http://api.example.com/",
    "a file": "file:///etc/passwd",
    "no scheme": "//api.example.com/",
    "another port": "https://api.example.com:8443/",
    "port 80": "https://api.example.com:80/",
    "a user": "https://api.example.com@evil.com/",
    "a user of it": "https://evil.com@api.example.com/",
    "a backslash": "https://evil.com\\@api.example.com/",
    "a backslash after it": "https://api.example.com\\.evil.com/",
    "a blank": "https://api.example.com /",
    "a line break": "https://api.example.com/\r\nHost: evil.com",
    "a percent sign": "https://api%2eexample.com/",
    "another full stop": "https://api。example.com/",
    "wide letters": "https://ａpi.example.com/",
    "letters read in two ways": "https://straße.example/",
    "another international name": "https://bucher.example/",
    "loopback": "https://127.0.0.1/",
    "loopback in short": "https://127.1/",
    "a number": "https://2130706433/",
    "loopback, IPv6": "https://[::1]/",
    "mapped": "https://[::ffff:127.0.0.1]/",
    "metadata": "https://169.254.169.254/",
    "a listed address for documentation": "https://192.0.2.7/",
    "nothing": "",
}


async def test_a_url_that_was_not_granted_does_not_reach_the_service() -> None:
    own = Eager()
    everything = fetch_desk(own, None, ("*:*",))
    for name, url in REFUSED.items():
        code = (await fetch_desk(own).error(FETCH, {"url": url}))[0]
        assert code in (-32001, -32602), name
        if not name.startswith(("another host", "below", "its parent", "in front", "another inter")):
            assert (await everything.error(FETCH, {"url": url}))[0] in (-32001, -32602), name
    good = {"url": "https://api.example.com/"}
    assert (await fetch_desk(own, declared=()).error(FETCH, good))[0] == -32001
    assert (await fetch_desk(own, hosts=()).error(FETCH, good))[0] == -32005
    assert (await fetch_desk(own, hosts=("api.example.com:80",)).error(FETCH, good))[0] == -32001
    for more in (
        {"method": "CONNECT"},
        {"headers": [["hOST", "evil.com"]]},
        {"headers": [["A", "b\r\nC: d"]]},
    ):
        assert (await fetch_desk(own).error(FETCH, {**good, **more}))[0] == -32602
    assert own.asked == []
    for url in REFUSED.values():  # the control: without the guard the service asks for all of them
        await unguarded(own).result(FETCH, {"url": url})
    assert [each[0] for each in own.asked] == list(REFUSED.values())


def to(location: str, status: int = 302) -> Fetched:
    return Fetched(status, [("LoCation", location)], b"moved")


async def test_each_redirect_is_judged_before_it_is_asked_for() -> None:
    good = {"url": "https://api.example.com/a", "headers": [["Authorization", "key"], ["Accept", "x"]]}
    for name, url in REFUSED.items():
        if url.startswith(("http", "file")):
            own = Eager(to(url))
            code = (await fetch_desk(own).error(FETCH, good))[0]
            assert code in (-32001, -32603) and len(own.asked) == 1, name
    own = Eager(to("/b"), to("https://xn--bcher-kva.example/c", 307))
    assert (await fetch_desk(own).result(FETCH, good))["status"] == 200
    assert [(each[0], [name for name, _ in each[2]]) for each in own.asked] == [
        ("https://api.example.com/a", ["Authorization", "Accept"]),
        ("https://api.example.com/b", ["Authorization", "Accept"]),
        ("https://xn--bcher-kva.example/c", ["Accept"]),  # another host gets no key
    ]
    own = Eager(*[to("/again")] * 10)
    assert (await fetch_desk(own).error(FETCH, good))[2] == {"kind": "protocol"} and len(own.asked) == 6
    own = Eager(Fetched(302, [("Location", "/a"), ("location", "https://evil.com/")], b""))
    assert (await fetch_desk(own).error(FETCH, good))[2] == {"kind": "protocol"} and len(own.asked) == 1


async def test_a_service_may_be_stricter() -> None:
    class Strict(Eager):
        async def fetch(self, url: str, method: str, headers: Headers, body: bytes | None) -> Fetched:
            known = Granted.current()
            if known.plugin.id != "trusted" or "*:443" in known.hosts:
                raise HostError(-32001, f"{known.plugin.id} may not")
            return await super().fetch(url, method, headers, body)

    good = {"url": "https://api.example.com/"}
    assert await fetch_desk(Strict()).error(FETCH, good) == (-32001, "notes may not", None)
