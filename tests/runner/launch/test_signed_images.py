"""Images under a policy that requires signatures: the policy itself names each by its digest, or a trusted
key signed it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from runner.package.keys import make_key
from tests.conftest import Caller, account_of
from tests.runner.install.test_images import Bench, bench, busybox_image
from tests.runner.launch.test_signed import MANIFEST, Package
from tests.runner.oci.images import BuiltImage
from tests.runner.oci.servers import fake_registry
from tests.tables import check_rows
from tests.template import settled

__all__ = ["bench"]
pytestmark = [pytest.mark.needs("busybox"), pytest.mark.launches, pytest.mark.usefixtures("nothing_left")]


@pytest.mark.both_callers
def test_a_signed_plugin_in_an_image(bench: Bench, write_file: Callable[..., Path]) -> None:
    package = Package(bench.folder, write_file)
    write_file(package.root / "bin/show", '#!/bin/sh\necho "$0 in $OWN"; ls /usr/share\n', 0o755)
    package.sign()
    image = busybox_image()
    tagged = bench.install(image)
    name = tagged.rpartition(":")[0]
    digest = f"{name}@{image.digest}"
    assert bench.caller("install", "--yes", f"docker://{digest}").returncode == 0

    def allow(*references: str) -> None:
        listed = ", ".join(f'"{each}"' for each in references)
        package.policy("required", f'[images]\nallow = [{listed}]\n[approvals]\nimages = ["*"]\n')
        bench.caller.give(package.folder / "required.toml")

    bench.caller.give(package.root)
    bench.caller.give(package.folder / "key.pub")

    def start(reference: str) -> tuple[int, str]:
        done = bench.caller("exec", "--policy", package.required, "--image", reference, package.root)
        return done.returncode, done.stdout + done.stderr

    def is_refused(row: tuple[tuple[str, ...], str], said: str) -> None:
        allow(*row[0])
        status, told = start(row[1])
        assert status == 126 and "requires a signed package" in told and said in told, told

    rows: dict[tuple[tuple[str, ...], str], str] = {
        (("*", tagged), tagged): f"name the image by its digest, {name}@sha256:…",
        # A person's yes, which --image is, does not count, and neither does a pattern.
        ((), digest): f'can add "{digest}" to allow under [images]',
        ((name,), digest): f'can add "{digest}" to allow under [images]',
    }
    check_rows(rows.items(), is_refused)
    allow(digest)
    status, told = start(digest)
    assert status == 0, told
    assert told.splitlines() == [f"{package.root}/bin/show in 1", "own"]
    # Still: what is signed is what runs.
    (package.root / "bin/show").write_text("#!/bin/sh\necho other\n")
    status, told = start(digest)
    assert status == 126 and "not those that were signed" in told
    run = bench.caller("run", "--policy", package.required, "--image", digest, "--", "sh", "-c", "echo x")
    assert run.returncode == 126 and "it has no folder to sign" in run.stderr


def test_programs_of_the_host_stay_out_of_a_signed_launch(
    bench: Bench, write_file: Callable[..., Path]
) -> None:
    """A folder of the host that the cage shows is data: no program is started from it."""
    package = Package(bench.folder, write_file)
    image = busybox_image()
    digest = f"{bench.install(image).rpartition(':')[0]}@{image.digest}"
    assert bench.caller("install", "--yes", f"docker://{digest}").returncode == 0
    write_file(bench.folder / "shown/tool", "#!/bin/sh\necho of the host\n", 0o755)
    tool = f"{bench.folder}/shown/tool"

    def start(signature: str, command: str, *args: str) -> tuple[int, str]:
        process = {"command": command, "args": list(args), "env": []}
        package.manifest(MANIFEST | {"display_name": bench.folder.name, "process": process})
        package.sign()
        read = f'[read]\ndefault = ["{bench.folder}/shown"]\n[images]\nallow = ["{digest}"]'
        policy = package.policy(signature, read)
        for path in (package.root, package.folder / "key.pub", policy, bench.folder / "shown"):
            bench.caller.give(path)
        done = bench.caller("exec", "--policy", policy, "--image", digest, package.root)
        return done.returncode, done.stdout + done.stderr

    for words in ((tool,), ("/bin/sh", tool), ("sh", f"--rcfile={tool}", "-c", "true")):
        status, told = start("required", *words)
        assert status == 126 and f"it may run {tool}, which is neither" in told, (words, told)
    status, told = start("optional", "/bin/sh", tool)
    assert (status, told) == (0, "of the host\n")
    status, told = start("required", "/bin/sh", "-c", "echo of the image")
    assert (status, told) == (0, "of the image\n")


class Signed(NamedTuple):
    """A person whose policy requires signatures, and who has an image."""

    bench: Bench
    package: Package
    image: BuiltImage
    reference: str  # with a tag

    @property
    def name(self) -> str:
        return self.reference.rpartition(":")[0]

    def allow(self, *references: str, more: str = "") -> None:
        """Write the policy again, which allows these images."""
        listed = ", ".join(f'"{each}"' for each in references)
        approvals = '[approvals]\nimages = ["*"]\nread = ["*"]\nenv = ["*"]\n'
        self.package.policy("required", f"[images]\nallow = [{listed}]\n{approvals}{more}")
        self.bench.caller.give(self.package.folder / "required.toml")

    def sign(self, key: str = "key", reference: str = "") -> None:
        words = ("package", "sign", f"docker://{reference or self.reference}", "--key")
        done = self.bench.caller(*words, self.package.folder / key)
        assert done.returncode == 0, done.stdout + done.stderr

    def runner(self, *words: str | Path) -> tuple[int, str]:
        done = self.bench.caller(words[0], "--policy", self.package.required, *words[1:])
        return done.returncode, done.stdout + done.stderr

    def update(self) -> str:
        done = self.bench.caller("install", "--update", "--yes")
        return done.stdout + done.stderr

    def record(self) -> Path:
        """What the store has about the reference."""
        home = (
            self.bench.folder
            if self.bench.caller.uid == 0
            else self.bench.caller.home / ".local/share/runner"
        )
        found = [each for each in (home / "store/requests").iterdir() if self.reference in each.read_text()]
        [path] = found
        return path


@pytest.fixture
def signed(bench: Bench, write_file: Callable[..., Path]) -> Signed:
    return make_signed(bench, write_file)


def make_signed(bench: Bench, write_file: Callable[..., Path]) -> Signed:
    package = Package(bench.folder, write_file)
    write_file(package.root / "bin/show", '#!/bin/sh\necho "in $OWN"\n', 0o755)
    package.sign()
    make_key(str(package.folder / "other"), "mallory")
    for name in ("key", "key.pub", "other", package.root.name):
        bench.caller.give(package.folder / name)
    image = busybox_image(Entrypoint=["/bin/sh", "-c", "echo $OWN $TOKEN; ls /usr/share"], Cmd=[])
    return Signed(bench, package, image, bench.install(image))


@pytest.mark.both_callers
def test_a_signed_image_counts_as_long_as_its_key_is_trusted(signed: Signed) -> None:
    root, trust = signed.package.root, signed.package.folder / "key.pub"
    start = ("exec", "--image", signed.reference, root)
    signed.allow(signed.name)

    def is_refused(said: str) -> None:
        status, told = signed.runner(*start)
        assert status == 126 and "requires a signed package" in told and said in told, told
        status, told = signed.runner("explain", *start[1:])
        assert status != 0 and said in " ".join(told.split()), told

    is_refused("there is no signature of")
    signed.sign("other")
    signed.update()
    is_refused("'mallory', which signed the image, is not trusted")
    signed.sign()
    is_refused("'mallory'")  # what the registry has now is not what is stored
    assert "nothing newer" in signed.update()
    assert signed.runner(*start) == (0, "in 1\n")
    explained = signed.runner("explain", *start[1:])[1]
    assert "by acme at" in explained and signed.image.digest in explained, explained
    report = signed.package.folder / "report.json"
    signed.bench.caller.give(signed.package.folder)
    assert signed.runner(start[0], "--report", report, *start[1:])[0] == 0
    layers = {each["layer"]: each for each in json.loads(report.read_text())["layers"]}
    assert signed.image.digest in layers["image_signature"]["detail"]
    assert layers["signature"]["effective"] == layers["image_signature"]["effective"] == "valid"
    # A person's yes is not the policy's own word.
    signed.allow()
    is_refused("which the policy itself does not allow")
    signed.allow(signed.name)
    # The stored signature is altered, or that of another repository; and then as it was.
    record = signed.record()
    before = record.read_text()
    for old, new in ((': "20', ': "21'), (signed.image.digest, "sha256:" + "0" * 64)):
        document = json.loads(before)
        altered = [each.replace(old, new) for each in document["signatures"]]
        assert altered != document["signatures"]
        record.write_text(json.dumps({**document, "signatures": altered}))
        status, told = signed.runner(*start)
        assert status == 126 and "requires a signed package" in told, told
    record.write_text(before)
    assert signed.runner(*start)[0] == 0
    # The key is removed after the installation.
    line = trust.read_text()
    signed.package.write_file(trust, "# nobody\n")
    status, told = signed.runner(*start)
    assert status == 126 and "is not trusted" in told
    signed.package.write_file(trust, line)
    signed.bench.caller.give(trust)
    assert signed.runner(*start)[0] == 0
    # The image alone is not enough: the plugin needs its own.
    (root / "bin/show").write_text("#!/bin/sh\necho other\n")
    status, told = signed.runner(*start)
    assert status == 126 and "not those that were signed" in told


@pytest.mark.needs("user")
def test_whose_store_an_image_is_trusted_from(
    runner_as_user: Caller, plugin_dir: Path, write_file: Callable[..., Path]
) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(fake_registry())
        caller = stack.enter_context(account_of(runner_as_user))
        signed = make_signed(Bench(caller, server, plugin_dir), write_file)
        start = ("run", "--image", signed.reference)
        signed.allow(signed.name)
        signed.sign()
        signed.update()
        assert signed.runner(*start)[0] == 0
        # The trust file is root's now, and the store the person's own.
        os.chown(signed.package.folder / "key.pub", 0, 0)
        store = caller.home / ".local/share/runner/store"
        tree = store / "sets" / json.loads(signed.record().read_text())["set"] / "tree"
        for place in (None, tree, tree.parent, store / "sets"):
            # A folder that root made can be renamed by whoever has the one above it.
            if place is not None:
                os.chown(place, 0, 0)
            status, told = signed.runner(*start)
            assert status == 126 and f"is stored for uid {caller.uid}, who may not" in told, told
            assert "let root, or the owner of" in told
        os.chown(store, 0, 0)
        assert signed.runner(*start)[0] == 0


def test_a_signature_of_another_image_is_not_taken_from_the_store(signed: Signed) -> None:
    """Both are the publisher's, and signed. Each counts for itself."""
    other = busybox_image(Env=["PATH=/bin", "OWN=2"])
    signed.bench.server.publish_image(other, "2")
    second = f"{signed.name}:2"
    signed.allow(signed.name)
    for reference in (signed.reference, second):
        signed.sign(reference=reference)
    assert signed.bench.caller("install", "--yes", f"docker://{second}").returncode == 0
    signed.update()
    start = ("exec", "--image", signed.reference, signed.package.root)
    assert signed.runner(*start)[0] == 0
    record = signed.record()
    records = {
        json.loads(each.read_text())["request"]["packages"][0]: each for each in record.parent.iterdir()
    }
    mine, theirs = (json.loads(records[each].read_text()) for each in (signed.reference, second))
    record.write_text(json.dumps({**mine, "signatures": theirs["signatures"]}))
    status, told = signed.runner(*start)
    assert status == 126 and "the image is not the one that was signed" in told, told
    # And the set of the other image with the signature of this one.
    record.write_text(json.dumps({**mine, "set": theirs["set"]}))
    status, told = signed.runner(*start)
    assert status == 126 and "the image is not the one that was signed" in told, told
    record.write_text(json.dumps(mine))  # the control
    assert signed.runner(*start)[0] == 0


