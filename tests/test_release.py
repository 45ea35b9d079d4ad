"""What a release consists of besides the wheel: lock, SBOM, audit, notes, checksums, signature, man pages."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NoReturn

import pytest

import runner
from runner.cli import all_verbs
from runner.cli.signing.package import ACTIONS
from scripts.releasing import release
from scripts.releasing.audit import audit, vulnerabilities
from scripts.releasing.deb import SUITES, without_delegate_subgroup
from scripts.releasing.distributions import NotReleasable
from scripts.releasing.lock import LockError, Pin, read_lock
from scripts.releasing.manual import actions_of, man_page, output_of
from scripts.releasing.sbom import sbom
from tests.conftest import ROOT

HASH = "0" * 64


@pytest.mark.parametrize(
    "entry",
    [
        "trio==0.35.0\n",
        f"trio>=0.35.0 \\\n    --hash=sha256:{HASH}\n",
        f"trio==0.35.0 \\\n    --hash=sha256:{HASH[1:]}\n",
        f"trio==0.35.0 \\\n    --hash=md5:{HASH[:32]}\n",
        "--index-url https://elsewhere.example.com\n",
        f"trio @ https://elsewhere.example.com/trio.whl \\\n    --hash=sha256:{HASH}\n",
    ],
)
def test_a_lock_has_nothing_but_versions_with_hashes(tmp_path: Path, entry: str) -> None:
    good = Pin("attrs", "26.1.0", (HASH, "1" * 64))
    (tmp_path / "lock").write_text(f"# a comment\n{good.as_text()}\n    # via trio\n")
    assert read_lock(tmp_path / "lock") == (good,)
    (tmp_path / "lock").write_text(f"{good.as_text()}\n{entry}")
    with pytest.raises(LockError, match=re.escape(entry.split()[0])):
        read_lock(tmp_path / "lock")


def test_the_sbom_lists_what_the_lock_has() -> None:
    pins = read_lock()
    document = sbom(pins, 1_700_000_000)
    assert document == sbom(pins, 1_700_000_000)
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.5")
    components = {each["name"]: each for each in document["components"]}
    assert components.keys() == {pin.name for pin in pins} - {"setuptools"}
    refs = {each["bom-ref"] for each in document["components"]} | {
        document["metadata"]["component"]["bom-ref"]
    }
    assert {each["ref"] for each in document["dependencies"]} == refs
    assert all(set(each["dependsOn"]) <= refs for each in document["dependencies"])
    [trio] = (pin for pin in pins if pin.name == "trio")
    [place] = components["trio"]["externalReferences"]
    assert [each["content"] for each in place["hashes"]] == list(trio.hashes)
    # Of a package that is installed in another version, nothing is said.
    other = sbom([Pin("trio", "0.0.1", (HASH,))], 0)["components"]
    assert "licenses" not in other[0]


ANSWERS = {
    "clean/1.0": {"info": {"version": "1.0"}, "vulnerabilities": []},
    "bad/1.0": {
        "info": {"version": "1.0"},
        "vulnerabilities": [
            {"id": "PYSEC-1", "aliases": ["CVE-1"], "fixed_in": ["1.1"], "withdrawn": None, "summary": "bad"}
        ],
    },
    "mistaken/1.0": {
        "info": {"version": "1.0"},
        "vulnerabilities": [{"id": "PYSEC-2", "withdrawn": "2026-01-01T00:00:00Z"}],
    },
    "newest": {"info": {"version": "1.0"}, "vulnerabilities": []},
    # None of these says anything about 1.0.
    "newer": {"info": {"version": "1.1"}, "vulnerabilities": []},
    "mute/1.0": {"info": {"version": "1.0"}},
    "odd/1.0": [],
}


@pytest.fixture
def registry() -> Iterator[str]:
    class Registry(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = ANSWERS.get(self.path.removeprefix("/pypi/").removesuffix("/json"))
            self.send_response(404 if found is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(found).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_the_audit_tells_clean_from_unknown(registry: str, capsys: pytest.CaptureFixture[str]) -> None:
    def pins(*names: str) -> list[Pin]:
        return [Pin(name, "1.0", (HASH,)) for name in names]

    told = pins("clean", "bad", "mistaken", "newest")
    found = {pin.name: vulnerabilities(pin, registry) for pin in told}
    assert found == {
        **{key: [] for key in ("clean", "mistaken", "newest")},
        "bad": ["PYSEC-1, CVE-1: mended in 1.1. bad"],
    }
    silent = ("newer", "mute", "odd", "absent")
    assert {vulnerabilities(pin, registry) is None for pin in pins(*silent)} == {True}
    assert audit(pins("clean", "newest"), registry) == 0
    assert audit(pins("clean", "newer"), registry) == 77
    assert audit(pins("newer", "bad"), registry) == 1
    assert audit([], registry) == 77
    assert audit(pins("clean"), "http://127.0.0.1:1") == 77
    assert "NOT CHECKED" in capsys.readouterr().out


def test_notes_are_those_of_the_version() -> None:
    text = "# Changelog\n\n## [1.2.0] - 2026-11-18\n\n### Added\n\n- A thing.\n\n## [1.1.0]\n\n- Old.\n"
    assert release.notes(text, "1.2.0") == "# runner 1.2.0\n\n### Added\n\n- A thing.\n"
    for wrong in (
        text.replace("[1.2.0]", "[Unreleased]"),
        text.replace("[1.2.0]", "[1.3.0]"),
        "# Changelog\n",
    ):
        with pytest.raises(NotReleasable, match=r"CHANGELOG\.md"):
            release.notes(wrong, "1.2.0")
    with pytest.raises(NotReleasable, match="says nothing"):
        release.notes("## [1.2.0]\n\n## [1.1.0]\n\n- Old.\n", "1.2.0")
    # What the changelog of this checkout would say.
    assert "###" in release.notes((ROOT / "CHANGELOG.md").read_text(), runner.__version__, dry_run=True)


def test_pages_say_this_version() -> None:
    """Where they show what a command prints, or the name of a file."""
    found = {
        (page.name, version)
        for page in [ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]
        for version in re.findall(r"plugin_runner-([0-9.]+)-py3|`runner ([0-9.]+)\+", page.read_text())
    }
    assert {"".join(version) for _, version in found} == {runner.__version__}
    assert {page for page, _ in found} == {"CHANGELOG.md", "library.md", "verbs.md"}


def test_a_release_is_signed_and_each_change_is_noticed(tmp_path: Path) -> None:
    for name in ("key", "other"):
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(tmp_path / name)]
        subprocess.run(argv, check=True)
    signers = tmp_path / "signers"
    signers.write_text(f"{release.IDENTITY} {(tmp_path / 'key.pub').read_text()}")
    folder = tmp_path / "release"
    folder.mkdir()
    (folder / "a.whl").write_bytes(b"wheel")
    (folder / "NOTES.md").write_text("notes")
    sums = release.write_sums(folder)
    release.sign(sums, tmp_path / "key")
    assert release.check(folder, signers) == []
    (folder / "a.whl").write_bytes(b"whee1")
    assert release.check(folder, signers) == ["a.whl is not as it was released"]
    (folder / "a.whl").write_bytes(b"wheel")
    (folder / "b.whl").write_bytes(b"")
    assert release.check(folder, signers) == ["b.whl is not part of the release"]
    (folder / "b.whl").unlink()
    (folder / "NOTES.md").rename(tmp_path / "NOTES.md")
    assert release.check(folder, signers) == ["NOTES.md is missing"]
    # Sums that fit the files but are not signed; then signed by another key; then for another purpose.
    release.write_sums(folder)
    assert "is not signed by a key" in release.check(folder, signers)[0]
    release.sign(sums, tmp_path / "other")
    assert "is not signed by a key" in release.check(folder, signers)[0]
    (folder / "SHA256SUMS.sig").unlink()
    argv = ["ssh-keygen", "-q", "-Y", "sign", "-f", str(tmp_path / "key"), "-n", "git", str(sums)]
    subprocess.run(argv, check=True, capture_output=True)
    assert "is not signed by a key" in release.check(folder, signers)[0]
    with pytest.raises(NotReleasable, match="ssh-keygen did not sign"):
        release.sign(sums, tmp_path / "missing")


def test_a_checkout_with_changes_is_not_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")  # where a person may have commits signed
    assert "this is no git checkout" in release.faults_of_checkout()
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert not any("git" in fault for fault in release.faults_of_checkout())
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    subprocess.run([*git, "tag", f"v{runner.__version__}"], check=True)
    assert any("is tagged already" in fault for fault in release.faults_of_checkout())
    (tmp_path / "new").touch()
    assert any("1 files are not as in the last commit" in fault for fault in release.faults_of_checkout())


def test_release_refuses_what_is_asked_wrongly_before_it_works(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (
        *([], ["--check", "x"], ["--signers", "x", "--dry-run"], ["--check", "x", "--dry-run"]),
        *(["--dry-run", "--key", "x"], ["--key", "x", "--check", "x", "--signers", "x"]),
    ):
        with pytest.raises(SystemExit) as ended:
            release.main(words)
        assert ended.value.code == 2, words

    def work(*_: object) -> NoReturn:
        raise NotReleasable("it works")

    monkeypatch.setattr(release, "audit", work)
    (tmp_path / "file").write_text("no key")
    new = tmp_path / "new"
    for out, more, told in (
        (tmp_path, ["--dry-run"], "exists"),
        (tmp_path / "file/below", ["--dry-run"], "cannot be made: Not a directory"),
        (new, ["--key", str(tmp_path / "file")], "is no key"),
        (new, ["--key", str(tmp_path / "missing")], "is no key"),
        (new, ["--dry-run"], "it works"),  # the control
    ):
        assert release.main(["--out", str(out), *more]) == 1
        assert told in capsys.readouterr().err
        assert not new.exists()  # also after a failure
    assert (tmp_path / "file").exists()


def test_man_pages_have_every_option_of_help() -> None:
    actions = actions_of("package")
    page = man_page("package", output_of("package", "--help"), 0, actions)
    options = set(re.findall(r"^  (--[a-z-]+)", "".join(actions), re.MULTILINE))
    for action in ACTIONS:
        assert f'\n.SH "RUNNER PACKAGE {action.upper()}"\nrunner package {action} [' in page
    assert len(options) > 15
    shown = re.findall(r"^\\fB(?:\\-h, )?(\S+)", page, re.MULTILINE)
    assert options <= {each.replace("\\", "").removesuffix("fR") for each in shown}
    assert re.search(r"^\.TH RUNNER-PACKAGE 1 1970-01-01 ", page)
    # No text becomes a command of roff, and the page does not depend on who made it.
    assert {line.split()[0] for line in page.splitlines() if line[:1] in (".", "'")} <= {
        *(".TH", ".SH", ".SS", ".TP", ".PP", ".nf", ".fi")
    }
    assert "$XDG_RUNTIME_DIR/runner/serve.sock for others" in page
    overview = man_page("", output_of("--help"), 0)
    assert all(f"\\fB{verb}\\fR\n" in overview for verb in all_verbs())
    trap = man_page("exec", "usage: runner exec\n\n.so /etc/passwd\n\n'tricky\\fB\n", 0)
    assert "\\&.so /etc/passwd" in trap and "\\&'tricky\\efB" in trap


def test_scripts_of_the_debian_package_are_sound() -> None:
    folder = ROOT / "scripts/releasing/debian"
    for name in ("postinst", "prerm", "postrm"):
        subprocess.run(["sh", "-n", str(folder / name)], check=True)
    text = "".join((folder / name).read_text() for name in ("postinst", "prerm", "postrm"))
    assert not re.search(r"\b(curl|wget|pip|apt|apt-get)\b", text)
    # The profile names the folder of the package's command, for the systems that have the rule.
    assert "/usr/lib/plugin-runner/bin" in (ROOT / "policies/apparmor/runner").read_text()
    assert [name for name, suite in SUITES.items() if suite.apparmor] == ["trixie", "noble"]


@pytest.mark.parametrize("name", ["runner-serve", "runner-serve-user", "runner-worker"])
def test_units_for_an_older_systemd_enter_the_group_themselves(name: str) -> None:
    text = (ROOT / f"policies/systemd/{name}.service").read_text()
    unit = re.sub(r"(?m)^ExecStart=\S+/runner ", "ExecStart=/usr/bin/runner ", text)
    [before] = re.findall(r"(?m)^ExecStart=(.*)$", unit)
    older = without_delegate_subgroup(unit)
    assert "\nDelegateSubgroup=" in unit and "\nDelegateSubgroup=" not in older
    assert "\nSyslogIdentifier=runner\n" in older
    [(command, words)] = re.findall(r"(?m)^ExecStart=/bin/sh -c '([^']*)' sh (.*)$", older)
    # systemd reads $$ as $, and would put a variable of the unit in the place of ${NAME}.
    command = command.replace("$$", "$")
    assert "${" not in command and words == before
    # The file to write to, and what is started then.
    shown = command.replace('mkdir -p "$group" && echo 0 >', "echo ")
    argv = ["/bin/sh", "-c", shown, "sh", "echo", "started", "a  b"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    group, started = done.stdout.splitlines()
    [own] = re.findall(r"(?m)^0::(.*)$", Path("/proc/self/cgroup").read_text()) or [""]
    assert (group, started) == (f"/sys/fs/cgroup{own}/daemon/cgroup.procs", "started a  b")
