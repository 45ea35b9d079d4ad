"""From what a plugin asked for to a proposal: what counts as missed, and what is never proposed."""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.launch.advice.scene import Mention, Scene
from runner.learn import judge
from runner.learn.judge import STORED, Lesson, propose_needs
from runner.learn.proposal import Proposal, emit, shown
from sandbox.network.egress import NO_NETWORK
from sandbox.paths.mounts import Mounts, contains, parse_mountinfo, read_mounts
from sandbox.policy.policy import ApprovalRule
from sandbox.spec import Access

ANYTHING = ApprovalRule(("*",), ("*",), "host", (), ("*",), ("*",))
SCENE = Scene(
    policy="default",
    approvals=ANYTHING,
    ceilings=ApprovalRule(),
    denied=(),
    homes=(),
    home="",
    directory="/tmp",
    inside="/tmp",
    shown=("/usr",),
    writable=("/tmp",),
    guarded=(),
    own=(),
    network="none",
    given=(),
    withheld=("API_TOKEN", "UNRELATED"),
    denied_names=(),
    mentions=(),
)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder of the host, outside of every folder that a cage has for itself."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


def propose(
    *paths: tuple[str | Path, str],
    scene: Scene = SCENE,
    denied: Path | None = None,
    connections: tuple[tuple[str, int], ...] = (),
    questions: tuple[str, ...] = (),
    output: str = "",
    home: str = "",
    mounts: Mounts | None = None,
    stores: tuple[str, ...] = (),
    **observed: Any,
) -> Proposal:
    """The proposal for paths, each with its use. Each was asked for twice."""
    report = {
        "observed": {
            "paths": [{"path": str(path), "uses": use.split(), "times": 2} for path, use in paths],
            "connections": [{"host": host, "port": port, "times": 3} for host, port in connections],
            "missed": 0,
            "unread": 0,
            "complete": True,
            **observed,
        },
        "network": {
            "questions": [
                {"name": name, "verdict": "refused", "reason": NO_NETWORK, "times": 1} for name in questions
            ],
            "connections": [],
        },
        "limits_hit": ["pids"],
    }

    def denial(path: str, access: Access) -> str:
        hit = denied is not None and contains(str(denied), path)
        return "it is denied" if hit else ""

    lesson = Lesson(scene, report, home, os.defpath, output, stores)
    return propose_needs(lesson, denial, mounts or read_mounts())


def named(proposal: Proposal) -> list[tuple[str, str]]:
    return [(need.kind, need.what) for need in proposal.needs]


def test_what_the_host_has_and_the_cage_has_not(place: Path) -> None:
    (place / "there").touch()
    found = propose((place / "there", "read"), (place / "nowhere", "look"), ("/usr/bin/env", "run"))
    assert named(found) == [("read", f"{place}/there")]
    assert found.needs[0].why == "asked for 2 times"
    assert found.refused == ()
    assert found.notes == (
        "it reached its pids limit: raise the pids limit with --limit pids=…, up to the policy's ceiling",
    )


def test_what_the_cage_shows_is_not_missed(place: Path) -> None:
    (place / "there").touch()
    found = propose((place / "there", "read"), scene=SCENE._replace(shown=(str(place),)))
    assert named(found) == []
    # Folders above what is shown exist in the cage.
    found = propose((place, "look"), scene=SCENE._replace(shown=(f"{place}/there",)))
    assert named(found) == []


def test_writing_is_proposed_for_the_folder(place: Path) -> None:
    found = propose((place / "new.db", "write"))
    assert named(found) == [("write", str(place))]
    found = propose((place / "new.db", "write"), scene=SCENE._replace(shown=(str(place),)))
    assert named(found) == [("write", str(place))]
    found = propose((place / "a" / "b" / "c", "make"))
    assert named(found) == []
    assert any(f"it wanted to make {place}/a: " in note for note in found.notes)
    own = SCENE._replace(shown=(str(place),), own=(f"{place}/program",))
    assert named(propose((place / "new.db", "write"), scene=own)) == []
    # Its own /tmp is not the host's.
    assert named(propose(("/tmp/new", "write"))) == []


