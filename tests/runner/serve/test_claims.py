"""Who has which name while manifests change. A plugin with another one's id must not become that one, at any
moment."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from runner.lifecycle.supervisor import open_supervisor
from runner.serve.roster import Roster
from tests.conftest import ROOT, Caller
from tests.runner.serve.served import serving
from tests.runner.serve.shelf import put_example
from tests.tables import wait_for

SECRET = "sk-5f1c9d0e7b"
SETTINGS = '[mail]\nfolder = "plugins/mail"\nsecrets = {token = "@key"}\n'


def put(folder: Path, place: str, name: str = "mail") -> Path:
    """A plugin of kaged in this place, which has this name by its manifest."""
    put_example("kaged", name, folder / "made")
    (folder / "plugins").mkdir(exist_ok=True)
    shutil.move(folder / "made" / name, folder / "plugins" / place)
    for path in (folder / "plugins", folder / "made"):
        path.chmod(0o755)
    return folder / "plugins" / place


class Desk:
    """What a reload makes of the folder."""

    def __init__(self, roster: Roster, folder: Path) -> None:
        self.roster, self._folder = roster, folder

    async def read(self) -> dict[str, str]:
        """The place of each name."""
        await self.roster.reload()
        running = {each.name for each in self.roster.supervisor_of("").plugins()}
        found = {each.name: os.path.basename(each.path) for each in self.roster.sources()}
        assert running == found.keys()
        return found

    def faults(self) -> dict[str, str]:
        return {os.path.basename(each.path): each.message for each in self.roster.faults}


@asynccontextmanager
async def desk(folder: Path, settings: str = "", **options: object) -> AsyncIterator[Desk]:
    """One life of a daemon."""
    (folder / "record").mkdir(mode=0o700, exist_ok=True)
    file = None
    if settings:
        file = str(folder / "settings.toml")
        (folder / "settings.toml").write_text(settings)
        (folder / "key").write_text(SECRET)
        for name in ("settings.toml", "key"):
            (folder / name).chmod(0o644)
    given = {"names": str(folder / "record/names.json"), **options}
    async with open_supervisor() as supervisor:
        paths = (str(folder / "plugins"),)
        roster = Roster(supervisor, None, paths, None, file, dict(os.environ), lambda text: None, **given)  # type: ignore[arg-type]
        yield Desk(roster, folder)


@pytest.mark.trio
async def test_who_was_there_first_keeps_the_name(plugin_dir: Path) -> None:
    mail = put(plugin_dir, "mail")
    async with desk(plugin_dir) as one:
        assert await one.read() == {"mail": "mail"} and not one.faults()
        hostile = put(plugin_dir, "aaa")
        assert await one.read() == {"mail": "mail"}
        [(place, told)] = one.faults().items()
        assert place == "aaa" and f"the name mail belongs to {mail}, where it was first" in told
        assert f'folder = "{hostile}" in the table [mail] of the settings' in told
        # The first one is replaced: for a moment it is not there.
        mail.rename(plugin_dir / "aside")
        assert await one.read() == {}
        assert "which is not there now" in one.faults()["aaa"]
        (plugin_dir / "aside").rename(mail)
        assert await one.read() == {"mail": "mail"}
        # Its manifest has a fault: it stays as it was.
        manifest = next(mail.glob("*.yaml"))
        text = manifest.read_text()
        manifest.write_text("{")
        assert await one.read() == {"mail": "mail"} and one.faults().keys() == {"aaa", "mail"}
        manifest.write_text(text)
        # Others could change it: it ends, because its next start would read what they wrote.
        manifest.chmod(0o666)
        assert await one.read() == {} and "it is not used" in one.faults()["mail"]
        manifest.chmod(0o644)
        assert await one.read() == {"mail": "mail"}
        # It takes another name. The one that it had stays its own.
        manifest.write_text(text.replace("mail", "post"))
        assert await one.read() == {"post": "mail"} and one.faults().keys() == {"aaa"}
        manifest.write_text(text)
    async with desk(plugin_dir) as one:  # a new daemon: the record counts
        assert await one.read() == {"mail": "mail"} and one.faults().keys() == {"aaa"}
    mail.rename(plugin_dir / "aside")
    async with desk(plugin_dir) as one:  # ... also while nothing is there
        assert await one.read() == {} and one.faults().keys() == {"aaa"}
    # The control: without a record the other one is a plugin like any, and has the name.
    async with desk(plugin_dir, names=None) as one:
        assert await one.read() == {"mail": "aaa"}
        (plugin_dir / "aside").rename(mail)
        assert await one.read() == {"mail": "aaa"} and one.faults().keys() == {"mail"}  # in its life


@pytest.mark.trio
async def test_of_two_at_once_nobody_gets_the_name_until_the_settings_say_who(plugin_dir: Path) -> None:
    mail, hostile = put(plugin_dir, "mail"), put(plugin_dir, "aaa")
    other = put(plugin_dir, "other", "other")
    async with desk(plugin_dir) as one:
        assert await one.read() == {"other": "other"}
        faults = one.faults()
        assert faults.keys() == {"mail", "aaa"}
        assert str(hostile) in faults["mail"] and str(mail) in faults["aaa"]
    async with desk(plugin_dir, SETTINGS) as one:
        assert await one.read() == {"mail": "mail", "other": "other"} and one.faults().keys() == {"aaa"}
        assert one.roster.secrets("mail") == {"token": SECRET}  # the control
        shutil.rmtree(mail)
        assert await one.read() == {"other": "other"} and not one.roster.secrets("mail")
        assert f"the settings say that the name mail is for {plugin_dir}/plugins/mail" in one.faults()["aaa"]
    # A plugin that runs takes the name of another one that runs.
    mail = put(plugin_dir, "mail")
    async with desk(plugin_dir, SETTINGS) as one:
        manifest = next(other.glob("*.yaml"))
        assert await one.read() == {"mail": "mail", "other": "other"}
        manifest.write_text(manifest.read_text().replace("other", "mail"))
        assert await one.read() == {"mail": "mail"} and one.faults().keys() == {"aaa", "other"}
    # The operator gives the name away, with nothing of what the first one had.
    async with desk(plugin_dir, '[mail]\nfolder = "plugins/aaa"\n') as one:
        assert await one.read() == {"mail": "aaa"} and not one.roster.secrets("mail")
    async with desk(plugin_dir) as one:
        assert await one.read() == {"mail": "aaa"} and one.faults().keys() == {"mail", "other"}


@pytest.mark.trio
async def test_entries_of_configurations_and_links_are_places_too(plugin_dir: Path) -> None:
    (plugin_dir / "plugins").mkdir(mode=0o755)
    entry = json.dumps({"mcpServers": {"git": {"command": "/bin/cat"}}})

    def write(name: str, text: str = entry) -> None:
        (plugin_dir / "plugins" / name).write_text(text)
        (plugin_dir / "plugins" / name).chmod(0o644)

    write("mine.json")
    async with desk(plugin_dir) as one:
        assert await one.read() == {"git": "mine.json"}
        write("a-project.json")
        assert await one.read() == {"git": "mine.json"} and one.faults().keys() == {"a-project.json"}
        # Names that are spelled in two ways and are one in an address.
        write("b.json", entry.replace("git", "a/b"))
        assert "a.b" in await one.read()
        write("c.json", entry.replace("git", "a.b"))
        assert (await one.read())["a.b"] == "b.json" and "(a/b)" in one.faults()["c.json"]
        assert 'in the table ["a.b"] of the settings' in one.faults()["c.json"]
    for name in ("a-project.json", "b.json", "c.json"):
        (plugin_dir / "plugins" / name).unlink()
    # One that is switched off ends, and its name stays its own.
    async with desk(plugin_dir) as one:
        assert await one.read() == {"git": "mine.json"}
        write("mine.json", entry.replace('"/bin/cat"', '"/bin/cat", "disabled": true'))
        write("a-project.json")
        assert await one.read() == {} and "where it was first" in one.faults()["a-project.json"]
        (plugin_dir / "plugins/a-project.json").unlink()
        write("mine.json")
    # One folder by two ways is no conflict, and a link to the newest version is one place.
    first, second = put(plugin_dir, ".mail-1"), put(plugin_dir, ".mail-2")
    link = plugin_dir / "plugins/mail"
    link.symlink_to(first.name)
    async with desk(plugin_dir) as one:
        assert (await one.read())["mail"] == "mail"
        (plugin_dir / "plugins/also").symlink_to(first.name)
        assert (await one.read())["mail"] == "mail" and not one.faults()
        (plugin_dir / "plugins/also").unlink()
        link.unlink()
        link.symlink_to(second.name)
        assert (await one.read())["mail"] == "mail" and not one.faults()


@pytest.mark.trio
async def test_a_record_that_cannot_be_used(plugin_dir: Path) -> None:
    mail = put(plugin_dir, "mail")
    record = plugin_dir / "record/names.json"
    async with desk(plugin_dir) as one:
        await one.read()
        assert "mail" in record.read_text()
        # Nobody knows whose the names are: who has one keeps it, and nobody else gets one.
        record.write_text("{")
        put(plugin_dir, "new", "new")
        assert await one.read() == {"mail": "mail"}
        assert "is damaged" in one.faults()["names.json"] and "rm " in one.faults()["names.json"]
    async with desk(plugin_dir) as one:
        assert await one.read() == {} and one.faults().keys() == {"names.json"}
    async with desk(plugin_dir, f'[mail]\nfolder = "{mail}"\n') as one:
        assert await one.read() == {"mail": "mail"}
    record.unlink()
    async with desk(plugin_dir) as one:  # the control
        assert await one.read() == {"mail": "mail", "new": "new"} and not one.faults()
    # It cannot be written: names are kept as long as the daemon lives.
    record.unlink()
    record.parent.chmod(0o777)
    async with desk(plugin_dir) as one:
        assert await one.read() == {"mail": "mail", "new": "new"}
        assert "only until the end of this process" in one.faults()["names.json"] and not record.exists()
        put(plugin_dir, "aaa")
        assert (await one.read())["mail"] == "mail"


@pytest.mark.trio
async def test_while_the_settings_cannot_be_read_nobody_gets_a_name_for_good(plugin_dir: Path) -> None:
    hostile = put(plugin_dir, "aaa")
    async with desk(plugin_dir, "[") as one:
        assert await one.read() == {"mail": "aaa"}
        assert [each.state for each in one.roster.supervisor_of("").plugins()] == ["pending"]
        mail = put(plugin_dir, "mail")
        hostile.rename(plugin_dir / "aside")
        assert await one.read() == {"mail": "mail"}  # nothing was recorded
        (plugin_dir / "settings.toml").write_text("")
        (plugin_dir / "aside").rename(hostile)
        mail.rename(plugin_dir / "aside")
        assert await one.read() == {"mail": "aaa"}  # the control
        (plugin_dir / "aside").rename(mail)
        assert await one.read() == {"mail": "aaa"} and one.faults().keys() == {"mail"}


# --- a daemon -----------------------------------------------------------------------------------------------


@pytest.mark.launches
def test_a_daemon_gives_nothing_of_a_plugin_to_another_one_with_its_name(
    runner_as: Caller, plugin_dir: Path, nothing_left: None
) -> None:
    plugins = plugin_dir / "plugins"

    def put_quirks(place: str) -> Path:
        shutil.copytree(ROOT / "tests/plugins/kaged_quirks", plugins / place)
        for path in (plugins, plugins / place, *(plugins / place).rglob("*")):
            path.chmod(0o755)
        return plugins / place

    first = put_quirks("mail")
    for name, text in (("settings.toml", SETTINGS.replace("[mail]", "[quirks]")), ("key", SECRET)):
        (plugin_dir / name).write_text(text)
        (plugin_dir / name).chmod(0o644)
    options = ("--settings", str(plugin_dir / "settings.toml"))
    with serving(runner_as, plugin_dir, *options) as served:
        assert served.call("quirks", "store", {"text": "x"})[0] == 200
        pids = served.plugin("quirks")["pids"]
        hostile = put_quirks("aaa")
        served.process.send_signal(signal.SIGHUP)
        assert wait_for(lambda: served.ask("GET", "/health")[1]["configuration"])
        assert runner_as("ctl", "--socket", served.socket, "reload").returncode == 1
        [fault] = served.ask("GET", "/health")[1]["configuration"]
        assert fault["path"] == str(hostile) and str(first) in fault["message"]
        listed = runner_as("ps", "--socket", served.socket).stdout
        assert f"{hostile}: the settings say that the name quirks is for {first}" in listed
        assert (served.plugin("quirks")["pids"], served.plugin("quirks")["manifest"]) == (pids, str(first))
        # It crashes, and is started again from where it was.
        assert served.call("quirks", "spill", {"then": "exit"})[0] == 502
        assert wait_for(lambda: served.plugin("quirks")["pids"] not in ([], pids))
        assert served.plugin("quirks")["manifest"] == str(first)
        served.process.kill()
        served.process.wait()
    first.rename(plugin_dir / "aside")
    with serving(runner_as, plugin_dir, *options) as served:
        assert served.states() == {}
        assert served.call("quirks", "spill", {"then": "error"})[0] == 404
        (plugin_dir / "aside").rename(first)
        assert wait_for(lambda: "quirks" in served.states())
        assert served.plugin("quirks")["manifest"] == str(first)
        served.end()


@pytest.mark.trio
async def test_a_mended_fault_is_told_until_its_plugin_is_replaced(
    plugin_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else who watches it sees that all is well, while calls still go to the plugin as it was."""
    manifest = put(plugin_dir, "mail") / "kaged-plugin.yaml"
    whole, seen = manifest.read_text(), list[bool]()
    async with desk(plugin_dir) as one:
        await one.read()
        manifest.write_text("{")
        await one.read()
        assert one.faults()
        manifest.write_text(whole.replace("version: ", "version: 1", 1))
        supervisor = one.roster.supervisor_of("")
        replace = supervisor.replace

        async def watched(spec: Any) -> None:
            seen.append(bool(one.faults()))
            await replace(spec)

        monkeypatch.setattr(supervisor, "replace", watched)
        await one.read()
        assert seen == [True] and not one.faults()
