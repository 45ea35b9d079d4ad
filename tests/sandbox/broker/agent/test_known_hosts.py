from __future__ import annotations

import base64
import shutil
import subprocess
from pathlib import Path

import pytest

from sandbox.broker.agent.known_hosts import MOST_BYTES, KnownHosts
from tests.conftest import SYSTEM_PATH
from tests.sandbox.broker.agent.keys import ed25519_key, rsa_key
from tests.tables import one_case

KEY, OTHER, WEAK = ed25519_key().blob, ed25519_key().blob, rsa_key(bits=1024).blob


def words(key: bytes, kind: str = "ssh-ed25519") -> str:
    return f"{kind} {base64.b64encode(key).decode()}"


K, O = words(KEY), words(OTHER)  # noqa: E741 -- short, for the table
HASHED = "|1|F1E1KeoE/eEWhi10WpGv4OdiO6Y=|3988QV0VE8wmZL7suNrYQLITLCg="  # 192.168.1.61, by OpenSSH


def find(text: str, host: str = "git.example.com", port: int = 22) -> tuple[bytes, ...]:
    return KnownHosts([text.encode()]).keys(host, port)


@one_case(
    ("text", "found"),
    [
        (f"git.example.com {K}", (KEY,)),
        (f"git.example.com {K} a comment", (KEY,)),
        (f"  git.example.com\t{K}\r\n", (KEY,)),
        (f"GIT.example.COM {K}", (KEY,)),
        (f"a,git.example.com,192.0.2.1 {K}", (KEY,)),
        (f"git.example.com {K}\ngit.example.com {O}\ngit.example.com {K}\n", (KEY, OTHER)),
        # Patterns.
        (f"*.example.com {K}", (KEY,)),
        (f"git.example.??? {K}", (KEY,)),
        (f"* {K}", (KEY,)),
        (f"example.com {K}", ()),
        (f"git.example.com. {K}", ()),
        (f"xgit.example.com {K}", ()),
        (f"git.example.comx {K}", ()),
        (f"git[.]example.com {K}", ()),
        (f"*.example.com,!git.example.com {K}", ()),
        (f"!git.example.com,*.example.com {K}", ()),
        (f"!other.example.com,*.example.com {K}", (KEY,)),
        (f"!other.example.com {K}", ()),
        # Ports.
        (f"[git.example.com]:22 {K}", ()),
        (f"[git.example.com]:2222 {K}", ()),
        # Markers.
        (f"@revoked git.example.com {K}\ngit.example.com {K}", ()),
        (f"git.example.com {K}\ngit.example.com {O}\n@revoked * {K}", (OTHER,)),
        (f"git.example.com {K}\n@revoked other.example.com {K}", ()),
        (f"@cert-authority git.example.com {K}", ()),
        (f"@unknown git.example.com {K}", ()),
        # What is no line of it.
        (f"# git.example.com {K}", ()),
        (f"#git.example.com {K}", ()),
        ("git.example.com ssh-ed25519", ()),
        ("git.example.com ssh-ed25519 !!!!", ()),
        ("git.example.com ssh-ed25519 AAAA", ()),
        (f"git.example.com {words(KEY, 'ssh-rsa')}", ()),
        (f"git.example.com {words(WEAK, 'ssh-rsa')}", ()),
        (f"git.example.com {words(KEY + bytes(1))}", ()),
        ("\n\n \n", ()),
    ],
)
def test_lines(text: str, found: tuple[bytes, ...]) -> None:
    assert find(text) == found


@one_case(
    ("text", "found"),
    [
        (f"[git.example.com]:2222 {K}", (KEY,)),
        (f"[*.example.com]:2222 {K}", (KEY,)),
        (f"[git.example.com]:* {K}", (KEY,)),
        (f"git.example.com {K}", ()),
        (f"g:2222 {K}", ()),
        (f"* {K}", (KEY,)),
    ],
)
def test_another_port(text: str, found: tuple[bytes, ...]) -> None:
    assert find(text, port=2222) == found


@one_case(
    ("field", "found"),
    [
        (HASHED, (KEY,)),
        (HASHED.replace("|1|", "|2|"), ()),
        (HASHED[:-2], ()),
        (HASHED + "|", ()),
        ("|1||", ()),
        ("|", ()),
    ],
)
def test_hashed_names(field: str, found: tuple[bytes, ...]) -> None:
    assert find(f"{field} {K}", "192.168.1.61") == found
    assert find(f"{field} {K}", "192.168.1.62") == ()


@pytest.mark.skipif(not shutil.which("ssh-keygen", path=SYSTEM_PATH), reason="needs ssh-keygen")
def test_openssh_finds_the_same(tmp_path: Path) -> None:
    hosts = ["git.example.com", "[git.example.com]:2222", "other.example.com", "x.y.example.com"]
    file = tmp_path / "known_hosts"
    plain = f"{hosts[0]},*.y.example.com {K}\n{hosts[1]} {O}\n!{hosts[2]},*.example.com {O}\n"
    file.write_text(plain)
    found = {host: _openssh(file, host) for host in hosts}
    for text in (plain, _hashed(file)):
        known = KnownHosts([text.encode()])
        ours = {host: [base64.b64encode(key).decode() for key in known.keys(*_parts(host))] for host in hosts}
        assert ours == found


def _parts(host: str) -> tuple[str, int]:
    name, _, port = host.lstrip("[").partition("]:")
    return name, int(port or 22)


def _openssh(file: Path, host: str) -> list[str]:
    argv = ["ssh-keygen", "-F", host, "-f", str(file)]
    said = subprocess.run(argv, capture_output=True, text=True, check=False, env={"PATH": SYSTEM_PATH}).stdout
    return list(dict.fromkeys(line.split()[2] for line in said.splitlines() if not line.startswith("#")))


def _hashed(file: Path) -> str:
    argv = ["ssh-keygen", "-H", "-f", str(file)]
    subprocess.run(argv, capture_output=True, check=True, env={"PATH": SYSTEM_PATH})
    text = file.read_text()
    assert "|1|" in text
    return text


def test_a_file_that_is_too_large_is_refused_as_a_whole() -> None:
    text = f"git.example.com {K}\n".encode()
    assert KnownHosts([text.ljust(MOST_BYTES, b"\n")]).keys("git.example.com", 22) == (KEY,)
    with pytest.raises(ValueError, match="4 MiB"):
        KnownHosts([text.ljust(MOST_BYTES + 1, b"\n")])


def test_a_key_that_one_file_revokes_is_revoked_in_all() -> None:
    texts = [f"git.example.com {K}".encode(), f"@revoked * {K}".encode()]
    assert KnownHosts(texts[:1]).keys("git.example.com", 22) == (KEY,)
    assert KnownHosts(texts).keys("git.example.com", 22) == ()


def test_an_authority_is_told_apart_from_nothing() -> None:
    known = KnownHosts([f"@cert-authority *.example.com {K}".encode()])
    assert known.has_authority("git.example.com", 22) and not known.has_authority("example.org", 22)
