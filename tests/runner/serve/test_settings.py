"""The settings of a daemon's plugins: what the file may say, who may write it, and what each plugin gets."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from runner.serve.client import NoDaemon
from runner.serve.settings import PluginSettings, ServedPlugin, Settings
from tests.conftest import ROOT, Caller, descendants, vanished
from tests.runner.serve.served import Served, serving
from tests.runner.serve.test_serve import event
from tests.tables import check_rows, wait_for

PLUGINS = {
    "notes": ServedPlugin("kaged", "/plugins/notes"),
    "acme.devkit": ServedPlugin("vai", "/plugins/devkit"),
    "words": ServedPlugin("rune", "/plugins/words"),
}
SECRET = "sk-5f1c9d0e7b"
BINDING = {
    "binding_id": "bind_1",
    "package_id": "acme/devkit",
    "package_version": "0.1.0",
    "export_id": "search",
    "scope": {"org_id": "org_7"},
    "secrets": {"api_key": "secret://org_7/api_key"},
    "status": "active",
}
HOOK = {**BINDING, "binding_id": "bind_2", "export_id": "notify", "secrets": {}}


def read(folder: Path, text: str, *, whose: bool = True) -> Settings:
    """`whose`: the last table says which folder it is for."""
    path = folder / "settings.toml"
    path.write_text(f'{text}\nfolder = "x"\n' if whose else text)
    path.chmod(0o644)
    return read_file(path, {"TOKEN": SECRET, "EMPTY": ""})


def read_file(path: Path, environ: Mapping[str, str]) -> Settings:
    return PluginSettings(str(path), environ).read(PLUGINS)


@pytest.fixture
def folder(plugin_dir: Path) -> Path:
    for name, text in {
        "key": SECRET + "\n",
        "config.json": '{"store": "a"}',
        "secrets.json": json.dumps({"token": SECRET}),
        "binding.json": json.dumps(BINDING),
        "bindings.json": json.dumps({"bindings": [BINDING, HOOK]}),
        "broken.json": f'{{"token": "{SECRET}',
        "empty": "",
    }.items():
        (plugin_dir / name).write_text(text)
        (plugin_dir / name).chmod(0o644)
    (plugin_dir / "everybodys").write_text(SECRET)
    (plugin_dir / "everybodys").chmod(0o666)
    (plugin_dir / "binary").write_bytes(b"\xff" + SECRET.encode())
    (plugin_dir / "binary").chmod(0o644)
    os.mkfifo(plugin_dir / "fifo")
    return plugin_dir


def test_a_plugin_gets_the_settings_of_its_table(folder: Path) -> None:
    rows: dict[str, dict[str, Any]] = {
        "[notes]": {},
        '[notes]\nconfig = "config.json"': {"config": {"store": "a"}},
        "[notes]\nconfig = {store = 1}": {"config": {"store": 1}},
        '[notes]\nsecrets = {token = "@key", other = "env:TOKEN"}': {
            "secrets": {"token": SECRET, "other": SECRET}
        },
        '[notes]\nsecrets = "secrets.json"': {"secrets": {"token": SECRET}},
        '[notes]\nproject = "work"\nproject_id = "p"': {
            "options": {"project": f"{folder}/work", "project_id": "p"}
        },
        '["acme.devkit"]\nbinding = "binding.json"\nsecrets = {api_key = "@key"}': {
            "options": {"binding": json.dumps(BINDING), "binding_file": f"{folder}/binding.json"},
            "secrets": {"api_key": SECRET + "\n"},  # it becomes a file, as it is
        },
        '["acme.devkit"]\ngateway_token = "@key"': {"secrets": {"--gateway-token": SECRET}},
        '[words]\nparked = 3\neager = true\nstaged = true\nhide = ["T@a.b"]\nssh = ["a.b"]\nstate_dir = "s"\n'
        'limits = {memory = "64M"}': {
            "parked": 3,
            "numbers": {"eager": True},
            "staged": True,
            "hide": ["T@a.b"],
            "ssh": ["a.b"],
            "state_dir": f"{folder}/s",
            "limits": {"memory": "64M"},
        },
        '[words]\nargs = ["a"]\nnumbers = {idle = 5.0}\neager = false\nenv = {A = "b"}': {
            "args": ["a"],
            "numbers": {"idle": 5.0, "eager": False},
            "env": {"A": "b"},
        },
    }

    def check(text: str, wanted: dict[str, Any]) -> None:
        found = read(folder, text)
        assert found.diagnostics == () and not found.faulty
        [fields] = found.plugins.values()
        assert fields == wanted and SECRET not in repr(fields.get("secrets"))

    check_rows(rows, check)
    (folder / "sub").mkdir()
    (folder / "sub/key").write_text(SECRET)
    assert set(read(folder, '[notes]\nsecrets = {a = "@sub/key"}').watched) == {
        str(folder),
        f"{folder}/sub",
    }


def test_faults_are_told_with_their_place_and_without_secrets(folder: Path) -> None:
    rows: dict[str, tuple[str, str]] = {
        "[notes\n": ("1:7", "expected ']'"),
        "notes = 5": ("1:1", "write [notes]"),
        '[notes]\nconfg = "x"': ("2:1", "did you mean 'config'?"),
        '[notes]\nbinding = "binding.json"': ("2:1", "it is for plugins of vai, and this is one of kaged"),
        '["acme.devkit"]\ninvocation_id = "x"': ("2:1", "is not a key"),
        "[notes]\nconfig = 5": ("2:1", "config is not a text or a table"),
        "[notes]\nparked = true": ("2:1", "parked is not a whole number"),
        "[notes]\nparked = 17": ("2:1", "from 0 to 16"),
        "[notes]\nparked = -1": ("2:1", "from 0 to 16"),
        "[notes]\nconfig = {day = 2026-01-01}": ("2:1", "config: JSON has no dates"),
        "[notes]\nconfig = {day = inf}": ("2:1", "config: JSON has no dates"),
        "[words]\nargs = [1]": ("1:2", "args: one of them is not a text"),
        '[words]\nssh = ["me@a.b"]': ("1:2", "ssh: me@a.b: it has an account in front"),
        '[words]\nenv = {"A=B" = "x"}': ("1:2", "is not the name of an environment variable"),
        "[words]\nnumbers = {idel = 1}": ("1:2", "there is no 'idel'"),
        "[words]\nnumbers = {idle = -1}": ("1:2", "is not a number, 0 or more"),
        '[words]\nstate_dir = ""': ("2:1", "state_dir: its value is empty"),
        '[words]\n[words.limits]\nmemroy = "1M"': ("3:1", "did you mean 'memory'?"),
        '[words]\n[words.limits]\nmemory = "much"': ("3:1", "memory: "),
        '[words]\nsecrets = {a = "@key"}': ("2:1", "the contract rune sends its plugins no secrets"),
        '["acme.devkit"]\nsecrets = "secrets.json"': ("2:1", "has to be a table"),
        f'[notes]\nsecrets = {{token = "{SECRET}"}}': ("2:12", "write @FILE, or env:NAME"),
        '[notes]\nsecrets = {token = "env:NONE"}': ("2:12", "no such variable"),
        '[notes]\nsecrets = {token = "env:EMPTY"}': ("2:12", "no such variable"),
        '[notes]\nsecrets = {token = "@binary"}': ("2:12", "is not UTF-8"),
        f'[notes]\nsecrets = {{token = "@{SECRET}"}}': ("2:12", "the file that it names: there is no such"),
        f'[notes]\nsecrets = "{SECRET}"': ("2:1", "the file that it names: there is no such file"),
        f'["acme.devkit"]\nsecrets = "{SECRET}"': ("2:1", "secrets has to be a table"),
        '[notes]\nsecrets = "broken.json"': ("2:1", "broken.json is not JSON that can be used"),
        '[notes]\nsecrets = {token = "@none"}': ("2:12", "there is no such file"),
        '[notes]\nsecrets = {token = "@empty"}': ("2:12", "the file is empty"),
        '[notes]\nsecrets = {token = "@fifo"}': ("2:12", "this is a FIFO"),
        '[notes]\nconfig = "key"': ("2:1", "is not JSON"),
        '["acme.devkit"]\nbinding = "/proc/self/mem"': ("2:1", "cannot be read"),
        # Another user who can write the file would decide what the plugin gets.
        '[notes]\nsecrets = {token = "@everybodys"}': ("2:12", "can be written by its group or by everybody"),
    }

    def check(text: str, wanted: tuple[str, str]) -> None:
        found = read(folder, text)
        assert found.faulty and found.plugins.get("notes") != {"config": 1}
        told = [f"{each.place}: {each.message}; {each.hint}" for each in found.diagnostics]
        assert any(each.startswith(f"{folder}/settings.toml:{wanted[0]}: ") for each in told), told
        assert wanted[1] in "\n".join(told) and SECRET not in "\n".join(told), told

    check_rows(rows, check)


def test_a_table_of_no_plugin_is_told_and_the_others_count(folder: Path) -> None:
    found = read(folder, "[acme.devkit]\nparked = 1\n[wrods]\n[words]\nparked = 2", whose=False)
    assert not found.faulty and found.plugins == {"words": {"parked": 2}}
    assert [(each.line, each.hint) for each in found.diagnostics] == [
        (1, 'write ["acme.devkit"], in quotes'),
        (3, "did you mean 'words'?"),
    ]


def test_what_is_given_away_names_the_folder_that_it_is_for(folder: Path) -> None:
    rows = {
        '[notes]\nsecrets = {token = "@key"}': "secrets",
        '[notes]\nlimits = {memory = "64M"}\nconfig = {store = 1}': "config",
        '[notes]\nproject = "work"': "project",
        '["acme.devkit"]\ngateway_token = "@key"': "gateway_token",
        '[words]\nargs = ["a"]\nstate_dir = "s"': "args",
        '[words]\nenv = {A = "b"}': "env",
        '[words]\nstate_dir = "s"': "state_dir",
        '[words]\nlimits = {memory = "64M"}\nparked = 1\neager = true\nnumbers = {idle = 1.0}': "",
    }

    def check(text: str, key: str) -> None:
        found = read(folder, text, whose=False)
        [*told] = [f"{each.rule}: {each.message}; {each.hint}" for each in found.diagnostics]
        wanted = f"settings_folder: {key}: the table does not say which folder it is for"
        assert found.faulty is bool(key) and [each.startswith(wanted) for each in told] == [True] * bool(key)
        assert not key or 'write folder = "/plugins/' in told[0]
        assert not read(folder, text).faulty  # the control

    check_rows(rows, check)
    settings = '[notes]\nfolder = "plugins/notes"\n[words]\nfolder = "/w"\n[other]\nparked = 1\n'
    (folder / "settings.toml").write_text(settings)
    read_folders = PluginSettings(str(folder / "settings.toml"), {}).folders()
    assert read_folders == {"notes": f"{folder}/plugins/notes", "words": "/w"}
    for wrong in ("5", '""'):
        assert read(folder, f"[notes]\nfolder = {wrong}", whose=False).faulty


def test_settings_that_others_can_change_are_not_used(folder: Path) -> None:
    assert not read(folder, "[notes]").faulty  # the control
    (folder / "settings.toml").chmod(0o666)
    found = read_file(folder / "settings.toml", {})
    assert found.faulty and "can be written by its group or by everybody" in found.diagnostics[0].message
    (folder / "settings.toml").chmod(0o644)
    os.rename(folder / "settings.toml", folder / "real.toml")
    os.symlink(folder / "real.toml", folder / "settings.toml")
    assert not read_file(folder / "settings.toml", {}).faulty
    (folder / "real.toml").chmod(0o666)
    assert read_file(folder / "settings.toml", {}).faulty


# --- a daemon -----------------------------------------------------------------------------------------------

SETTINGS = """
[quirks]
folder = "plugins/kaged_quirks"
config = "config.json"
secrets = {token = "@key"}
state_dir = "state"

