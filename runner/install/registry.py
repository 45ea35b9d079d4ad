"""Where packages come from: the registries that the person's own npm or pip configuration names.

`npm config` and `pip config` are asked, so that what counts there counts here. Tokens are read from the files
that npm names, and from ~/.netrc for pip. They go to the client in the fetching cage, on its standard input,
and nowhere else: no message has an address as it is written, because it may have a password.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from runner.protocol.secrets import Secrets
from sandbox.document.diagnostic import printable
from sandbox.files import text_at

_ASK_SECONDS = 60.0
_LONGEST_FILE = 1 << 20
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(\?)?\}")
_SCOPE = re.compile(r"@[A-Za-z0-9._~-]+:registry")
_TOKENS = ("_authtoken", "_auth", "_password")
_ACCOUNT = ("username", "email")
_INDEX_OF_UV = re.compile(r"^\s*(?:\[\[index\]\]|(?:extra-)?index(?:-url)?\s*=|find-links\s*=)", re.MULTILINE)
_CA = "registry-ca.pem"
# The index names these files' host in its answers.
_COMPANIONS = {"pypi.org": ("files.pythonhosted.org:443",)}
_PORTS = {"https": 443, "http": 80}


class RegistryFault(Exception):
    """The configuration cannot be used; the message says why and what to do."""


class Registries(NamedTuple):
    """What a client in a cage needs to reach its registries."""

    hosts: tuple[str, ...]  # "registry.npmjs.org:443"
    folders: tuple[str, ...]  # of this machine, that have packages
    files: tuple[tuple[str, bytes], ...]  # for its home
    secrets: tuple[bytes, ...]  # parts of `files` that are never shown

    @property
    def hidden(self) -> Secrets:
        return Secrets({str(n): secret for n, secret in enumerate(self.secrets)})


def npm_registries(environ: Mapping[str, str]) -> Registries:
    """Raises RegistryFault."""
    told = _asked(("npm", "config", "ls", "-l", "--json"), environ)
    try:
        config = json.loads(told)
    except ValueError:
        raise RegistryFault("npm config ls --json prints something else than JSON") from None
    written = tuple(_npmrc(config, environ))
    # npm does not show an address with a password.
    config = {**dict(written), **_by_variables(environ), **config}
    wanted = {"registry": str(config.get("registry", "https://registry.npmjs.org/"))}
    wanted |= {name: str(value) for name, value in config.items() if _SCOPE.fullmatch(name)}
    lines = [f"{name}={value}" for name, value in wanted.items()]
    secrets: list[bytes] = []
    hosts = dict.fromkeys(_host(url, f"npm's {name}") for name, url in wanted.items())
    names = {host.rpartition(":")[0] for host in hosts}
    for name, value in written:
        kind = name.rpartition(":")[2].lower()
        if name.startswith("//") and kind in (*_TOKENS, *_ACCOUNT) and _name_of(name) in names:
            lines.append(f"{name}={value}")
            secrets += [value.encode()] if kind in _TOKENS else []
    proxy = _proxy(config.get("https-proxy") or config.get("proxy"), environ)
    without = config.get("noproxy") or environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    without = ",".join(map(str, without)) if isinstance(without, list) else str(without)
    lines += [f"{key}={proxy}" for key in ("https-proxy", "proxy") if proxy]
    lines += [f"noproxy={without}"] if proxy and without else []
    files = _authority(config.get("cafile") or environ.get("NODE_EXTRA_CA_CERTS"))
    if files:
        lines.append(f"cafile=${{HOME}}/{_CA}")
    files[".npmrc"] = "".join(f"{line}\n" for line in lines).encode()
    secrets += _passwords((*wanted.values(), proxy))
    return _registries(_reached(hosts, proxy, without), (), files, secrets)


def pip_registries(python: str, environ: Mapping[str, str]) -> Registries:
    """Raises RegistryFault."""
    config: dict[str, str] = {}
    for line in _asked((python, "-I", "-m", "pip", "config", "list"), environ).splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in ("global", "install", ":env:"):
            try:
                config[key] = str(ast.literal_eval(value))
            except (ValueError, SyntaxError):
                continue
    of_uv = environ.get("UV_DEFAULT_INDEX") or environ.get("UV_INDEX_URL")
    _require_no_other_index(environ, is_named=bool(of_uv or config.get("index-url")))
    index = of_uv or config.get("index-url") or "https://pypi.org/simple"
    extra = config.get("extra-index-url", "").split()
    links = config.get("find-links", "").split()
    # uv writes NAME=ADDRESS.
    urls = [
        each.partition("=")[2] if re.match(r"[A-Za-z0-9_-]+=", each) else each for each in (index, *extra)
    ]
    local = [_folder(each) for each in (*urls, *links) if _folder(each)]
    remote = [each for each in (*urls, *links) if not _folder(each)]
    hosts = dict.fromkeys(_host(each, "pip's index-url, extra-index-url or find-links") for each in remote)
    for host in tuple(hosts):
        hosts |= dict.fromkeys(_COMPANIONS.get(host.rpartition(":")[0], ()))
    proxy = _proxy(config.get("proxy"), environ)
    without = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    if not any(_is_proxied(host, without) for host in hosts):
        proxy = ""  # pip uses it for all hosts or for none
    trusted = " ".join(config.get("trusted-host", "").split())
    files = _authority(
        config.get("cert") or environ.get("REQUESTS_CA_BUNDLE") or environ.get("SSL_CERT_FILE")
    )
    lines = ["[global]", f"index-url = {urls[0]}", "disable-pip-version-check = true", "no-input = true"]
    lines += ["extra-index-url =", *(f"    {each}" for each in urls[1:])] if urls[1:] else []
    lines += ["find-links =", *(f"    {each}" for each in links)] if links else []
    lines += [f"{key} = {value}" for key, value in (("proxy", proxy), ("trusted-host", trusted)) if value]
    files["pip.conf"] = "".join(f"{line}\n" for line in lines).encode()
    secrets = _passwords((*remote, proxy))
    netrc, passwords = _netrc({host.rpartition(":")[0] for host in hosts}, environ)
    if netrc:
        files[".netrc"] = netrc
    return _registries(_reached(hosts, proxy, ""), local, files, [*secrets, *passwords])


def _require_no_other_index(environ: Mapping[str, str], *, is_named: bool) -> None:
    """uv takes a package from the first index that has it, pip the newest version of all indexes: with pip, a
    stranger's package of the same name could take the place of a private one. Raises RegistryFault.

    `is_named`: the person's variables or pip's configuration name the main index.
    """
    mend = "name one index that has all packages, in UV_DEFAULT_INDEX or as pip's index-url"
    for name in ("UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS"):
        if environ.get(name):
            raise RegistryFault(
                f"{name} names a second place of packages, whose order pip does not keep: {mend}"
            )
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME") or "/", ".config")
    for path in (environ.get("UV_CONFIG_FILE") or os.path.join(home, "uv/uv.toml"), "/etc/uv/uv.toml"):
        if not is_named and _INDEX_OF_UV.search(text_at(path, _LONGEST_FILE)):
            raise RegistryFault(f"{printable(path)} names an index, and pip does not read this file: {mend}")


def _registries(
    hosts: Iterable[str], folders: Iterable[str], files: Mapping[str, bytes], secrets: Iterable[bytes]
) -> Registries:
    return Registries(
        tuple(hosts), tuple(dict.fromkeys(folders)), tuple(files.items()), tuple(filter(None, secrets))
    )


def _reached(hosts: Iterable[str], proxy: str, without: str) -> dict[str, None]:
    """The hosts that the cage reaches: the registries, or the proxy in their place."""
    if not proxy:
        return dict.fromkeys(hosts)
    through = _host(proxy, "the proxy")
    return dict.fromkeys(through if _is_proxied(host, without) else host for host in hosts)


def _is_proxied(host: str, without: str) -> bool:
    """`without`: names that are reached directly, as in NO_PROXY."""
    name = "." + host.rpartition(":")[0]
    ends = (each.partition(":")[0].lstrip("*.") for each in without.replace(",", " ").split())
    return "*" not in without.replace(",", " ").split() and not any(
        name.endswith("." + end) for end in ends if end
    )


def _asked(argv: tuple[str, ...], environ: Mapping[str, str]) -> str:
    """What a client says of its configuration. It is asked in a folder that no project can be in."""
    try:
        done = subprocess.run(
            argv,
            cwd="/",
            env=dict(environ),
            capture_output=True,
            timeout=_ASK_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise RegistryFault(f"{argv[0]} is not installed, and it fetches the packages") from None
    except subprocess.TimeoutExpired:
        message = f"{' '.join(argv[:3])} did not answer within {_ASK_SECONDS:.0f} seconds; try it by hand"
        raise RegistryFault(message) from None
    except OSError as error:
        raise RegistryFault(f"{' '.join(argv[:3])} cannot be asked: {error}") from None
    if done.returncode:
        said = printable(done.stderr.decode(errors="replace").strip().rpartition("\n")[2])
        if "No module named pip" in said:
            said = "it has no pip, which fetches the packages (apt-get install python3-pip)"
        raise RegistryFault(f"{' '.join(argv)} fails: {said[:300]}")
    return done.stdout.decode(errors="replace")


def _npmrc(config: Mapping[str, object], environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The lines of npm's own files; those of the user count after those of all."""
    for name in ("globalconfig", "userconfig"):
        for line in text_at(str(config.get(name) or "/"), _LONGEST_FILE).splitlines():
            key, equals, value = line.strip().partition("=")
            if equals and not key.startswith(("#", ";")):
                value = value.strip().strip("\"'")
                yield key.strip(), _VARIABLE.sub(lambda found: environ.get(found[1], ""), value)