def test_an_image_that_starts_by_itself(signed: Signed, write_file: Callable[..., Path]) -> None:
    """A signature says what is in the image. What an entry says beside that, nobody signed."""
    bench = signed.bench
    signed.sign()
    signed.update()
    shown = bench.folder / "shown"
    shown.mkdir()
    bench.caller.give(shown)
    manifest = bench.folder / "mcp.json"

    def start(*options: str, args: Sequence[str] = (), **entry: Any) -> tuple[int, str]:
        words = ["run", "-i", "--rm", *options, signed.reference, *args]
        document = {"mcpServers": {"x": {"command": "docker", "args": words, **entry}}}
        manifest.write_text(json.dumps(document))
        bench.caller.give(manifest)
        # Of what the policy gives by itself there is nothing to allow.
        bench.caller("allow", "--policy", signed.package.required, "--yes", manifest)
        return signed.runner("exec", manifest)

    signed.allow()
    status, told = start()
    assert status == 126 and "which the policy itself does not allow" in told, told
    # A digest that is only named is for signed plugins.
    signed.allow(f"{signed.name}@{signed.image.digest}")
    assert start()[0] == 126
    signed.allow(signed.name)
    assert start() == (0, "1\nown\n")
    assert start("--network", "none", "--name", "x", "--read-only") == (0, "1\nown\n")
    rows: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, Any], str]] = {
        "arguments": ((), ("x",), {}, "the arguments behind the image"),
        "entry point": (("--entrypoint", "ls"), (), {}, "--entrypoint"),
        "user": (("--user", "app"), (), {}, "--user"),
        "directory": (("-w", "/usr"), (), {}, "--workdir"),
        "volume": (("-v", f"{shown}:/usr/share:ro"), (), {}, "a volume"),
        "tmpfs": (("--tmpfs", "/usr/share"), (), {}, "--tmpfs"),
        "variable": (("-e", "TOKEN=1"), (), {}, "the variable TOKEN"),
        "variable of the entry": (("-e", "TOKEN"), (), {"env": {"TOKEN": "1"}}, "the variable TOKEN"),
        "folder": ((), (), {"x-sandbox": {"read": [str(shown)]}}, f"the folder {shown}"),
    }

    def is_refused(_: str, row: tuple[tuple[str, ...], tuple[str, ...], dict[str, Any], str]) -> None:
        status, told = start(*row[0], args=row[1], **row[2])
        assert status == 126 and f"it has no folder to sign, and nobody signed {row[3]}" in told, told

    check_rows(rows, is_refused)
    # The control: the policy is all that stands in the way of these.
    done = bench.caller("exec", manifest)
    assert done.returncode == 0, done
    # A variable that the operator admits by its name; and none that chooses code.
    signed.allow(signed.name, more='[env]\nceiling = ["TOKEN", "LD_PRELOAD"]\nsteering = ["LD_PRELOAD"]\n')
    assert start("-e", "TOKEN=word") == (0, "1 word\nown\n")
    status, told = start("-e", "LD_PRELOAD=/x")
    assert status == 126 and "the variable LD_PRELOAD" in told, told
    # The same by the command line of a person.
    assert signed.runner("run", "--image", signed.reference) == (0, "1\nown\n")
    status, told = signed.runner("run", "--image", signed.reference, "--", "-c", "echo x")
    assert status == 126 and "it has no folder to sign" in told
    # An entry's own command in a signed image is the entry's.
    entry = {"command": "sh", "args": ["-c", "echo x"], "x-sandbox": {"image": signed.reference}}
    manifest.write_text(json.dumps({"mcpServers": {"x": entry}}))
    status, told = signed.runner("exec", manifest)
    assert status == 126 and "it has no folder to sign" in told
    signed.package.write_file(signed.package.folder / "key.pub", "# nobody\n")
    status, told = signed.runner("run", "--image", signed.reference)
    assert status == 126 and "is not trusted" in told