["acme.devkit"]
folder = "plugins/vai_devkit"
binding = "bindings.json"
secrets = {api_key = "@key"}

[rune-echo]
eager = true
"""


@pytest.fixture
def shelf(folder: Path, nothing_left: None) -> Path:
    (folder / "plugins").mkdir()
    for name in ("kaged_quirks", "vai_devkit", "rune_echo"):
        shutil.copytree(ROOT / "tests/plugins" / name, folder / "plugins" / name)
    # Plugins that say their secrets: kaged's in its error, vai's on stderr and in its answer.
    program = folder / "plugins/vai_devkit/bin/plugin"
    text = program.read_text().replace('    op, body = request["op"], request["body"]\n', LEAK)
    program.write_text(text)
    # ... and kaged's shows its configuration.
    program = folder / "plugins/kaged_quirks/plugin.py"
    text = program.read_text().replace('{"got": params}', '{"got": params, "config": config}')
    update = '    secrets.update(params.get("system_config") or {})\n'
    text = text.replace(update, update + "    config.update(params.get('config') or {})\n")
    program.write_text(text.replace("\nsecrets = {}\n", "\nsecrets, config = {}, {}\n"))
    for path in (folder / "plugins", *(folder / "plugins").rglob("*")):
        path.chmod(0o755)
    (folder / "settings.toml").write_text(SETTINGS)
    (folder / "settings.toml").chmod(0o644)
    (folder / "state").mkdir()
    return folder


LEAK = """    op, body = request["op"], request["body"]
    if secrets():
        print("leak", *secrets().values(), file=sys.stderr, flush=True)
    asked, said = (body.get("input") or {}).get("do"), secrets().get("api_key")
    if asked == "tell":
        return {"status": "failed", "error": {"code": "devkit.leak", "message": said}}
    if asked == "give":
        return {"status": "succeeded", "result": {"content": [{"type": "text", "text": said}]}}
