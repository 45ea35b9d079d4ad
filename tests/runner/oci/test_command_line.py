"""Packages of registries on the command line: oci:// in place of a manifest, install, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from runner.cli import main
from runner.contracts.registry import example_folder
from runner.extras import install_command
from runner.outcome import EXEC_REFUSED, EXIT, USAGE_ERROR
from runner.package.keys import make_key
from runner.package.listing import SIGNATURE_NAME
from tests.conftest import Caller
from tests.root_store import empty_root_store
from tests.runner.oci.servers import FakeRegistry, fake_registry
from tests.tables import check_rows


class Bench:
    """A user with a plugin, a key, and a policy that requires signatures."""

    def __init__(self, caller: Caller, folder: Path) -> None:
        self.caller, self.plugin = caller, folder / "plugin"
        shutil.copytree(example_folder("vai"), self.plugin)
        make_key(str(folder / "key"), "acme")
        self.key, self.trust = folder / "key", folder / "key.pub"
        self.strict = folder / "strict.toml"
        self.strict.write_text(f'version = 1\n[packages]\nsignature = "required"\ntrust = "{self.trust}"\n')
        for path in (self.strict, self.trust):
            path.chmod(0o644)
        caller.give(folder)

    def __call__(self, *words: str | Path) -> tuple[int, str]:
        done = self.caller(*words)
        return done.returncode, done.stdout + done.stderr

    def set_version(self, old: str, new: str) -> None:
        for path in self.plugin.rglob("*"):
            if path.is_file():
                path.write_text(path.read_text().replace(old, new))

    def publish(self, reference: str, *, signed: bool = True) -> None:
        if signed:
            status, said = self("package", "sign", self.plugin, "--key", self.key)
            assert status == 0, said
        status, said = self("package", "push", self.plugin, reference)
        assert status == 0, said

    @property
    def sets(self) -> list[str]:
        """What is stored."""
        folder = self.caller.home / ".local/share/runner/store/sets"
        return os.listdir(folder) if folder.exists() else []


@pytest.mark.needs("user")
@pytest.mark.launches
@pytest.mark.usefixtures("nothing_left")
def test_a_reference_in_place_of_a_manifest(runner_as_user: Caller, plugin_dir: Path) -> None:
    bench = Bench(runner_as_user, plugin_dir)
    call = ("greet", "--input", '{"name": "world"}')
    strict = ("--policy", str(bench.strict))
    with fake_registry() as server:
        reference = f"oci://{server.address}/acme/x:1"
        bench.publish(reference, signed=False)
        status, said = bench("call", *strict, reference, *call)
        assert status == EXIT["policy_denied"] and "no signature" in said and bench.sets == []
        assert bench("exec", *strict, reference)[0] == EXEC_REFUSED and bench.sets == []
        status, said = bench("exec", f"{reference}-missing")
        assert status == EXEC_REFUSED and "has no acme/x 1-missing" in said and "check the reference" in said
        bench.publish(reference)
        status, said = bench("call", *strict, reference, *call)
        assert status == 0 and "Hello, world!" in said and "is pinned to sha256:" in said
        [first] = bench.sets
        bench.set_version("0.1.0", "0.2.0")
        bench.publish(reference)
        status, said = bench("install", "--update", "--yes")
        assert status == 0 and "0.1.0 -> 0.2.0" in said and "updated" in said
        [second] = bench.sets
        assert second != first
        bench.set_version("0.2.0", "0.1.9")
        bench.publish(reference)
        status, said = bench("install", "--yes", "--update", reference)
        assert status == 1 and "is 0.1.9 now, which is older than 0.2.0" in said and "--downgrade" in said
        assert bench.sets == [second]
    # No registry any more. The pinned version is there, by its tag and by its digest.
    status, said = bench("call", *strict, reference, *call)
    assert status == 0 and "Hello, world!" in said and "pinned" not in said
    lock = json.loads((bench.caller.home / f".local/share/runner/store/sets/{second}/lock.json").read_text())
    [by_digest] = [integrity for name, _, integrity in lock["packages"] if name != SIGNATURE_NAME]
    status, said = bench("check", f"oci://{server.address}/acme/x@{by_digest}")
    assert status == 0, said
    bench.trust.write_text("# nobody\n")
    status, said = bench("call", *strict, reference, *call)
    assert status == EXIT["policy_denied"] and "is not trusted" in said


@pytest.mark.needs("root")
@pytest.mark.launches
@pytest.mark.usefixtures("nothing_left")
def test_root_starts_a_package_from_its_own_store(
    runner_as_root: Caller, plugin_dir: Path, server: FakeRegistry
) -> None:
    """That store is among the runner's own folders, of which a plugin sees nothing but its own package."""
    with empty_root_store(runner_as_root, plugin_dir) as caller:
        bench = Bench(caller, plugin_dir)
        reference = f"oci://{server.address}/acme/x:1"
        bench.publish(reference)
        status, said = bench(
            "call", "--policy", bench.strict, reference, "greet", "--input", '{"name": "root"}'
        )
        assert status == 0 and "Hello, root!" in said, said
        status, said = bench("call", reference, "greet", "--input", '{"name": "root"}')
        assert status == 0 and "Hello, root!" in said, said