def _by_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """npm's settings that variables such as NPM_CONFIG_HTTPS_PROXY name."""
    begin = "npm_config_"
    return {
        name.lower().removeprefix(begin).replace("_", "-"): value
        for name, value in environ.items()
        if name.lower().startswith(begin)
    }


def _host(url: str, setting: str) -> str:
    """Raises RegistryFault."""
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS.get(parts.scheme, 443)
    except ValueError:
        parts, port = urlsplit(""), 0
    if not parts.hostname or parts.scheme not in _PORTS:
        raise RegistryFault(f"{setting} is not the address of a server: it begins with http:// or https://")
    return f"{parts.hostname}:{port}"


def _name_of(key: str) -> str:
    """The host of a key such as //registry.example.com/path/:_authToken"""
    try:
        return urlsplit(key.rpartition(":")[0]).hostname or ""
    except ValueError:
        return ""


def _netrc(names: set[str], environ: Mapping[str, str]) -> tuple[bytes, list[bytes]]:
    """The entries of ~/.netrc that are for these hosts, and their passwords."""
    from netrc import NetrcParseError, netrc

    path = environ.get("NETRC") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".netrc")
    try:
        known = netrc(path).hosts
    except (OSError, NetrcParseError, ValueError):
        return b"", []
    lines: list[str] = []
    passwords: list[bytes] = []
    for name in sorted(names & known.keys()):
        login, _, password = known[name]
        if not any(c in f"{login}{password}" for c in " \t\r\n\"'#\\"):
            lines.append(f"machine {name} login {login} password {password}\n")
            passwords.append((password or "").encode())
    return "".join(lines).encode(), passwords


def _folder(url: str) -> str:
    """The path of a registry on this machine, or ''."""
    if url.startswith("file:"):
        return unquote(urlsplit(url).path)
    return url if url.startswith("/") else ""


def _proxy(configured: object, environ: Mapping[str, str]) -> str:
    names = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
    found = str(configured or "") or next((environ[name] for name in names if environ.get(name)), "")
    return found if "://" in found or not found else f"http://{found}"


def _authority(path: object) -> dict[str, bytes]:
    """A file of certificates for the cage's home."""
    if not path:
        return {}
    text = text_at(str(path), _LONGEST_FILE)
    if not text:
        raise RegistryFault(f"the file of certificates {printable(str(path))} is missing or cannot be read")
    return {_CA: text.encode()}


def _passwords(urls: tuple[str, ...]) -> list[bytes]:
    found = []
    for url in urls:
        parts = urlsplit(url)
        # A token may be the name alone: https://TOKEN@host/
        found += [parts.password or parts.username or ""]
    return [text.encode() for password in found if password for text in (password, unquote(password))]
