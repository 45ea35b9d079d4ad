"""The project's list of attacks, from inside an image: what is the image's own may be seen and changed."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import Caller
from tests.root_store import empty_root_store
from tests.runner.oci.images import Member, build, busybox_members, layer, link, python_image
from tests.runner.oci.servers import fake_registry

pytestmark = [pytest.mark.launches, pytest.mark.usefixtures("nothing_left")]

# The root is the image's: it sees its own folders, changes them in its layer, and is whoever it says.
OWN = {
    *(f"see-{name}" for name in ("root", "home", "run", "var", "sys", "boot", "opt", "mnt")),
    *("change-root", "change-etc", "change-usr"),
    "process-root",
}


@pytest.mark.both_callers
def test_attacks_from_inside_an_image(runner_as: Caller, plugin_dir: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(fake_registry())
        caller = runner_as
        if caller.uid == 0:
            caller = stack.enter_context(empty_root_store(caller, plugin_dir))
        server.publish_image(python_image())
        reference = f"{server.address}/acme/x:1"
        done = caller("install", "--yes", f"docker://{reference}")
        assert done.returncode == 0, done.stderr
        runner = (*caller.python, "-m", "runner", "run", "--image", reference, "--")
        done = caller("doctor", "--attack", "--format", "json", "--against", *runner, timeout=300)
        found = json.loads(done.stdout)
        rows = {row["id"]: row["verdict"] for row in found["rows"]}
        assert {name for name, verdict in rows.items() if verdict == "not_held"} - OWN == set(), rows
        assert found["count"]["held"] >= 60, found["count"]
        # Nothing of what it changed is in the store: the next one sees it as it was.
        assert caller("install", "--verify").stdout == f"{reference}: as it was fetched\n"


@pytest.mark.needs("busybox")
@pytest.mark.both_callers
def test_links_in_the_places_of_the_cages_own_files(runner_as: Caller, plugin_dir: Path) -> None:
    """bwrap before 0.12 would follow them to files of the host, and overwrite those."""
    victim = plugin_dir / "victim"
    victim.write_text("precious")
    victim.chmod(0o666)
    with ExitStack() as stack:
        server = stack.enter_context(fake_registry())
        caller = runner_as
        if caller.uid == 0:
            caller = stack.enter_context(empty_root_store(caller, plugin_dir))
        hide = (
            "--net",
            "example.com:443",
            "--env",
            "TOKEN=s3cret-S3cret-5ecret",
            "--hide",
            "TOKEN@example.com",
        )

        def start(name: str, *above: Member) -> tuple[int, str]:
            server.publish_image(build(layer([*busybox_members(), *above]), Env=["PATH=/bin"]))
            reference = f"{server.address}/acme/{name}:1"
            assert caller("install", "--yes", f"docker://{reference}").returncode == 0
            done = caller("run", "--image", reference, *hide, "--", "cat", "/.authorities.pem")
            return done.returncode, done.stdout + done.stderr

        # As bwrap sees the host while it makes the root, and as everybody else does.
        for name, seen in (("old", f"/oldroot{victim}"), ("new", str(victim))):
            status, told = start(name, link(".authorities.pem", seen))
            assert status == 126 and f"in the image /.authorities.pem is a link to {seen}" in told, told
        assert victim.read_text() == "precious"
        status, told = start("control")
        assert status == 0 and told.startswith("-----BEGIN CERTIFICATE-----"), told