def test_writing_covers_reading(place: Path) -> None:
    (place / "a").touch()
    assert named(propose((place / "a", "read"), (place / "new", "write"))) == [("write", str(place))]


def test_a_link_is_judged_by_where_it_leads(place: Path) -> None:
    secret = place / "secret"
    secret.mkdir()
    (secret / "key").touch()
    (place / "plain").symlink_to(secret / "key")
    (place / "real").touch()
    (place / "other").symlink_to(place / "real")
    found = propose((place / "plain", "read"), (place / "other", "read"), denied=secret)
    assert named(found) == []
    refused = {each.what: each.why for each in found.refused}
    assert refused[f"{place}/plain"] == "no option grants it: it is denied"
    assert refused[f"{place}/other"] == (  # as a launch would
        f"it leads to {place}/real by links that a cage does not follow: have the plugin use that path"
    )


def test_a_link_that_the_cage_shows_lacks_its_target(place: Path) -> None:
    (place / "real").touch()
    (place / "shown").mkdir()
    (place / "shown" / "link").symlink_to(place / "real")
    found = propose((place / "shown" / "link", "read"), scene=SCENE._replace(shown=(f"{place}/shown",)))
    assert named(found) == [("read", f"{place}/real")]
    assert found.needs[0].why == f"asked for 2 times, as {place}/shown/link"


def test_many_files_never_become_a_folder_that_is_denied(place: Path) -> None:
    paths = [place / str(number) for number in range(9)]
    for path in paths:
        path.touch()
    assert named(propose(*((path, "read") for path in paths))) == [("read", str(place))]
    found = propose(*((path, "read") for path in paths), scene=SCENE._replace(homes=(str(place),)))
    assert sorted(named(found)) == [("read", str(path)) for path in paths]