"""


@pytest.mark.launches
def test_settings_reach_plugins_and_are_followed(runner_as: Caller, shelf: Path) -> None:
    runner_as.give(shelf / "state")
    others = descendants()
    with serving(runner_as, shelf, "--settings", str(shelf / "settings.toml")) as served:
        check_parked(runner_as, served)
        check_plugins(served)
        check_secrets(served, shelf)
        check_events(served)
        check_changes(served, shelf)
        assert wait_for(lambda: served.plugin("rune-echo")["parked"] == 1)
        below = descendants() - others
        said = served.end()
        assert len(below) > 4 and vanished(below)
        assert SECRET not in said and "settings.toml:2:1: 'confg' is not a key" in said
    for path in (shelf / "ledger").iterdir():
        assert SECRET.encode() not in path.read_bytes(), path


def check_parked(caller: Caller, served: Served) -> None:
    assert wait_for(lambda: served.plugin("rune-echo")["parked"] == 1)
    listed = caller("ps", "--socket", served.socket).stdout.splitlines()
    titles = listed[0].split()
    [row] = [line.split() for line in listed if line.startswith("rune-echo")]
    assert row[titles.index("PARKED")] == "1"
    status, found = served.call("rune-echo", "echo", {"n": 1})
    assert (status, found["value"]["input"]) == (200, {"n": 1})


def check_plugins(served: Served) -> None:
    status, found = served.call("quirks", "store", {"text": "x"})
    assert (status, found["value"]["config"]) == (200, {"store": "a"}), found
    status, found = served.call("acme.devkit", "search", {})
    assert status == 200, found
    seen = found["value"]["structured_output"]
    assert seen["secrets"] == ["api_key"] and seen["body"]["context"]["org_id"] == "org_7"
    assert found["invocation"]["binding_id"] == "bind_1"
    # An export without a record in the binding's file has no binding, and is not called.
    status, found = served.call("acme.devkit", "reader", {})
    assert (status, found["error"]["cause"]) == (400, "binding.invalid")
    # The caller cannot bring another binding, or secrets.
    for key in ("binding", "secrets", "options"):
        body = {"tool": "search", "input": {}, key: "x"}
        assert served.ask("POST", "/plugins/acme.devkit/calls", body)[0] == 400
    body = {"tool": "search", "input": {}, "context": {"org_id": "org_8"}}
    status, found = served.ask("POST", "/plugins/acme.devkit/calls", body)
    assert (status, found["error"]["cause"]) == (400, "binding.invalid")


def check_secrets(served: Served, shelf: Path) -> None:
    """Nothing that is shown or stored has one, but the answer of a plugin to its caller."""
    told = [
        served.call("quirks", "spill", {"then": then}, Idempotency_Key=then) for then in ("error", "exit")
    ]
    told.append(served.call("acme.devkit", "search", {"do": "tell"}, Idempotency_Key="t"))
    assert [status for status, _ in told] == [422, 502, 422] and "[secret]" in str(told)
    assert wait_for(lambda: "the token is" in served.ask("GET", "/plugins/quirks/logs")[1])
    for name in ("quirks", "acme.devkit"):
        told += [served.ask("GET", f"/plugins/{name}/{what}") for what in ("logs", "explain")]
    assert "leak [secret]" in str(told)
    told += [served.ask("GET", path) for path in ("/calls", "/audit", "/plugins", "/health", "/metrics")]
    assert SECRET not in str(told)
    # The caller gets the answer as the plugin wrote it. The ledger does not keep it for the key.
    status, found = served.call("acme.devkit", "search", {"do": "give"}, Idempotency_Key="g")
    assert status == 200 and SECRET in str(found)
    status, found = served.call("acme.devkit", "search", {"do": "give"}, Idempotency_Key="g")
    assert (status, found["error"]["code"]) == (410, "answer_not_kept")
    first = served.call("acme.devkit", "search", {}, Idempotency_Key="h")
    assert served.call("acme.devkit", "search", {}, Idempotency_Key="h") == first  # the control


def check_events(served: Served) -> None:
    """An event without a hook goes to all that want it, with their bindings, and once."""

    def post(**document: Any) -> tuple[int, Any]:
        return served.ask("POST", "/deliveries", document)

    status, found = post(id="e1", event=event({}))
    assert (status, found["id"]) == (202, "e1")
    assert [(row["plugin"], row["hook"]) for row in found["deliveries"]] == [("acme.devkit", "notify")]
    path = f"/deliveries/{found['deliveries'][0]['id']}"
    assert wait_for(lambda: served.ask("GET", path)[1]["state"] == "acked")
    assert post(id="e1", event=event({}))[1]["deliveries"][0]["state"] == "acked"
    calls = served.ask("GET", "/calls?plugin=acme.devkit")[1]["calls"]
    [call] = [each for each in calls if each["delivery"] is not None]
    assert call["record"]["invocation"]["binding_id"] == "bind_2"
    # kaged names the hook itself, and its event has no type.
    status, found = post(type="on_session_idle", event={"transcript": "x"})
    [row] = found["deliveries"]
    assert (status, row["plugin"], row["hook"]) == (202, "quirks", "on_session_idle")
    assert wait_for(lambda: served.ask("GET", f"/deliveries/{row['id']}")[1]["state"] == "acked")
    assert post(event={"type": "nobody.cares"})[1]["deliveries"] == []
    assert post(plugin="quirks", event=event({}))[1]["deliveries"] == []
    assert len(post(id="e2", plugin="acme.devkit", event=event({}))[1]["deliveries"]) == 1
    rows: list[tuple[dict[str, Any], tuple[int, str]]] = [
        ({"id": "e2", "event": event({})}, (409, "delivery_conflict")),
        ({"id": "e1", "event": event({"other": 1})}, (409, "delivery_conflict")),
        ({"id": "x" * 201, "event": event({})}, (400, "invalid_delivery")),
        ({"id": "a/b", "event": event({})}, (400, "invalid_delivery")),
        ({"event": {}}, (400, "invalid_delivery")),
        ({"event": {"type": 5}}, (400, "invalid_delivery")),
        ({"type": "a", "event": {"type": "b"}}, (400, "invalid_delivery")),
        ({"type": "a", "plugin": "quirks", "hook": "h", "event": {}}, (400, "invalid_delivery")),
        ({"hook": "notify", "event": event({})}, (400, "invalid_delivery")),
        ({"plugin": "nobody", "event": event({})}, (404, "unknown_plugin")),
    ]

    def check(document: dict[str, Any], wanted: tuple[int, str]) -> None:
        status, found = post(**document)
        assert (status, found["error"]["code"]) == wanted, found

    check_rows([(str(number), row) for number, row in enumerate(rows)], lambda _, row: check(*row))


def check_changes(served: Served, shelf: Path) -> None:
    """A changed table reloads its plugin alone. A fault keeps what there was, and a new plugin waits."""

    def write(name: str, text: str) -> None:
        (shelf / "draft").write_text(text)
        (shelf / "draft").chmod(0o644)
        os.rename(shelf / "draft", shelf / name)

    def faults() -> str:
        return json.dumps(served.ask("GET", "/health")[1]["configuration"])

    assert wait_for(lambda: served.plugin("quirks")["pids"])  # it was made to exit above
    [before] = served.plugin("quirks")["pids"]
    write("settings.toml", SETTINGS.replace("eager = true", "eager = true\nparked = 2"))
    assert wait_for(lambda: served.plugin("rune-echo")["parked"] == 2)
    assert served.plugin("quirks")["pids"] == [before]
    write("settings.toml", SETTINGS.replace("[quirks]\n", "[quirks]\nconfg = 1\n").lstrip())
    assert wait_for(lambda: "did you mean 'config'?" in faults())
    shutil.copytree(ROOT / "tests/plugins/kaged_bare", shelf / "plugins/bare")
    for path in (shelf / "plugins/bare", *(shelf / "plugins/bare").iterdir()):
        path.chmod(0o755)
    assert wait_for(lambda: served.states().get("bare") == "pending")
    assert "have a fault" in served.plugin("bare")["reason"]
    assert served.plugin("quirks")["pids"] == [before]
    assert served.call("acme.devkit", "search", {})[0] == 200
    # A secret is one of the files that are followed.
    write("settings.toml", SETTINGS)
    assert wait_for(lambda: faults() == "[]" and served.states()["bare"] != "pending")
    write("key", "another-secret-0815")
    assert wait_for(lambda: served.plugin("quirks")["pids"] not in ([], [before]))

    def given() -> str:
        return str(served.call("acme.devkit", "search", {"do": "give"}))

    assert wait_for(lambda: "another-secret-0815" in given())  # plugins are replaced side by side
    assert served.call("quirks", "store", {"text": "x"})[0] == 200


@pytest.mark.launches
def test_a_daemon_that_is_killed_leaves_no_parked_cell(runner_as: Caller, shelf: Path) -> None:
    (shelf / "settings.toml").write_text("[rune-echo]\nparked = 2\neager = true\n")
    others = descendants()
    with serving(runner_as, shelf, "--settings", str(shelf / "settings.toml")) as served:
        assert wait_for(lambda: served.plugin("rune-echo")["parked"] == 2)
        below = descendants() - others
        assert len(below) > 8  # each has four
        served.process.kill()
        served.process.wait()
        with pytest.raises(NoDaemon):
            served.states()
        assert vanished(below)
    # One that starts with a fault in its settings starts no plugin.
    (shelf / "settings.toml").write_text("[rune-echo]\nparked = 99\n")
    with serving(runner_as, shelf, "--settings", str(shelf / "settings.toml")) as served:
        assert set(served.states().values()) == {"pending"}
        status, found = served.call("rune-echo", "echo", {})
        assert (status, found["error"]["code"]) == (403, "policy_denied"), found
        assert "settings.toml:2:1: parked is not a number from 0 to 16" in served.end()
