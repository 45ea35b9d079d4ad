"""What a person's npm and pip configuration says about registries, as the clients themselves read it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from runner.install.registry import RegistryFault, npm_registries, pip_registries
from tests.conftest import SYSTEM_PATH

PYTHON = os.path.realpath(shutil.which("python3", path="/usr/bin:/usr/local/bin") or "python3")


def environ(home: Path, **more: str) -> Mapping[str, str]:
    return {"PATH": SYSTEM_PATH, "HOME": str(home), "LANG": "C.UTF-8", **more}


@pytest.mark.needs("node")
def test_npm(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("a certificate")
    (tmp_path / ".npmrc").write_text(
        "registry=https://npm.example.com/all/\n"
        "@mine:registry=https://mine.example.com:8443/\n"
        "//npm.example.com/all/:_authToken=${TOKEN}\n"
        "//mine.example.com:8443/:_password=cGFzc3dvcmQ=\n"
        "//mine.example.com:8443/:username=ada\n"
        "//elsewhere.example.com/:_authToken=not-for-these\n"
        "https-proxy=http://ada:pr0xy-pass@proxy.example.com:3128\n"
        "noproxy=mine.example.com\n"
        f"cafile={tmp_path}/ca.pem\n"
    )
    found = npm_registries(environ(tmp_path, TOKEN="t0ken-of-npm"))
    # What is not reached through the proxy is reached by itself.
    assert found.hosts == ("proxy.example.com:3128", "mine.example.com:8443")
    files = dict(found.files)
    lines = files[".npmrc"].decode().splitlines()
    assert "//npm.example.com/all/:_authToken=t0ken-of-npm" in lines
    assert "@mine:registry=https://mine.example.com:8443/" in lines and "noproxy=mine.example.com" in lines
    assert not any("not-for-these" in line for line in lines)
    assert [content for name, content in files.items() if name != ".npmrc"] == [b"a certificate"]
    assert set(found.secrets) == {b"t0ken-of-npm", b"cGFzc3dvcmQ=", b"pr0xy-pass"}
    assert b"t0ken" not in found.hidden.hide_in_bytes(b"npm says t0ken-of-npm")


@pytest.mark.needs("node")
def test_an_address_that_cannot_be_used_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / ".npmrc").write_text("@x:registry=ftp://ada:s3cret@npm.example.com/\n")
    with pytest.raises(RegistryFault, match="npm's @x:registry is not the address") as fault:
        npm_registries(environ(tmp_path))
    assert "s3cret" not in str(fault.value)


def test_pip(tmp_path: Path) -> None:
    (tmp_path / ".config/pip").mkdir(parents=True)
    (tmp_path / ".config/pip/pip.conf").write_text(
        "[global]\nindex-url = https://ada:t0ken%2Fof-pip@pip.example.com/simple\n"
        "extra-index-url = https://more.example.com/simple\n    file:///opt/mirror/simple\n"
        "find-links = /opt/wheels\ncert =\n"
    )
    (tmp_path / ".netrc").write_text(
        "machine more.example.com login ada password netrc-pass\nmachine x.example.com login a password b\n"
    )
    (tmp_path / ".netrc").chmod(0o600)
    found = pip_registries(PYTHON, environ(tmp_path, NO_PROXY="*", HTTPS_PROXY="http://proxy.example.com"))
    assert found.hosts == ("pip.example.com:443", "more.example.com:443")
    assert found.folders == ("/opt/mirror/simple", "/opt/wheels")
    files = dict(found.files)
    assert files[".netrc"] == b"machine more.example.com login ada password netrc-pass\n"
    assert b"proxy" not in files["pip.conf"]
    assert set(found.secrets) == {b"t0ken%2Fof-pip", b"t0ken/of-pip", b"netrc-pass"}
    (tmp_path / ".config/pip/pip.conf").write_text("[global]\nindex-url = https://pypi.org/simple\n")
    found = pip_registries(PYTHON, environ(tmp_path, PIP_CONFIG_FILE=str(tmp_path / ".config/pip/pip.conf")))
    assert found.hosts[:2] == ("pypi.org:443", "files.pythonhosted.org:443")


def test_a_second_index_of_uv_is_refused(tmp_path: Path) -> None:
    """uv would ask it first. pip takes the newest version of all, which may be a stranger's."""
    for name in ("UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS"):
        with pytest.raises(RegistryFault, match=name):
            pip_registries(PYTHON, environ(tmp_path, **{name: "https://pip.example.com/simple"}))
    (tmp_path / ".config/uv").mkdir(parents=True)
    (tmp_path / ".config/uv/uv.toml").write_text('[[index]]\nurl = "https://pip.example.com/simple"\n')
    with pytest.raises(RegistryFault, match=r"uv\.toml names an index"):
        pip_registries(PYTHON, environ(tmp_path, PIP_CONFIG_FILE="/dev/null"))
    # Control: one index that the person names.
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        found = pip_registries(PYTHON, environ(tmp_path, **{name: "https://pip.example.com/simple"}))
        assert found.hosts[0] == "pip.example.com:443"