def test_a_few_files_never_become_a_folder_that_all_programs_share(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "/var/log" in judge._SHARED_FOLDERS
    logs = place / "log"
    logs.mkdir()
    (place / "link").symlink_to(logs)
    for number in range(5):
        (logs / str(number)).touch()
    files = [(logs / str(number), "read") for number in range(5)]
    assert named(propose(*files)) == [("read", str(logs))]
    monkeypatch.setattr(judge, "_SHARED_FOLDERS", (str(logs),))
    assert named(propose(*files)) == [("read", str(path)) for path, _ in files]
    assert named(propose(*files, (logs, "list"))) == [("read", str(logs))]  # it wants to know all names


@pytest.mark.parametrize("kind", ["autofs", "nfs4", "ext4"])
def test_no_link_makes_us_look_at_a_server(place: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin can make links where it may write. To look through one may mount what a server has."""
    server = place / "net/chosen-server"
    server.mkdir(parents=True)
    (server / "file").touch()
    own = place / "own"
    own.mkdir()
    (own / "link").symlink_to(server)
    (own / "further").symlink_to("link/file")
    (own / "odd").symlink_to("absent/../../net/chosen-server/file")
    for number in range(50):
        (own / f"chain{number}").symlink_to(f"chain{number + 1}" if number < 49 else "further")
    looked: list[str] = []
    for name in ("stat", "lstat", "open", "readlink", "access", "scandir"):
        _note_names(monkeypatch, name, looked)
    table = f"1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:50 / {place}/net rw - {kind} server:/x rw\n"
    asked = (
        (own / "link/file", "read"),
        (own / "further", "look"),
        (own / "link/new", "make"),
        (own / "odd", "read"),
    )
    found = propose(
        *asked,
        (own / "chain0", "read"),
        (own / "link/tool", "run"),
        scene=SCENE._replace(shown=("/usr", str(own)), writable=("/tmp", str(own))),
        mounts=parse_mountinfo(table.encode()),
    )
    reached = [each for each in looked if "chosen-server" in each]
    assert bool(reached) == (kind == "ext4")
    on_server = [each.what for each in found.refused if "mounted on demand" in each.why]
    assert (f"{own}/link/file" in on_server) == (kind != "ext4")


def _note_names(monkeypatch: pytest.MonkeyPatch, name: str, looked: list[str]) -> None:
    call = getattr(os, name)

    def noting(path: Any, *args: Any, **more: Any) -> Any:
        looked.append(str(path))
        return call(path, *args, **more)

    monkeypatch.setattr(os, name, noting)


def test_a_step_towards_an_argument_means_the_argument(place: Path) -> None:
    (place / "data").mkdir()
    scene = SCENE._replace(mentions=(Mention("its argument", f"{place}/data"),))
    assert named(propose(("/", "look"), (place, "look"), scene=scene)) == [("read", f"{place}/data")]


def test_names_that_cannot_be_shown_are_never_proposed(place: Path) -> None:
    odd = place / "a\n  read  etc\x1b[2J"
    odd.touch()
    bytes_name = os.path.join(os.fsencode(place), b"\xff")
    open(bytes_name, "wb").close()
    worded = place / "x (allowed): read"
    worded.touch()
    found = propose((odd, "read"), (os.fsdecode(bytes_name), "read"), (worded, "read"))
    assert named(found) == [("read", str(worded))]
    assert {each.why for each in found.refused} == {
        "its name has characters that cannot be shown as they are"
    }
    assert shown(str(odd)) == json.dumps(f"{place}/a\\n  read  etc\\x1b[2J")
    assert shown(str(worded)) == f'"{worded}"'


def test_the_store_is_not_proposed(place: Path) -> None:
    """It has the packages of all servers. Of its own set a plugin may lack a part."""
    store, own, other = place / "store", place / "store/sets/own", place / "store/sets/other"
    for number in range(4):
        for folder in (own / "tree/share", other / "tree"):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / str(number)).touch()
    (place / "link").symlink_to(other)
    asked = [*other.glob("tree/*"), other / "tree", other, other.parent, store, place, place / "link"]
    scene = SCENE._replace(shown=(f"{own}/tree/bin",), own=(f"{own}/tree/bin/run",))
    found = propose(*((path, "list") for path in asked), scene=scene, stores=(str(store),))
    assert named(found) == []
    assert {each.what for each in found.refused} == {str(store), str(place)}
    assert {each.why for each in found.refused} == {STORED}
    found = propose(*((path, "read") for path in own.glob("tree/share/*")), scene=scene, stores=(str(store),))
    assert named(found) == [("read", f"{own}/tree/share")]
    assert named(propose((store, "list"))) == [("read", str(store))]  # the control


def test_sockets_and_wide_folders_are_not_proposed(place: Path) -> None:
    os.mkfifo(place / "pipe")
    found = propose((place / "pipe", "read"), ("/etc", "list"), ("/run", "look"))
    assert named(found) == []
    assert {each.what for each in found.refused} == {f"{place}/pipe", "/etc", "/run"}


def test_the_policy_decides_what_can_be_proposed(place: Path) -> None:
    (place / "a").touch()
    scene = SCENE._replace(approvals=ApprovalRule(), policy="strict")
    found = propose((place / "a", "read"), scene=scene, questions=("a.example",))
    assert named(found) == []
    assert {each.why for each in found.refused} == {"policy strict lets nobody allow it"}


def test_hosts_have_the_ports_that_were_dialled() -> None:
    found = propose(
        questions=("a.example", "b.example", "under_score.example", "no name\n"),
        connections=(("a.example", 8443), ("a.example", 80), ("192.0.2.1", 99), ("127.0.0.1", 9876)),
    )
    assert named(found)[:3] == [
        ("host", "a.example:8443"),
        ("host", "a.example:80"),
        ("host", "b.example:443"),
    ]
    refused = {each.what: each.times for each in found.refused}
    assert refused["192.0.2.1:99"] == refused["127.0.0.1:9876"] == 3
    assert "no name\n" in refused
    own = (("127.0.0.1", 6379), ("::1", 6379), ("127.0.0.2", 6379))
    found = propose(connections=own, scene=SCENE._replace(loopback=(6379,)))
    assert named(found) == [("host", "localhost:6379")]
    assert [each.what for each in found.refused] == ["127.0.0.2:6379"]
    whys = [each.why for each in propose(connections=own[:1]).refused]
    assert len(whys) == 1 and "loopback = [6379] under [network]" in whys[0], whys


def test_an_address_that_the_gate_gave_was_asked_for_by_a_name() -> None:
    """In a run with hosts that are allowed, the log of the gate says what became of each."""
    given = (("198.18.128.1", 443), ("fd6e:a9c1:52e7:b04d::1", 443), ("not-in-the-log.example", 443))
    found = propose(connections=(*given, ("198.51.100.1", 443)), scene=SCENE._replace(network="allowlist"))
    assert [each.what for each in found.refused] == ["not-in-the-log.example:443", "198.51.100.1:443"]


@pytest.mark.parametrize(
    ("verdict", "connections", "is_told"),
    [
        ("allowed", (), True),
        ("allowed", (("198.18.128.1", 0), ("198.18.128.1", 443), ("127.0.0.1", 53)), True),  # by its resolver
        ("allowed", (("198.18.128.1", 8443),), False),  # a port that is not listed
        ("refused", (), True),  # in this run names had addresses, too
        ("refused", (("a.example", 443),), False),
    ],
)
def test_a_name_that_was_looked_up_and_not_dialled(
    verdict: str, connections: tuple[tuple[str, int], ...], is_told: bool
) -> None:
    """The plugin may refuse the address that the name has in its cage."""
    reason = NO_NETWORK if verdict == "refused" else ""
    question = {"name": "a.example", "verdict": verdict, "reason": reason, "times": 1}
    network = {"rules": ["a.example:443"], "questions": [question], "connections": []}
    if verdict == "refused":
        network["rules"] = []
    seen = [{"host": host, "port": port, "times": 1} for host, port in connections]
    observed = {"paths": [], "connections": seen, "missed": 0, "unread": 0, "complete": True}
    lesson = Lesson(SCENE, {"observed": observed, "network": network})
    notes = propose_needs(lesson, lambda path, access: "", read_mounts()).notes
    told = [note for note in notes if note.startswith("it looked up a.example and did not connect: ")]
    assert bool(told) == is_told


def test_variables_that_its_output_names() -> None:
    found = propose(output="Error: API_TOKEN is not set\nERROR: NOT_HERE is required\n")
    assert named(found) == [("variable", "API_TOKEN")]
    assert not any("--hide" in note for note in found.notes)  # it reaches no host


def test_its_own_home_is_not_yours(place: Path) -> None:
    (place / ".toolrc").touch()
    scene = SCENE._replace(home=str(place), shown=("/usr",))
    found = propose(("/inside/.toolrc", "read"), home="/inside", scene=scene)
    assert named(found) == []
    assert any("/inside/.toolrc" in note and "--env HOME" in note for note in found.notes)


def test_a_proposal_stays_short_enough_to_read(place: Path) -> None:
    paths = []
    for number in range(60):
        path = place / str(number) / "file"
        path.parent.mkdir()
        path.touch()
        paths.append(path)
    found = propose(
        *((path, "read") for path in paths),
        questions=tuple(f"host{number}.example" for number in range(60)),
        scene=SCENE._replace(homes=(str(place),)),
    )
    kinds = [need.kind for need in found.needs]
    assert (kinds.count("read"), kinds.count("host")) == (40, 40)
    assert any(note.startswith("20 more paths were missed") for note in found.notes)
    assert len(found.refused) == 20


def test_what_is_missing_in_the_proposal_is_said() -> None:
    found = propose(missed=7, unread=2, complete=False)
    assert len(found.incomplete) == 3
    assert "7 calls were only counted" in found.incomplete[1]


def test_all_forms_say_the_same(place: Path) -> None:
    odd = place / 'it\'s "a" name'
    odd.touch()
    found = propose((odd, "read"), questions=("a.example",), output="API_TOKEN is not set")
    assert emit(found, "options").startswith("--read ")
    assert emit(found, "options").endswith("--net a.example:443 --env API_TOKEN\n")
    asked = json.loads(emit(found, "x-sandbox"))["x-sandbox"]
    assert asked == {"read": [str(odd)], "network": ["a.example:443"], "env": ["API_TOKEN"]}
    policy = tomllib.loads(emit(found, "policy"))["approvals"]
    assert policy == {
        "read": [str(odd)],
        "network": "allowlist",
        "hosts": ["a.example:443"],
        "env": ["API_TOKEN"],
    }
    assert emit(propose(), "options") == ""
