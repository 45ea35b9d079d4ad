"""Records of approvals: written whole, and refused if anybody else could have written them."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.approvals.files import list_records, read_record, remove_record, write_record
from runner.approvals.record import ApprovalKey, ApprovalRecord, ApprovalsUnusable, approvals_folder
from runner.approvals.store import find_approval
from sandbox.spec import Approval

KEY = ApprovalKey("toy", "one", "/srv/one/plugin.toml", "a" * 32)
ALL = Approval(
    read=("/srv/data",),
    write=("/srv/out",),
    network="allowlist",
    hosts=("example.com:443", "*.example.org:*"),
    env=("TOKEN",),
    steering=("LD_PRELOAD",),
    seccomp="compat",
    project="read",
    hide=("GH@api.example.com:443", "github"),
)
RECORD = ApprovalRecord(KEY, ALL, Approval(read=("/srv/more",)), "0" * 32, 1_700_000_000.5)


def test_an_approval_from_before_there_was_hiding_is_read(environ: dict[str, str], path: Path) -> None:
    document = json.loads(path.read_text())
    for part in ("asked", "added"):
        del document[part]["hide"], document[part]["staged"]
    path.write_text(json.dumps(document))
    found = find_approval(KEY, environ)
    assert found is not None and found.asked == ALL._replace(hide=())


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(tmp_path)}


@pytest.fixture
def path(environ: dict[str, str]) -> Path:
    return Path(write_record(RECORD, environ))


def test_a_written_approval_is_read(environ: dict[str, str], path: Path) -> None:
    assert find_approval(KEY, environ) == RECORD
    assert path == Path(approvals_folder(environ) or "") / f"{KEY.name}.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert os.listdir(path.parent) == [path.name]


def test_a_name_that_is_no_utf8_comes_back(environ: dict[str, str]) -> None:
    odd = KEY._replace(file="/srv/\udcff/plugin.toml")
    write_record(RECORD._replace(key=odd), environ)
    found = find_approval(odd, environ)
    assert found is not None and found.key == odd


def test_the_umask_opens_nothing(environ: dict[str, str]) -> None:
    before = os.umask(0)
    try:
        path = Path(write_record(RECORD, environ))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("field", ApprovalKey._fields)
def test_a_key_that_differs_in_one_thing_finds_nothing(
    environ: dict[str, str], path: Path, field: str
) -> None:
    other: Any = {field: ("/b",) if field == "chosen" else "b" * 32}
    assert find_approval(KEY._replace(**other), environ) is None


def test_a_record_under_another_plugins_name_is_refused(environ: dict[str, str], path: Path) -> None:
    other = KEY._replace(id="two")
    copy = path.with_name(f"{other.name}.json")
    copy.write_bytes(path.read_bytes())
    copy.chmod(0o600)
    with pytest.raises(ApprovalsUnusable, match="another plugin"):
        find_approval(other, environ)
    [sound] = [each for each in list_records(environ) if each.record is not None]
    [faulty] = [each for each in list_records(environ) if each.record is None]
    assert (sound.name, faulty.name) == (KEY.name, other.name)
    assert "another plugin" in faulty.fault and "rm " in faulty.hint


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: data.update(version=3), "version"),
        (lambda data: data.update(version=True), "version"),
        (lambda data: data.update(more=1), "unknown key 'more'"),
        (lambda data: data.pop("added"), "it has no added"),
        (lambda data: data["plugin"].update(more=""), "unknown key"),
        (lambda data: data["plugin"].update(id=1), "plugin.id"),
        (lambda data: data["plugin"].update(chosen="/a"), "plugin.chosen is not a list"),
        (lambda data: data["plugin"].update(chosen=[1]), "plugin.chosen is not a text"),
        (lambda data: data["plugin"].update(file="plugin.toml"), "plugin.file is not an absolute path"),
        (lambda data: data["asked"].update(read=["data"]), "not absolute"),
        (lambda data: data["asked"].update(read=["/a/../b"]), "contains '..'"),
        (lambda data: data["asked"].update(read=["/a/"]), "shortest form"),
        (lambda data: data["asked"].update(read=["/a\0b"]), "not a text"),
        (lambda data: data["asked"].update(read=["/\ud800"]), "damaged"),
        (lambda data: data["asked"].update(read="/a"), "not a list"),
        (lambda data: data["asked"].update(read=["*"]), "not absolute"),
        (lambda data: data["asked"].update(write=[["/a"]]), "not a text"),
        (lambda data: data["asked"].update(hosts=["example.com"]), "no port"),
        (lambda data: data["asked"].update(hosts=["10.0.0.0/8:443"]), "slash"),
        (lambda data: data["asked"].update(network="all"), "not one of"),
        (lambda data: data["asked"].update(network=None), "not one of"),
        (lambda data: data["asked"].update(env=["A-B"]), "name of a variable"),
        (lambda data: data["asked"].update(env=["*"]), "name of a variable"),
        (lambda data: data["asked"].update(hide=["GH@*:443"]), "name the hosts"),
        (lambda data: data["asked"].update(hide=["GH@a.b"]), "no port"),
        (lambda data: data["asked"].update(hide="GH"), "not a list"),
        (lambda data: data["asked"].update(steering=[""]), "name of a variable"),
        (lambda data: data["asked"].update(seccomp="off"), "not one of"),
        (lambda data: data["asked"].update(project="write"), "not one of"),
        (lambda data: data["asked"].update(everything=True), "unknown key"),
        (lambda data: data["added"].pop("env"), "added has no env"),
        (lambda data: data.update(digest="x" * 32), "not 32 hexadecimal digits"),
        (lambda data: data.update(when="today"), "seconds"),
        (lambda data: data.update(when=-1), "seconds"),
        (lambda data: data.update(when=True), "seconds"),
        (lambda data: data["asked"].update(read=["/a"] * 4097), "not a list"),
    ],
)
def test_a_value_that_no_runner_wrote_is_refused(
    environ: dict[str, str], path: Path, change: Change, why: str
) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ApprovalsUnusable, match="is damaged: ") as refused:
        find_approval(KEY, environ)
    assert why in str(refused.value)
    assert f"rm {path}" in refused.value.hint


def test_the_longest_list_is_read(environ: dict[str, str], path: Path) -> None:
    data = json.loads(path.read_text())
    data["asked"]["read"] = [f"/{number}" for number in range(4096)]
    path.write_text(json.dumps(data))
    found = find_approval(KEY, environ)
    assert found is not None and len(found.asked.read) == 4096


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '"text"',
        '{"version": 1, "version": 1}',
        "[" * 100_000,
        '{"when": NaN}',
        "\xff",
    ],
)
def test_what_is_no_record_is_refused(environ: dict[str, str], path: Path, text: str) -> None:
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ApprovalsUnusable, match="damaged"):
        find_approval(KEY, environ)


def test_more_than_a_mebibyte_is_not_read(environ: dict[str, str], path: Path) -> None:
    text = path.read_text()
    path.write_text(text + " " * ((1 << 20) - len(text)))
    assert find_approval(KEY, environ) == RECORD
    path.write_text(text + " " * ((1 << 20) - len(text) + 1))
    with pytest.raises(ApprovalsUnusable, match="more than 1 MiB"):
        find_approval(KEY, environ)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_is_refused(environ: dict[str, str], path: Path, mode: int) -> None:
    path.chmod(mode)
    with pytest.raises(ApprovalsUnusable, match="can be written by its group or by everybody") as refused:
        find_approval(KEY, environ)
    assert refused.value.hint == f"chmod go-w {path}"


@pytest.mark.parametrize("above", [0, 1, 2])
def test_a_folder_that_others_can_write_is_refused(environ: dict[str, str], path: Path, above: int) -> None:
    path.parents[above].chmod(0o770)
    with pytest.raises(ApprovalsUnusable, match="can be written by its group"):
        find_approval(KEY, environ)
    with pytest.raises(ApprovalsUnusable, match="can be written by its group"):
        write_record(RECORD, environ)
    with pytest.raises(ApprovalsUnusable, match="can be written by its group"):
        remove_record(KEY.name, environ)


@pytest.mark.needs("root")
@pytest.mark.parametrize("above", [-1, 0, 1])
def test_a_file_or_folder_of_another_user_is_refused(environ: dict[str, str], path: Path, above: int) -> None:
    os.chown(path if above < 0 else path.parents[above], 54321, 54321)
    with pytest.raises(ApprovalsUnusable, match="belongs to uid 54321") as refused:
        find_approval(KEY, environ)
    assert "HOME" in refused.value.hint


def test_a_link_is_refused(environ: dict[str, str], path: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "record"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(ApprovalsUnusable, match="is a link"):
        find_approval(KEY, environ)


def test_a_dangling_link_is_no_missing_record(environ: dict[str, str], path: Path) -> None:
    path.unlink()
    path.symlink_to("/nonexistent")
    with pytest.raises(ApprovalsUnusable):
        find_approval(KEY, environ)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_only_a_regular_file_is_read(
    environ: dict[str, str], path: Path, make: Callable[[Path], None]
) -> None:
    path.unlink()
    make(path)
    path.chmod(0o600)
    with pytest.raises(ApprovalsUnusable, match="regular file"):
        read_record(str(path), KEY)


def test_a_link_in_the_place_of_a_record_is_replaced_and_not_followed(
    environ: dict[str, str], path: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.write_text("kept")
    path.unlink()
    path.symlink_to(target)
    write_record(RECORD, environ)
    assert target.read_text() == "kept"
    assert not path.is_symlink()
    assert find_approval(KEY, environ) == RECORD


def test_whoever_reads_while_others_write_sees_a_whole_record(environ: dict[str, str], path: Path) -> None:
    """Each writer writes records that differ in all parts. No reader may see a mixture, or none."""
    paths = [f"/srv/{number}" for number in range(200)]
    versions = [
        RECORD._replace(asked=Approval(read=tuple(f"{each}/{who}" for each in paths)), when=float(who))
        for who in range(4)
    ]
    write_record(versions[0], environ)
    faults: list[object] = []

    def write(version: ApprovalRecord) -> None:
        try:
            for _ in range(20):
                write_record(version, environ)
        except Exception as error:  # noqa: BLE001 -- of a thread: the assertion below shows it
            faults.append(error)

    writers = [threading.Thread(target=write, args=(version,)) for version in versions]
    for writer in writers:
        writer.start()
    seen = []
    while any(writer.is_alive() for writer in writers):
        seen.append(find_approval(KEY, environ))
    for writer in writers:
        writer.join()
    assert faults == []
    assert all(found in versions for found in seen)
    assert os.listdir(path.parent) == [path.name]


def test_what_could_not_be_read_back_is_not_written(environ: dict[str, str]) -> None:
    with pytest.raises(ApprovalsUnusable, match="cannot be kept"):
        write_record(RECORD._replace(asked=Approval(read=("relative",))), environ)
    assert find_approval(KEY, environ) is None


def test_a_home_that_is_no_folder_has_no_place() -> None:
    with pytest.raises(ApprovalsUnusable, match="no place"):
        write_record(RECORD, {"HOME": "relative"})


def test_removed_is_removed(environ: dict[str, str], path: Path) -> None:
    assert remove_record(KEY.name, environ)
    assert not remove_record(KEY.name, environ)
    assert find_approval(KEY, environ) is None
    assert list_records(environ) == ()


def test_an_unusable_record_can_be_removed(environ: dict[str, str], path: Path) -> None:
    path.write_text("{")
    assert remove_record(KEY.name, environ)
    assert list_records(environ) == ()