@pytest.mark.needs("user")
def test_no_plan_of_a_signed_image_is_stored(
    runner_as_user: Caller, plugin_dir: Path, write_file: Callable[..., Path]
) -> None:
    """A key that is removed counts no more at the next start, however often it started before."""
    with fake_registry() as server:
        bench = Bench(runner_as_user, server, plugin_dir)
        package = Package(plugin_dir, write_file)
        bench.caller.give(package.folder)
        image = busybox_image(Entrypoint=["echo", "x"])
        made = Signed(bench, package, image, bench.install(image))
        made.allow(made.name)
        made.sign()
        made.update()
        caller = settled(bench.caller)
        manifest = plugin_dir / "mcp.json"
        entry = {"command": "docker", "args": ["run", "-i", "--rm", made.reference]}
        manifest.write_text(json.dumps({"mcpServers": {"x": entry}}))
        bench.caller.give(manifest)
        start = ("exec", "--policy", package.required, manifest)
        for _ in range(3):
            done = caller(*start, env={"RUNNER_DEBUG": "1"})
            assert done.returncode == 0 and "stored plan is used" not in done.stderr, done
        write_file(package.folder / "key.pub", "# nobody\n")
        assert caller(*start).returncode == 126
        # The control: without the need of a signature the plan is stored.
        optional = package.policy("optional", f'[images]\nallow = ["{made.name}"]\n')
        start = ("exec", "--policy", optional, manifest)
        bench.caller.give(package.folder)
        caller = settled(bench.caller)
        told = [caller(*start, env={"RUNNER_DEBUG": "1"}).stderr for _ in range(3)]
        assert "a stored plan is used" in told[-1], told


