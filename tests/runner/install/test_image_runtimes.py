"""Servers of npx and uvx in an image: packages of the store, and the image's interpreter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Caller
from tests.internet import Internet, internet, world
from tests.runner.install.packages import node_server, publish_npm
from tests.runner.install.test_install import customer, publish_wheel_server
from tests.runner.oci.images import Member, build, debian_members, layer, python_image
from tests.runner.oci.servers import fake_registry

__all__ = ["internet", "world"]
pytestmark = [
    *(pytest.mark.needs("node", "root"), pytest.mark.bound(300), pytest.mark.launches),
    pytest.mark.usefixtures("nothing_left"),
]


def test_packages_of_the_store_in_images(internet: Internet, runner_as_user: Caller) -> None:
    person = customer(internet, runner_as_user)
    publish_npm(internet.registry, "@demo/server", {"1.0.0": node_server("1.0.0")})
    publish_wheel_server(internet.registry)
    mark = Member("etc/of-the-image", b"1")
    node = [*debian_members("base-files", "dash", libraries_of=("/usr/bin/node",))]
    node.append(Member("usr/bin/node", Path("/usr/bin/node").read_bytes(), mode=0o755))
    with fake_registry() as server:
        name = f"{server.address}/acme/x"
        server.publish_image(build(layer([*node, mark], packing="plain")), "node")
        server.publish_image(python_image(Env=["PYTHONPATH=/etc"]), "python")
        for tag in ("node", "python"):
            done = runner_as_user("install", "--yes", f"docker://{name}:{tag}")
            assert done.returncode == 0, done.stderr
    file = person.home / "mcp.json"
    lines = {
        "node": (["npx", "-y", "@demo/server", "a"], "node"),
        "python": (["uvx", "demo-wheel", "b"], "python"),
        "keeps": (["npx", "-y", "@demo/server", "c"], "node"),
        # Its own Python is another, or none: what was fetched for one version fits no other.
        "wrong": (["uvx", "demo-wheel", "b"], "node"),
    }
    entries: dict[str, dict[str, Any]] = {
        key: {"command": words[0], "args": words[1:], "x-sandbox": {"image": f"{name}:{tag}"}}
        for key, (words, tag) in lines.items()
    }
    entries["keeps"]["x-sandbox"] = {"image": f"{name}:node", "write": ["${state_dir}"]}
    file.write_text(json.dumps({"mcpServers": entries}))
    person.give(file)

    def call(key: str) -> tuple[int, str]:
        done = person("call", file, "--server", key, "who")
        if done.returncode:
            return done.returncode, done.stderr
        return 0, str(json.loads(done.stdout)["content"][0]["text"])

    status, told = call("node")
    assert status != 0 and "runner install -- npx -y @demo/server" in told, told
    # Its packages and its image: the images are there already, and each is named once.
    fetched = person("install", "--yes", file, "--server", "node", "--server", "python", timeout=280)
    assert fetched.returncode == 0, fetched.stdout + fetched.stderr
    assert fetched.stdout.count("is installed already") == 2 and fetched.stdout.count("installed demo") == 1
    refused = person("allow", file, "--server", "wrong", "--yes").stderr
    assert "has no program python3." in refused and "name an image that has that" in refused
    for key in ("node", "keeps", "python"):
        assert person("allow", file, "--server", key, "--yes").returncode == 0
    assert call("node") == (0, "1.0.0 a")
    assert call("keeps") == (0, "1.0.0 c") and call("keeps") == (0, "1.0.0 c again")
    assert call("python") == (0, "wheel b")
    # A yes is for these packages in this image.
    publish_npm(internet.registry, "@demo/server", {"2.0.0": node_server("2.0.0")})
    # The images cannot be asked for: their registry is on this machine, and not on that internet.
    assert "@demo/server: 1.0.0 -> 2.0.0" in person("install", "--update", "--yes", timeout=280).stdout
    status, told = call("node")
    assert status != 0 and "image_ceiling" in told and "to allow it: runner allow" in told, told
    assert person("allow", file, "--server", "node", "--yes").returncode == 0
    assert call("node") == (0, "2.0.0 a")
