"""`runner install` with real npm and pip, and a registry on the test internet."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.install.roots import ROOT_STORE
from tests.conftest import Caller
from tests.internet import Internet, internet, world  # noqa: F401 -- fixtures
from tests.root_store import empty_root_store
from tests.runner.install.packages import (
    ADDRESS,
    PYTHON_SERVER,
    link,
    node_server,
    publish_npm,
    publish_sdist,
    publish_wheel,
)
from tests.tables import wait_for

pytestmark = [pytest.mark.needs("node", "root"), pytest.mark.bound(300), pytest.mark.launches]

TOKEN, PASSWORD = "npm_s3cretT0ken1234567890", "pyp1-s3cretPassw0rd-12345"
GOOD = {"1.0.0": node_server("1.0.0")}


@pytest.fixture
def person(internet: Internet, runner_as_user: Caller) -> Caller:  # noqa: F811
    """A user whose npm and pip are told of the registry, with a token for each."""
    return customer(internet, runner_as_user)


def customer(internet: Internet, caller: Caller) -> Caller:  # noqa: F811
    for file in internet.registry.iterdir():
        file.unlink()
    (caller.home / ".npmrc").write_text(
        f"registry={ADDRESS}/\n//registry.example.com/:_authToken=${{NPM_TOKEN}}\nfetch-retries=0\n"
    )
    (caller.home / ".config/pip").mkdir(parents=True, exist_ok=True)
    address = ADDRESS.replace("://", f"://ada:{PASSWORD}@")
    settings = (f"index-url = {address}/simple", "find-links =", "extra-index-url =")
    text = "\n".join(("[global]", *settings, "trusted-host = registry.example.com", ""))
    (caller.home / ".config/pip/pip.conf").write_text(text)
    caller.give(caller.home)
    return internet.on_machine(replace(caller, environ={**caller.environ, "NPM_TOKEN": TOKEN}))


def configure(person: Caller, servers: Mapping[str, str]) -> Path:
    """`servers`: their command lines, without spaces in a word."""
    file = person.home / ".cursor/mcp.json"
    file.parent.mkdir(exist_ok=True)
    entries = {}
    for name, line in servers.items():
        command, *args = line.split()
        entries[name] = {"command": command, "args": args}
    file.write_text(json.dumps({"mcpServers": entries}, indent=2))
    person.give(file.parent)
    return file


def said(person: Caller, file: Path, server: str, *options: str) -> str:
    called = person("call", file, "--server", server, *options, "who")
    assert called.returncode == 0, called.stderr
    return str(json.loads(called.stdout)["content"][0]["text"])


def installed(person: Caller) -> list[dict[str, Any]]:
    return list(json.loads(person("install", "--list", "--json").stdout)["installed"])


def fetch_folders(person: Caller) -> list[Path]:
    return list((person.home / "tmp").glob("runner-install-*"))


def on_terminal(person: Caller, answers: Sequence[str], *words: str | Path) -> str:
    """What a command shows on a terminal, where each of its questions is answered."""
    outer, inner = os.openpty()
    with person.start(*words, stdin=inner, stdout=inner, stderr=inner) as started:
        os.close(inner)
        shown = b""
        left = list(answers)
        while True:
            try:
                shown += os.read(outer, 65536)
            except OSError:  # nobody has the other end any more
                break
            if left and shown.endswith(b"[y/N] "):
                os.write(outer, left.pop(0).encode() + b"\n")
        os.close(outer)
    assert started.returncode == 0, shown
    return shown.decode()


def publish_wheel_server(registry: Path) -> None:
    files = {"demo_wheel.py": PYTHON_SERVER}
    publish_wheel(registry, "demo-wheel", "2.0", files, "demo-wheel = demo_wheel:main")


def assert_no_secret(person: Caller, *texts: str) -> None:
    """No token is in what was printed, nor in any file that the runner keeps."""
    for secret in (TOKEN, PASSWORD):
        assert not any(secret in text for text in texts)
        for place in (person.home / ".local", person.home / ".cache", *fetch_folders(person)):
            for path in place.rglob("*"):
                if path.is_file() and not path.is_symlink():
                    assert secret.encode() not in path.read_bytes(), path


def test_from_a_configuration_to_a_called_server(
    person: Caller,
    internet: Internet,  # noqa: F811
    nothing_left: None,
) -> None:
    publish_npm(internet.registry, "@demo/server", GOOD)
    publish_wheel_server(internet.registry)
    file = configure(person, {"node": "npx -y @demo/server --flag a", "python": "uvx demo-wheel x"})
    before = file.read_bytes()
    # Without the packages nothing is fetched by a start, and the message says what to do.
    refused = person("call", file, "--server", "node", "who")
    assert refused.returncode != 0 and "runner install -- npx -y @demo/server" in refused.stderr
    # Without a terminal nobody is asked.
    offered = person("wrap", file)
    assert "node (@demo/server) will be fetched from registry.example.com:80" in offered.stdout
    assert "--install --yes" in offered.stdout and file.read_bytes() == before
    assert [line for line in internet.requests() if "npm" in line or "demo" in line] == []

    done = person("wrap", file, "--install", "--yes", timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "installed @demo/server 1.0.0" in done.stdout and "installed demo-wheel 2.0" in done.stdout
    assert "@demo/server: not pinned" in done.stdout
    assert "is not on PATH" not in done.stdout  # there is no uvx here, and none is needed
    # The tokens reached the registry, and stayed nowhere.
    headers = [line for each in internet.look() for line in each.get("headers", ())]
    assert f"authorization: Bearer {TOKEN}".lower() in map(str.lower, headers)
    assert any(line.lower().startswith("authorization: basic") for line in headers)
    assert_no_secret(person, done.stdout, done.stderr)

    for server, text in (("node", "1.0.0 --flag,a"), ("python", "wheel x")):
        assert said(person, file, server) == text
    assert said(person, file, "node") == "1.0.0 --flag,a again"  # its cache is in its state directory
    assert person("tools", file, "--server", "node").returncode == 0
    explained = person("explain", file, "--server", "node")
    assert explained.returncode == 0 and "/store/sets/" in explained.stdout, explained.stderr
    checked = person("check", file)
    assert "needs the network" not in checked.stdout + checked.stderr
    faulty = file.with_name("faulty.json")
    faulty.write_text(before.decode().replace('"command"', '"x-sandbox": {"reed": []}, "command"'))
    checked = person("check", faulty)
    assert checked.stdout.count("sandbox_unknown_key") == 2 and "2 errors, 0 warnings" in checked.stdout
    for line in (("npm", "exec", "--", "@demo/server"), ("bunx", "@demo/server")):  # they ask for the same
        assert person("run", "--", *line, input="").returncode == 0
    other = person("run", "--", "npx", "@demo/server@2", input="")
    assert other.returncode != 0 and "runner install -- npx -y @demo/server@2" in other.stderr
    assert internet.requests() == []  # all of that was offline
    assert_no_secret(person)

    rows = installed(person)
    assert len(rows) == 2 and all(row["complete"] for row in rows)
    store = Path(rows[0]["store"])
    assert store == person.home / ".local/share/runner/store"
    # No plugin may write there, whatever it is allowed.
    for folder in (store, store.parent, person.home / ".local/share", person.home / ".local"):
        written = person("run", "--write", str(folder), "--", "true")
        assert written.returncode != 0 and "runner" in written.stderr, folder
    (person.home / "work").mkdir()
    person.give(person.home / "work")
    assert person("run", "--write", str(person.home / "work"), "--", "true").returncode == 0

    assert person("install", "--verify").returncode == 0
    [changed] = store.glob("sets/*/tree/node_modules/@demo/server/index.js")
    content = changed.read_bytes()
    changed.chmod(0o644)
    changed.write_text("changed")
    verified = person("install", "--verify")
    assert verified.returncode == 1 and "node_modules/@demo/server/index.js" in verified.stdout
    changed.write_bytes(content)
    changed.chmod(0o555)
    # Others could write to it: nothing is started from it.
    store.chmod(0o777)
    refused = person("call", file, "--server", "node", "who")
    assert refused.returncode != 0 and f"chmod go-w {store}" in refused.stderr
    listed = person("install", "--list")
    assert listed.returncode == 1 and f"chmod go-w {store}" in listed.stderr
    store.chmod(0o755)

    assert person("wrap", file, "--undo", "--yes").returncode == 0
    assert file.read_bytes() == before and len(installed(person)) == 2
    assert person("install", "--remove", "@demo/server").returncode == 0
    refused = person("call", file, "--server", "node", "who")
    assert refused.returncode != 0 and "runner install -- npx -y @demo/server" in refused.stderr
    assert not list(store.glob("sets/*/tree/node_modules"))


def test_an_entry_that_names_its_own_registry_is_not_fetched_from_another(
    person: Caller,
    internet: Internet,  # noqa: F811
) -> None:
    """The person's registry has a package of the same name, which may be a stranger's."""
    publish_npm(internet.registry, "@demo/server", GOOD)
    file = configure(person, {"own": "npx -y @demo/server"})
    document = json.loads(file.read_text())
    for name in ("npm_config_registry", "NPM_CONFIG_REGISTRY", "npm_config_userconfig"):
        document["mcpServers"]["own"]["env"] = {name: "https://npm.example.net/"}
        file.write_text(json.dumps(document))
        for words in (("install", file, "--yes"), ("wrap", file, "--install", "--yes"), ("check", file)):
            done = person(*words)
            assert f"names a registry (the variable {name})" in done.stdout + done.stderr, words
            assert "runner install -- npx" not in done.stdout + done.stderr
    called = person("call", file, "--server", "own", "who")
    assert called.returncode != 0 and "runner install -- npx" not in called.stderr
    assert internet.requests() == [] and installed(person) == []
    # Control: another variable does not keep it from being fetched.
    document["mcpServers"]["own"]["env"] = {"DEMO": "1"}
    file.write_text(json.dumps(document))
    done = person("install", file, "--yes", timeout=280)
    assert done.returncode == 0 and "installed @demo/server 1.0.0" in done.stdout, done.stderr


def test_a_server_that_cannot_be_fetched_does_not_hold_up_the_others(
    person: Caller,
    internet: Internet,  # noqa: F811
) -> None:
    publish_npm(internet.registry, "@demo/server", GOOD)
    file = configure(person, {"odd": "uvx --python 3.99 demo-wheel", "node": "npx -y @demo/server"})
    done = person("install", file, "--yes", timeout=280)
    assert done.returncode == 1 and "odd (demo-wheel): it asks for Python 3.99" in done.stderr
    assert "installed @demo/server 1.0.0" in done.stdout and len(installed(person)) == 1


def test_commands_of_wheels_with_odd_names(
    person: Caller,
    internet: Internet,  # noqa: F811
) -> None:
    files = {
        "odd_wheel.py": PYTHON_SERVER,
        "pyvenv.cfg": "home = /nowhere\n",
        "bin/python": "#!/bin/false\n",
    }
    script = "python = odd_wheel:main\nodd-wheel = odd_wheel:main"
    publish_wheel(internet.registry, "odd-wheel", "1.0", files, script)
    publish_wheel(internet.registry, "bad-wheel", "1.0", {"x.py": ""}, "bad-wheel = x:m\n.. = x:m")
    publish_wheel(internet.registry, "up-wheel", "1.0", {"x.py": ""}, "up-wheel = x:m\n../../x = x:m")
    # What is added to it has a command of its name, and does not replace it.
    files = {"zz_added.py": "def main(): raise SystemExit('another program')"}
    publish_wheel(internet.registry, "zz-added", "1.0", files, "odd-wheel = zz_added:main")
    servers = {"bad": "uvx bad-wheel", "odd": "uvx --with zz-added odd-wheel", "alone": "uvx odd-wheel"}
    file = configure(person, {"up": "uvx up-wheel", **servers})
    done = person("install", file, "--yes", timeout=280)
    assert "bad (bad-wheel): pip could not fetch it" in done.stderr, done.stderr
    rows = installed(person)
    assert len(rows) == 3, done.stderr
    for row in rows:
        tree = Path(row["program"][0]).parents[1]
        assert sorted(os.listdir(tree)) == ["bin", "lib", "pyvenv.cfg"]
        assert sorted(os.listdir(tree / "bin")) == sorted((row["request"]["packages"][0], "python"))
        assert os.path.isabs(os.readlink(tree / "bin/python"))
    assert said(person, file, "odd") == said(person, file, "alone") == "wheel "


def test_an_update_asks_and_what_was_allowed_is_asked_again(
    internet: Internet,  # noqa: F811
    account_user: Caller,
) -> None:
    person = customer(internet, account_user)
    publish_npm(internet.registry, "demo", GOOD)
    file = configure(person, {"demo": "npx demo"})
    shown = on_terminal(person, ("y", "y"), "wrap", file)
    assert "demo (demo) will be fetched from registry.example.com:80" in shown
    assert "] 1 of 1: demo (demo)" in shown and "installed demo 1.0.0" in shown and "Changed " in shown
    data = person.home / "data"
    data.mkdir()
    person.give(data)
    assert person("allow", file, "--server", "demo", "--read", data, "--yes").returncode == 0
    allowed = person("explain", file, "--server", "demo")
    assert str(data) in allowed.stdout
    publish_npm(internet.registry, "demo", {**GOOD, "1.1.0": node_server("1.1.0")})
    asked = person("install", "--update", timeout=120)
    assert asked.returncode == 2 and "demo: 1.0.0 -> 1.1.0" in asked.stdout
    assert said(person, file, "demo").startswith("1.0.0")
    updated = person("install", "--update", "demo", "--yes", timeout=120)
    assert updated.returncode == 0, updated.stderr
    [row] = installed(person)
    assert row["versions"] == {"demo": "1.1.0"} and said(person, file, "demo").startswith("1.1.0")
    assert str(data) not in person("explain", file, "--server", "demo").stdout
    assert len(os.listdir(Path(row["store"], "sets"))) == 1


def test_bad_packages_leave_nothing(
    person: Caller,
    internet: Internet,  # noqa: F811
    nothing_left: None,
) -> None:
    registry = internet.registry
    script = {"scripts": {"preinstall": "touch $HOME/ran ../../ran; exit 1"}}
    publish_npm(registry, "bin-elsewhere", GOOD, {"bin": "../../../outside.js"})
    publish_npm(
        registry, "bin-of-another", GOOD, {"bin": "../victim/index.js"} | {"dependencies": {"victim": "1"}}
    )
    publish_npm(registry, "victim", GOOD)
    publish_npm(
        registry, "bin-is-a-link", {"1.0.0": {}}, {"bin": "x.js"}, entries=[link("x.js", "/etc/passwd")]
    )
    publish_npm(registry, "wrong-digest", GOOD, integrity="sha512-" + "A" * 86 + "==")
    publish_npm(registry, "no-bin", GOOD, {"bin": {}})
    (registry / "elsewhere").write_bytes(
        b"HTTP/1.1 302 Found\r\nLocation: http://other.example.org/elsewhere\r\nContent-Length: 0\r\n\r\n"
    )
    (registry / "odd").write_bytes(b"not json")
    publish_wheel(registry, "wrong-wheel", "1", {"x.py": ""}, "wrong-wheel = x:main", digest="0" * 64)
    publish_wheel(registry, "outside-wheel", "1", {"../../../out.py": ""}, "outside-wheel = x:main")
    publish_sdist(registry, "only-sdist", "1", "open('/tmp/ran', 'w')")
    publish_wheel(
        registry, "new-wheel", "1", {"x.py": ""}, "new-wheel = x:main", metadata="Requires-Python: >=3.99\n"
    )
    publish_npm(registry, "scripts", GOOD, script)
    expected = {
        "npx bin-elsewhere": "outside of the package",
        "npx bin-of-another": "outside of the package",
        "npx bin-is-a-link": "not in the package",
        "npx wrong-digest": "EINTEGRITY",
        "npx no-bin": "no command",
        "npx elsewhere": "other.example.org",
        "npx odd": "could not fetch",
        "npx absent": "404",
        "uvx wrong-wheel": "DO NOT MATCH THE HASHES",
        "uvx outside-wheel": "outside",
        "uvx only-sdist": "only wheels are installed",
        "uvx new-wheel": "3.99 into the entry, in front of the package; uv python install 3.99",
    }
    names = {line.split()[1]: line for line in expected}
    file = configure(person, {**names, "scripts": "npx scripts"})
    internet.look()
    done = person("install", file, "--yes", timeout=250)
    assert done.returncode == 1
    assert "its argument names" not in done.stderr  # "npm" is no folder of the user's
    parts = {part.partition(" ")[0]: part for part in done.stderr.split("runner install: ")[1:]}
    for line, text in expected.items():
        name = line.split()[1]
        assert text in parts[name] and "nothing of it was installed" in parts[name], (name, parts[name])
    assert "45.33.1.20" not in internet.connections()  # of other.example.org
    # The control is in the same list: its script did not run.
    assert [row["request"]["packages"] for row in installed(person)] == [["scripts"]]
    store = person.home / ".local/share/runner/store"
    assert len(os.listdir(store / "sets")) == 1 and sorted(os.listdir(store)) == ["lock", "requests", "sets"]
    assert fetch_folders(person) == [] and not list(store.rglob("ran"))
    assert_no_secret(person, done.stdout, done.stderr)
    for spec in ("git+https://example.com/x.git", "./here", "https://example.com/x.tgz", "--evil"):
        assert person("install", "--yes", "--", "npx", "-y", spec).returncode == 2


def test_scripts_run_only_on_request_and_in_the_cage(person: Caller, internet: Internet) -> None:  # noqa: F811
    home = person.home
    lines = (
        f"(cat {home}/.npmrc $HOME/.npmrc; env) > seen.txt 2>&1",
        f"echo x > {home}/escaped",
        "echo x > $npm_package_name.txt",
        "sed -i s/sha512-/sha512-forged/ ../../package-lock.json",
    )
    publish_npm(internet.registry, "demo", GOOD, {"scripts": {"install": "; ".join((*lines, "true"))}})
    publish_npm(internet.registry, "linker", GOOD, {"scripts": {"install": f"ln -s {home} home"}})
    done = person("install", "--yes", "--", "npx", "demo", timeout=120)  # a plain one does not count as such
    assert done.returncode == 0, done.stderr
    done = person("install", "--scripts", "--yes", "--", "npx", "demo", timeout=120)
    assert done.returncode == 0, done.stderr
    store = home / ".local/share/runner/store"
    [made] = store.glob("sets/*/tree/node_modules/demo/demo.txt")
    assert made.read_text() == "x\n" and not (home / "escaped").exists()
    assert "PATH=" in (made.parent / "seen.txt").read_text()
    tree = made.parents[2]
    assert "forged" in (tree / "package-lock.json").read_text()  # control
    assert "forged" not in (tree.parent / "lock.json").read_text()  # which names the set
    assert_no_secret(person, done.stdout, done.stderr)
    done = person("install", "--scripts", "--yes", "--", "npx", "demo", timeout=120)
    assert "installed already" in done.stdout
    done = person("install", "--update", "--yes", timeout=120)
    assert done.returncode == 0 and "add --scripts to update it" in done.stdout
    done = person("install", "--scripts", "--yes", "--", "npx", "linker", timeout=120)
    assert done.returncode == 1 and "link out of its folder" in done.stderr
    assert len(installed(person)) == 1


def test_limits_of_a_fetch(person: Caller, internet: Internet, nothing_left: None) -> None:  # noqa: F811
    # npm itself refuses what becomes a thousand times larger.
    piece = os.urandom(2000) + bytes(1 << 18)
    publish_npm(internet.registry, "bomb", {"1.0.0": {**GOOD["1.0.0"], "zeros": piece * 400}})
    done = person("install", "--disk", "30M", "--yes", "--", "npx", "bomb", timeout=120)
    assert done.returncode == 1 and "raise the disk limit with --disk" in done.stderr, done.stderr
    (internet.registry / "hangs").write_bytes(b"")
    done = person("install", "--deadline", "5s", "--yes", "--", "npx", "hangs", timeout=120)
    assert done.returncode == 1 and "deadline" in done.stderr, done.stderr
    assert installed(person) == [] and fetch_folders(person) == []


def test_a_node_that_only_a_home_has(person: Caller, internet: Internet) -> None:  # noqa: F811
    """As nvm installs it: npm is where node is, and no cage is shown it unasked."""
    prefix = person.home / ".nvm/versions/node/v99.0.0"
    npm = Path(os.path.realpath("/usr/bin/npm"))
    for folder in ("bin", "lib/node_modules"):
        (prefix / folder).mkdir(parents=True)
    shutil.copy("/usr/bin/node", prefix / "bin/node")
    (prefix / "lib/node_modules/npm").symlink_to(npm.parents[1])
    (prefix / "bin/npm").symlink_to("../lib/node_modules/npm/bin/npm-cli.js")
    publish_npm(internet.registry, "demo", GOOD, {"engines": {"node": ">=999"}})
    file = configure(person, {"demo": "npx demo"})
    person.give(person.home)
    nothing = person.home / "nothing"
    nothing.touch(0o644)
    hide = f'mount --bind {nothing} /usr/bin/node && exec "$@"'
    at = person.prefix.index("/usr/bin/setpriv")
    alone = ("/usr/bin/unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", hide, "sh")
    caller = replace(person, prefix=(*person.prefix[:at], *alone, *person.prefix[at:]))
    refused = caller("install", file, "--yes", timeout=120)
    assert refused.returncode == 1 and installed(person) == []  # control
    found = replace(caller, environ={**caller.environ, "PATH": f"{prefix}/bin:{caller.environ['PATH']}"})
    done = found("install", file, "--yes", timeout=120)
    assert done.returncode == 0, done.stderr
    told = f"({prefix}/bin/node): it may not start; put a newer node first on the PATH"
    assert "WARNING: demo 1.0.0 is for node >=999, and this is node " in done.stdout and told in done.stdout
    assert said(found, file, "demo").startswith("1.0.0")


def test_a_killed_installation_leaves_nothing(person: Caller, internet: Internet, nothing_left: None) -> None:  # noqa: F811
    (internet.registry / "demo").write_bytes(b"")
    with person.start("install", "--yes", "--", "npx", "demo") as killed:
        assert wait_for(lambda: "GET /demo" in internet.requests() or killed.poll() is not None, step=0.1)
        assert killed.poll() is None
        killed.send_signal(signal.SIGKILL)
    assert installed(person) == [] and len(fetch_folders(person)) == 1
    assert_no_secret(person)
    publish_npm(internet.registry, "demo", GOOD)
    assert person("install", "--yes", "--", "npx", "demo", timeout=120).returncode == 0
    assert len(installed(person)) == 1 and fetch_folders(person) == []


@pytest.fixture
def root_person(internet: Internet, runner_as_root: Caller, plugin_dir: Path) -> Iterator[Caller]:  # noqa: F811
    """Root, with an empty store in its usual place."""
    with empty_root_store(customer(internet, runner_as_root), plugin_dir) as caller:
        yield caller


def test_root_has_a_store_of_its_own(root_person: Caller, internet: Internet) -> None:  # noqa: F811
    publish_wheel_server(internet.registry)
    file = configure(root_person, {"python": "uvx demo-wheel x"})
    done = root_person("install", file, "--yes", timeout=120)
    assert done.returncode == 0, done.stderr
    [row] = installed(root_person)
    assert row["store"] == str(ROOT_STORE)
    assert said(root_person, file, "python") == "wheel x"
    assert root_person("install", "--verify").returncode == 0
    written = root_person("run", "--write", str(ROOT_STORE), "--", "true")
    assert written.returncode != 0


def test_what_is_wrong_with_the_command(person: Caller) -> None:
    for words, text in (
        ((), "name a configuration"),
        (("--", "ls"), "no launcher"),
        (("--list", "--verify"), "exclude each other"),
        (("--deadline", "soon", "--", "npx", "demo"), "--deadline: 'soon' is not a duration"),
        (("--disk", "5", "--", "npx", "demo"), "did you mean 5M?"),
        (("--remove", "nothing"), "not installed"),
        (("--", "npx"), "this command cannot be installed: it names no program"),
        (("--", "npx", "./here"), "this command cannot be installed: it asks for './here'"),
    ):
        done = person("install", *words)
        assert done.returncode == 2 and text in done.stderr, done.stderr
    for path, text in ((person.home / "none.json", "No such file"), (person.home, "it is a folder")):
        done = person("install", path)
        assert done.returncode == 20 and text in done.stderr, done.stderr
    shutil.rmtree(person.home / ".local", ignore_errors=True)
    assert "Nothing is installed" in person("install", "--list").stdout
