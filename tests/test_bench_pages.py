"""What scripts/bench says about its samples: figures, tables, pages, JSON, and what it was asked for."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts import bench
from scripts.benches import growth, images, launch, oci, pages, peers, plots, workloads
from scripts.benches.caller import Caller, Unable, reason
from scripts.benches.machine import Load, Machine, Watch
from scripts.benches.rows import Against, Row, Table, left_out
from tests.conftest import ROOT

RAW, PYTHON, OURS = "raw bwrap", "python", "runner"
OVER_RAW = Against("raw bwrap", (RAW,))
OVER_SUM = Against("raw bwrap + python", (RAW, PYTHON))
ROWS = (
    Row(RAW, "ms", [4.0, 5.0, 9.0]),
    Row(PYTHON, "ms", [6.0, 10.0, 12.0]),
    Row(OURS, "ms", [20.0, 30.0, 60.0], (OVER_RAW, OVER_SUM), "a launch"),
)
TABLE = Table("launch", "launch", "root", "3 each", ROWS, ("firejail is not measured: it is not here",))
LOAD = Load(600.0, 2, 0.1, 1.9, 2.2, 0.5, 0.0)
MACHINE = Machine(
    "CPU | fast", "x86_64", 2, "4 GiB", "Debian", "Linux 6", "v2", "3.11.2", "0.8.0", (("crun", "1"),)
)
RUN = pages.Run("scripts/bench", "2026-01-02", MACHINE, LOAD, (TABLE,))
DOCUMENT = pages.as_document(RUN)
MORE = TABLE._replace(rows=(*ROWS, Row("x", "kB", [8.0], (), "memory")))


# --- figures ------------------------------------------------------------------------------------------------


def test_of_times_the_smallest_is_the_best_and_of_rates_the_largest() -> None:
    samples = [float(number) for number in range(1, 101)]
    times, rates = Row("times", "ms", samples), Row("rates", "MiB per second", samples)
    assert (times.median, times.best, times.worse_than(90), times.worse_than(99)) == (50.0, 1.0, 90.0, 99.0)
    assert (rates.median, rates.best, rates.worse_than(90), rates.worse_than(99)) == (50.0, 100.0, 11.0, 2.0)
    assert Row("few", "ms", [3.0, 1.0]).worse_than(99) == 3.0


def test_a_row_is_compared_with_a_row_and_with_a_sum() -> None:
    assert TABLE.ratio(ROWS[2], OVER_RAW) == (6.0, 5.0)
    assert TABLE.ratio(ROWS[2], OVER_SUM) == (2.0, 2.0)


def test_a_row_without_its_baseline_has_no_ratio() -> None:
    assert TABLE._replace(rows=ROWS[1:]).ratio(ROWS[2], OVER_RAW) is None
    nothing = Row(RAW, "%", [0.0])
    assert TABLE._replace(rows=(nothing, *ROWS[1:])).ratio(ROWS[2], OVER_RAW) is None


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0.0, "0"),
        (0.333333, "0.333"),
        (5.0, "5"),
        (9.876, "9.88"),
        (123.4, "123"),
        (999.9, "1000"),
        (12345.6, "12346"),
    ],
)
def test_three_digits_are_shown(number: float, shown: str) -> None:
    assert pages.figure(number) == shown


# --- pages --------------------------------------------------------------------------------------------------


def test_a_table_for_a_terminal() -> None:
    assert pages.as_text(TABLE).splitlines() == [
        "launch, as root: 3 each",
        "             unit  median  best  p90  p99  over raw bwrap  over raw bwrap + python",
        "  raw bwrap  ms         5     4    9    9",
        "  python     ms        10     6   12   12",
        "  runner     ms        30    20   60   60     6.00 / 5.00              2.00 / 2.00",
        "  note: firejail is not measured: it is not here",
    ]


def test_the_page_says_on_what_when_and_under_which_load_it_was_measured() -> None:
    page = pages.as_page([DOCUMENT])
    assert "**x86_64**, measured on 2026-01-02: processor CPU | fast, processors 2" in page
    assert "made by\n`scripts/bench`.\n" in page and "crun 1." in page
    assert LOAD.sentence() in page


def test_each_figure_in_short_has_its_machine() -> None:
    other = pages.as_document(RUN._replace(machine=MACHINE._replace(architecture="aarch64"), tables=(MORE,)))
    page = pages.as_page([DOCUMENT, other])
    assert page.partition("## In short\n\n")[2].splitlines()[:4] == [
        "|  | x86_64, as root | aarch64, as root |",
        "|---|---|---|",
        "| a launch | 30 ms, 6.00 × raw bwrap | 30 ms, 6.00 × raw bwrap |",
        "| memory | not measured | 8 kB |",
    ]
    assert page.index("\n## On x86_64\n") < page.index("\n## On aarch64\n")


def test_callers_stand_beside_each_other_and_baselines_only_in_ratios() -> None:
    other = MORE._replace(caller="ordinary user", rows=(*ROWS[:2], ROWS[2]._replace(name="run | her")))
    page = pages.as_page([pages.as_document(RUN._replace(tables=(TABLE, other)))])
    ours = "30 ms, 6.00 × raw bwrap, 2.00 × raw bwrap + python | 60"
    launches = page.partition("### Launches on x86_64\n\n")[2].partition("\n### ")[0]
    assert launches.splitlines()[:2] == [
        "|  | as root | p99 | as ordinary user | p99 |",
        "|---|---|---:|---|---:|",
    ]
    assert f"| runner | {ours} | not measured |  |" in launches
    assert f"| run \\| her | not measured |  | {ours} |" in launches
    assert "| raw bwrap |" not in launches


def _raced(race: pages.Race, ours: float, **others: float) -> pages.Document:
    rows = [Row(race.ours, "ms", [ours]), *(Row(name, "ms", [each]) for name, each in others.items())]
    rows += [Row(name, "ms", [1.0]) for name in race.no_others]
    return pages.as_document(RUN._replace(tables=(TABLE._replace(title=race.title, rows=rows),)))


@pytest.mark.parametrize("race", pages.RACES, ids=lambda race: race.what)
def test_where_another_sandbox_is_ahead_the_page_says_so(race: pages.Race) -> None:
    page = pages.as_page([_raced(race, 100.0, jail=96.0, cell=50.0, box=98.0, pen=200.0)])
    section = page.partition("## Where others are ahead\n\n")[2].partition("\n## ")[0]
    line = f"- x86_64, as root, {race.what}: cell 50, jail 96; the runner 100 ms."
    assert [each for each in section.splitlines() if each.startswith("- ")] == [line]


def test_where_no_other_is_ahead_the_page_says_so_too() -> None:
    assert "\n- Nowhere.\n" in pages.as_page([_raced(pages.RACES[0], 100.0, jail=100.0)])


def test_the_page_compares_what_the_benchmark_measures() -> None:
    """Its words for rows and tables are those of the parts."""
    kinds = {race.title.removeprefix(workloads.TITLE) for race in pages.RACES if race.no_others == ("bare",)}
    assert kinds == set(workloads.KINDS)
    assert {race.ours for race in pages.RACES} == {peers.OURS, launch.WRITES, images.IMAGE}
    assert workloads.BARE == "bare" and launch.USUAL == peers.OURS


def test_work_is_shown_as_ratio_to_the_same_work_without_a_sandbox() -> None:
    over = (Against("bare", ("bare",)),)
    rows = [Row("bare", "ms", [2.0]), Row("ours", "ms", [2.1], over), Row("theirs", "ms", [60.0], over)]
    title, notes = f"{workloads.TITLE}stat", ("jail is not measured: no",)
    table = Table("workloads", title, "root", "2 times each, by turns: 5 calls", rows, notes)
    user = table._replace(caller="ordinary user", rows=rows[:2], notes=())
    page = pages.as_page([pages.as_document(RUN._replace(tables=(table, user)))])
    work = page.partition("## Work in a sandbox\n\n")[2].partition("\n## ")[0]
    assert "| ours | 1.05 | 1.05 |" in work and "| theirs | 30 | – |" in work
    assert "stat 2 ms (5 calls)" in work and "- as root: jail is not measured: no" in work
    assert "On x86_64: not measured." in pages.as_page([DOCUMENT])


def test_what_was_not_measured_is_said() -> None:
    tables = (
        TABLE._replace(title="peers", notes=("firejail is not measured: it is not here",)),
        left_out("growth", "root", "no memory"),
    )
    document = pages.as_document(RUN._replace(tables=tables))
    page = pages.as_page([document])
    assert "\n- firejail is not measured: it is not here\n" in page
    assert "\n**Not measured.**\n\n- growth, as root: no memory\n" in page
    few = "only 198 of 500 could be opened: no more keys"
    document = pages.as_document(RUN._replace(tables=(TABLE, GROWN[0]._replace(notes=(few,)))))
    page = pages.as_page([document])
    assert f"\n- {few}\n" in page and "**Not measured.**" not in page
    document = pages.as_document(RUN._replace(tables=tables))
    assert plots.draw([document])[plots.SESSIONS].count("not measured") == len(plots.PANELS)


# --- plots --------------------------------------------------------------------------------------------------


def _grown(panel: plots.Panel) -> Table:
    names = [f"{count} open{end}" for count in (1, 10, 500) for end in (panel.ours, panel.other)]
    rows = [Row(name, "ms", [2.0 * int(name.split()[0])]) for name in names]
    return Table("growth", panel.table, "root", "2 each", rows)


GROWN = tuple(map(_grown, plots.PANELS))


def _drawn(picture: str) -> ElementTree.Element:
    return ElementTree.fromstring(picture.replace(' xmlns="http://www.w3.org/2000/svg"', ""))


def test_each_sandbox_has_a_dot_for_each_caller() -> None:
    as_user = TABLE._replace(title="peers", caller="ordinary user", rows=ROWS[:1])
    document = pages.as_document(RUN._replace(tables=(TABLE._replace(title="peers"), as_user)))
    picture = _drawn(plots.launch([document]))
    assert len(picture.findall("circle")) == 4
    [ours] = [dot for dot in picture.findall("circle") if dot.get("class") == "ours"]
    left = {dot.get("cx") for dot in picture.findall("circle") if dot is not ours}
    assert float(ours.get("cx", "")) > max(float(x or "") for x in left)  # it takes the longest
    assert [text.text for text in picture.findall("text")][-1] == "● as root, ○ as ordinary user"


def test_cost_is_drawn_against_open_sessions() -> None:
    picture = _drawn(plots.sessions([pages.as_document(RUN._replace(tables=GROWN))]))
    lines = [line.get("points", "").split() for line in picture.findall("polyline")]
    assert [len(points) for points in lines] == [3] * 6
    heights = [float(point.split(",")[1]) for point in lines[0]]
    assert heights == sorted(heights, reverse=True)  # y grows downwards
    [_, _, width, height] = map(float, picture.get("viewBox", "").split())
    for line in lines:
        for point in line:
            x, y = map(float, point.split(","))
            assert 0 < x < width and 0 < y < height


@pytest.mark.parametrize("name", [plots.LAUNCH, plots.SESSIONS])
def test_pictures_can_be_read_on_light_and_on_dark_pages(name: str) -> None:
    picture = plots.draw([pages.as_document(RUN._replace(tables=GROWN))])[name]
    style = picture.partition("<style>")[2].partition("</style>")[0]
    light, _, dark = style.partition("@media (prefers-color-scheme: dark)")
    colours = [re.findall(r"(color|--\w+): #", part) for part in (light, dark)]
    assert colours[0] == colours[1] != []
    assert "#" not in picture.replace(style, "")  # every colour is one of these


# --- one source ---------------------------------------------------------------------------------------------


def test_everything_is_written_from_one_run(tmp_path: Path) -> None:
    bench.write(DOCUMENT, tmp_path)
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {"performance/x86_64.json", "performance.md", plots.LAUNCH, plots.SESSIONS}
    stored = json.loads((tmp_path / "performance/x86_64.json").read_text())
    assert stored == json.loads(json.dumps(DOCUMENT))
    assert (tmp_path / "performance.md").read_text() == pages.as_page([DOCUMENT])


def test_a_run_replaces_that_of_its_own_architecture_only(tmp_path: Path) -> None:
    arm = MACHINE._replace(architecture="aarch64")
    other = pages.as_document(RUN._replace(machine=arm, date="2026-01-01"))
    newer = pages.as_document(RUN._replace(date="2026-01-03"))
    for document in (DOCUMENT, other, newer):
        bench.write(document, tmp_path)
    assert (tmp_path / "performance.md").read_text() == pages.as_page([newer, other])


@pytest.mark.parametrize("fault", [Unable("it ended with 1:\nError: no"), IndexError("list index")])
def test_a_part_that_fails_loses_no_other(
    fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> list[Table]:
        raise fault

    @contextmanager
    def nobody() -> Iterator[list[Caller]]:
        yield [Caller("root", 0, "", "")]

    parts = {"launch": lambda *_: [TABLE], "kill": fail, "growth": lambda *_: GROWN}
    monkeypatch.setattr(bench, "PARTS", parts)
    monkeypatch.setattr(bench, "callers", nobody)
    monkeypatch.setattr(bench, "write", partial(bench.write, folder=tmp_path))
    monkeypatch.setattr(os, "closerange", lambda *_: None)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        assert bench.main(["--write"]) == 1
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), handlers, strict=True):
            signal.signal(number, handler)
    assert "not measured: kill, as root\n" in capsys.readouterr().err
    document = json.loads((tmp_path / "performance/x86_64.json").read_text())
    assert [table["part"] for table in document["tables"]] == ["launch", "kill", *["growth"] * len(GROWN)]
    page = (tmp_path / "performance.md").read_text()
    assert re.search("kill, as root: (Error: no|IndexError: list index)\n", page)


def test_a_written_run_is_shown_without_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench.write(DOCUMENT, tmp_path)
    assert bench.main(["--from", str(tmp_path / "performance/x86_64.json")]) == 0
    assert capsys.readouterr().out == pages.as_page([DOCUMENT])


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 1}'])
def test_another_file_is_no_run(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "it.json").write_text(text)
    assert bench.main(["--from", str(tmp_path / "it.json")]) == 1
    assert "it.json: " in capsys.readouterr().err


def test_the_page_and_its_plots_are_those_of_the_runs_beside_them() -> None:
    documents = bench.written_runs(ROOT / "docs/performance")
    page = (ROOT / "docs/performance.md").read_text()
    assert page == pages.as_page(documents) and len(page.splitlines()) <= 330
    for name, picture in plots.draw(documents).items():
        assert (ROOT / "docs" / name).read_text() == picture and "not measured" not in picture


def test_the_document_has_every_sample() -> None:
    document = json.loads(json.dumps(DOCUMENT))
    assert (document["format"], document["date"], document["machine"]["crun"]) == (2, "2026-01-02", "1")
    assert document["load"]["before"] == 0.1
    [table] = document["tables"]
    assert (table["part"], table["as"], table["notes"]) == ("launch", "root", list(TABLE.notes))
    assert table["rows"][2] == {
        "name": OURS,
        "headline": "a launch",
        "unit": "ms",
        "median": 30.0,
        "best": 20.0,
        "p90": 60.0,
        "p99": 60.0,
        "against": [
            {"label": "raw bwrap", "rows": [RAW], "ratio": {"median": 6.0, "best": 5.0}},
            {"label": "raw bwrap + python", "rows": [RAW, PYTHON], "ratio": {"median": 2.0, "best": 2.0}},
        ],
        "samples": [20.0, 30.0, 60.0],
    }


# --- the machine --------------------------------------------------------------------------------------------


def test_the_load_is_that_between_two_looks() -> None:
    # user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice
    looks = iter(("cpu  100 0 100 1000 50 0 0 10 0 0\ncpu0 x", "cpu  130 0 120 1030 60 0 0 20 99 99\ncpu0 x"))
    load = Watch(lambda: next(looks)).load()
    assert (load.busy, load.stolen) == (0.5, 0.1)


def test_a_busy_machine_is_called_so() -> None:
    assert "was quiet" in LOAD.sentence()
    for busy in (LOAD._replace(before=1.5), LOAD._replace(stolen=0.02)):
        assert "was not quiet" in busy.sentence()


def test_sessions_that_do_not_fit_into_memory_are_left_out_and_named() -> None:
    assert growth.affordable((1, 10, 100), 1 << 40) == ((1, 10, 100), "")
    fitting, note = growth.affordable(
        (1, 10, 100, 500), int(20 * growth.SESSION_BYTES / growth.MOST_OF_MEMORY)
    )
    assert fitting == (1, 10)
    assert note.startswith("100 and 500 sessions are left out")
    assert growth.affordable((1, 10), 0)[0] == (1,)


def test_the_reason_of_a_failure_is_its_last_line() -> None:
    assert reason("a b c ended with 1:\nTraceback\n  | Error: no\n  +------\n") == "Error: no"
    assert reason("no such thing") == "no such thing"
    assert reason("") == ""


# --- peers --------------------------------------------------------------------------------------------------


def test_a_peer_that_is_missing_is_named_and_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*argv: str) -> str:
        raise AssertionError(argv)

    monkeypatch.setattr(peers, "_run", refuse)
    absent = peers.PEERS[1]._replace(
        name="absent", programs=("no-such-program",), packages=("no-such-package",)
    )
    found = peers.find(False, (peers.PEERS[0], absent))
    assert [peer.name for peer in found.peers] == [peers.NEXO]
    assert found.missing == ("absent is not measured: there is no no-such-program here; --peers installs it",)


def test_a_peer_that_cannot_be_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_run", lambda *argv: f"{argv[0]} ended with 100: no network")
    absent = peers.PEERS[1]._replace(
        name="absent", programs=("no-such-program",), packages=("no-such-package",)
    )
    [missing] = peers.find(True, (absent,)).missing
    why = "apt-get ended with 100: no network" if os.geteuid() == 0 else "only root can install it"
    assert missing.startswith(f"absent is not measured: {why}")


def test_a_package_that_is_missing_is_named_by_its_registry(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[tuple[str, ...]] = []

    def refuse(*argv: str) -> str:
        told.append(argv)
        return "no network"

    monkeypatch.setattr(peers, "_run", refuse)
    for name in ("FOLDER", "NODE_FOLDER", "PYTHON_FOLDER"):
        monkeypatch.setattr(peers, name, tmp_path / ".venv" / name)
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    (tmp_path / ".venv").mkdir()
    library = peers.PEERS[1]._replace(name="absent", programs=(), packages=(), pypi="no-such-library")
    script = library._replace(pypi="", npm="no-such-script")
    for peer, registry in ((library, "pip"), (script, "npm")):
        [missing] = peers.find(False, (peer,)).missing
        package = peer.pypi or peer.npm
        assert f"{package} is not in .venv/FOLDER; --peers installs it" in missing
        assert peers.find(True, (peer,)).missing == ("absent is not measured: no network",)
        assert registry in told[-1] and told[-1][-1] == package


def test_a_bundle_confines_as_the_command_line_does(tmp_path: Path) -> None:
    (tmp_path / "passwd").write_text("root")
    argv = "bwrap --unshare-user --unshare-pid --unshare-net --uid 65534 --gid 65534 --hostname it --clearenv"
    argv += (
        " --ro-bind /usr /usr --symlink usr/bin /bin --proc /proc --ro-bind /dev/null /proc/keys --dev /dev"
    )
    argv += (
        f" --perms 1777 --size 4096 --tmpfs /tmp --bind {tmp_path} /state --perms 0444 --file 11 /etc/passwd"
    )
    argv += " --remount-ro / --chdir /tmp --setenv A b --seccomp 10 -- /usr/bin/true --size 1"
    oci.make_bundle(tmp_path / "bundle", argv.split(), {10: "/dev/null", 11: str(tmp_path / "passwd")})
    document = json.loads((tmp_path / "bundle/config.json").read_text())
    process, linux = document["process"], document["linux"]
    assert (process["args"], process["env"], process["cwd"]) == (
        ["/usr/bin/true", "--size", "1"],
        ["A=b"],
        "/tmp",
    )
    assert process["user"] == {"uid": 65534, "gid": 65534} and process["noNewPrivileges"]
    assert process["capabilities"] == {}
    assert [each["type"] for each in linux["namespaces"]] == ["mount", "user", "pid", "network"]
    assert linux["maskedPaths"] == ["/proc/keys"]
    mounts = {each["destination"]: (each["source"], each["options"]) for each in document["mounts"]}
    assert list(mounts) == ["/usr", "/proc", "/dev", "/tmp", "/state"]
    assert "ro" in mounts["/usr"][1] and "ro" not in mounts["/state"][1]
    assert {"mode=1777", "size=4096"} <= set(mounts["/tmp"][1])
    root = tmp_path / "bundle/rootfs"
    assert (root / "etc/passwd").read_text() == "root" and os.readlink(root / "bin") == "usr/bin"
    assert document["root"]["readonly"]


def test_the_filter_of_a_bundle_is_that_of_the_profile() -> None:
    entries = oci.filter_document("default")["syscalls"]
    plain = {name: entry["action"] for entry in entries for name in entry["names"] if "args" not in entry}
    assert plain["read"] == "SCMP_ACT_ALLOW" and plain["clone3"] == "SCMP_ACT_ERRNO"
    assert not {"mount", "ptrace", "keyctl", "unshare"} & set(plain)
    [clone] = [entry for entry in entries if entry["names"] == ["clone"]]
    assert clone["args"] == [{"index": 0, "value": 0x7E020000, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}]


# --- the command line ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "writes"),
    [
        ("", True),
        ("--peers", True),
        ("--json", True),
        ("--no-write", False),
        ("--quick", False),
        ("--quick --write", True),
        ("--launches 5", False),
        ("--launches 5 --write", True),
        ("launch", False),
        ("--from x", False),
        ("--from x --write", True),
    ],
)
def test_only_a_whole_run_writes_pages_unless_told(words: str, writes: bool) -> None:
    assert bench.parse(words.split()).write is writes


def test_counts_are_those_of_the_kind_of_run_unless_given() -> None:
    assert bench.parse(["--quick"]).counts == bench.QUICK
    assert bench.parse(["kill", "--kills", "7"]).counts == bench.FULL._replace(kills=7)
    assert bench.parse(["kill", "call"]).parts == ("kill", "call")
    assert bench.parse([]).parts == tuple(bench.PARTS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("lunch", "there is no part lunch; there are launch, parked,"),
        ("launch --write", "leave out the names of parts"),
        ("--kills 1", "at least 2 samples are needed"),
        ("--kills many", "--kills"),
        ("--loud", "--loud"),
    ],
)
def test_wrong_words_are_named(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        bench.parse(words.split())
    assert raised.value.code == 2
    assert message in capsys.readouterr().err