USAGE = {
    "push without a reference": (
        ("push", "DIR"),
        "required: REF (REF: oci://HOST/NAME:TAG; use runner package push ",
    ),
    "pull without a word about trust": (
        ("pull", "oci://x.example/y:1"),
        "one of the arguments --trust --unsigned is required",
    ),
    "pull with both": (
        ("pull", "oci://x.example/y:1", "--unsigned", "--trust", "x"),
        "not allowed with argument --unsigned",
    ),
    "sign without a key": (("sign", "DIR"), "required: --key (use runner package sign "),
    "an option of a registry": (
        ("lint", "DIR", "--ca", "x"),
        "--ca goes with runner package sign, push, pull, inspect (use runner package lint ",
    ),
    "unsigned": (
        ("verify", "DIR", "--trust", "x", "--unsigned"),
        "--unsigned goes with runner package pull (use runner package verify ",
    ),
    "a second word": (("lint", "DIR", "DIR"), "unrecognized arguments: "),
    "no reference": (("pull", "nothing", "--unsigned"), "does not name a registry"),
    "a digest": (("push", "DIR", "oci://x.example/y@sha256:" + "a" * 64), "name a tag"),
    "a password": (("pull", "oci://ada:s3cret@x.example/y", "--unsigned"), "'oci://…' has a user name"),
    "a deadline": (("inspect", "oci://x.example/y:1", "--deadline", "soon"), "--deadline"),
}


def test_wrong_words_are_told(capsys: pytest.CaptureFixture[str], plugin_dir: Path) -> None:
    shutil.copytree(example_folder("rune"), plugin_dir / "plugin")

    def check(name: str, row: tuple[tuple[str, ...], str]) -> None:
        words = [str(plugin_dir / "plugin") if word == "DIR" else word for word in row[0]]
        try:
            status = main(["package", *words])
        except SystemExit as exited:
            status = int(str(exited.code))
        said = capsys.readouterr()
        assert status == USAGE_ERROR and row[1] in said.out + said.err, said

    check_rows(USAGE, check)


def test_without_the_extra_it_is_told_how_to_install_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, server: FakeRegistry
) -> None:
    for name in [name for name in sys.modules if name.startswith("runner.oci")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.setattr("runner.cli.shared.registry.main_store_root", lambda environ: "/nowhere")
    for words in (["package", "inspect"], ["check"], ["exec"]):
        assert main([*words, str(server.reference())]) != 0
        said = capsys.readouterr()
        assert "httpx is missing" in said.out + said.err, said
        assert f"install it with {install_command('oci')}" in " ".join((said.out + said.err).split())


def test_a_pull_writes_all_of_it_or_nothing(
    server: FakeRegistry, capsys: pytest.CaptureFixture[str], plugin_dir: Path
) -> None:
    shutil.copytree(example_folder("rune"), plugin_dir / "plugin")
    make_key(str(plugin_dir / "key"), "acme")

    def package(*words: str | Path) -> tuple[int, str]:
        status = main(["package", *map(str, words)])
        said = capsys.readouterr()
        return status, said.out + said.err

    reference = str(server.reference())
    assert package("push", plugin_dir / "plugin", reference)[0] == 0
    target, trust = plugin_dir / "copy", plugin_dir / "key.pub"
    status, said = package("pull", reference, target, "--trust", trust)
    assert status == EXIT["policy_denied"] and "no signature" in said
    before = sorted(os.listdir(plugin_dir))
    assert "copy" not in before
    status, said = package("pull", reference, target, "--unsigned", "--format", "json")
    assert status == 0 and json.loads(said)["signature"] == "absent"
    for path in (plugin_dir / "plugin").rglob("*"):
        copy = target / path.relative_to(plugin_dir / "plugin")
        assert (copy.read_bytes(), copy.stat().st_mode & 0o111) == (
            path.read_bytes(),
            path.stat().st_mode & 0o111,
        )
    assert package("pull", reference, target, "--unsigned")[0] == 1  # nothing is overwritten
    assert package("sign", plugin_dir / "plugin", "--key", plugin_dir / "key")[0] == 0
    (plugin_dir / "plugin/new").write_text("x")
    status, said = package("push", plugin_dir / "plugin", reference)
    assert status == EXIT["policy_denied"] and "changed after it was signed" in said
    (plugin_dir / "plugin/new").unlink()
    assert package("push", plugin_dir / "plugin", reference)[0] == 0
    assert package("pull", reference, plugin_dir / "signed", "--trust", trust)[0] == 0
    assert package("verify", plugin_dir / "signed", "--trust", trust)[0] == 0
    status, said = package("inspect", reference)
    assert status == 0 and "acme" in said and "not checked: add --trust FILE" in said
    assert sorted(os.listdir(plugin_dir)) == sorted([*before, "copy", "signed"])


def test_a_configuration_does_not_push_what_is_beside_it(
    server: FakeRegistry, capsys: pytest.CaptureFixture[str], plugin_dir: Path
) -> None:
    """Nor does the path of a manifest keep its folder from being looked at."""
    home, reference = plugin_dir / "home", str(server.reference())
    shutil.copytree(example_folder("mcp"), home)
    (home / "diary").write_text("private")
    [config] = home.glob("*.json")
    assert main(["package", "push", str(config), reference]) == EXIT["manifest_invalid"]
    assert "nothing was pushed" in capsys.readouterr().out and server.seen == []
    shutil.copytree(example_folder("rune"), plugin_dir / "plugin")
    make_key(str(plugin_dir / "plugin/key"), "acme")
    manifest = plugin_dir / "plugin/rterm-plugin.json"
    assert main(["package", "push", str(manifest), reference]) == EXIT["ok"]
    assert "package_secret" in capsys.readouterr().out
    assert main(["package", "push", str(home), reference]) == EXIT["ok"]  # the control: the folder was named


def test_an_option_that_exec_does_not_have_is_named_with_the_verb_that_has_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("runner.cli.shared.registry.main_store_root", lambda environ: str(tmp_path / "store"))
    reference = "oci://127.0.0.1:1/x:1"
    assert main(["exec", reference]) == EXEC_REFUSED
    said = capsys.readouterr().err.replace("\n    ", " ")
    assert "--ca FILE; that is an option of runner install oci://127.0.0.1:1/x:1" in said