@pytest.mark.needs("user")
def test_install_under_a_policy_that_requires_signatures(
    runner_as_user: Caller, plugin_dir: Path, write_file: Callable[..., Path]
) -> None:
    """By the policy in force, and for the images of a configuration too."""
    with fake_registry() as server:
        bench = Bench(runner_as_user, server, plugin_dir)
        package = Package(plugin_dir, write_file)
        bench.caller.give(package.folder)
        image = busybox_image()
        server.publish_image(image)
        made = Signed(bench, package, image, f"{server.address}/acme/x:1")
        made.allow(made.name)
        environ = {"RUNNER_POLICY": str(package.required)}
        config = bench.folder / "mcp.json"
        config.write_text(
            json.dumps({"mcpServers": {"x": {"command": "sh", "x-sandbox": {"image": made.reference}}}})
        )

        def install(*words: str | Path) -> tuple[int, str]:
            done = bench.caller("install", "--yes", *words, env=environ)
            return done.returncode, done.stdout + done.stderr

        for words in ((f"docker://{made.reference}",), (config,)):
            status, told = install(*words)
            assert status != 0 and "there is no signature of" in told, told
        assert bench.caller("install", "--list").stdout == "Nothing is installed.\n"
        made.allow(f"{made.name}@{image.digest}")
        status, told = install(f"docker://{made.reference}")
        assert status == 0 and "signature: none" in told, told
        made.allow(made.name)
        made.sign()
        status, told = install("--update")
        assert status == 0 and "nothing newer" in told, told
        assert bench.caller("install", "--remove", made.reference).returncode == 0
        status, told = install(config)
        assert status == 0 and "signature: acme, trusted by" in told, told
