"""The settings of a control plane: what is refused, and where; no message has anything of a secret."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import trio

from runner.serve.control.settings import OrgApiGateway, read_control_settings
from sandbox.document.diagnostic import DocumentError
from tests.runner.serve.control.market import BINDING, TOKENS, Market, open_market
from tests.tables import check_rows

URL = "gateway_url = 'https://gateway.example.com'\n"
FAULTS = {
    "syntax": ("trust = ", "control.toml:1"),
    "an unknown key": ("trusted = 'x'", "did you mean 'trust'"),
    "a wrong type": ("trust = 7", "trust is not the path"),
    "an empty path": ("store = ''", "store is not the path"),
    "a missing trust file": ("trust = 'none'", "none"),
    "another review": ("review = 'always'", "review is neither"),
    "a registry with a scheme": ("registries = ['https://ghcr.io']", "control.toml:1:15.* not a registry"),
    "registries of another type": ("registries = 'ghcr.io'", "registries is not a list"),
    "orgs of another type": ("orgs = 7", "orgs is not a table"),
    "an org with a slash": ("[orgs.'a/b']", "'a/b' cannot be the name of an org"),
    "an unknown key of an org": ("[orgs.a]\ntoken = '@a'", "control.toml:2:1.*did you mean 'tokens'"),
    "a token itself": (f"[orgs.a]\ntokens = ['{'t' * 40}']", 'given by the name of its file.*"@FILE"'),
    "a token as a file's name": (f"[orgs.a]\ntokens = ['@{'t' * 40}']", "there is no such file"),
    "a short token": ("[orgs.a]\ntokens = ['@short']", "32 or more ASCII characters"),
    "a token that others can read": ("[orgs.a]\ntokens = ['@open']", "others than its owner can read"),
    "nine tokens": (f"[orgs.a]\ntokens = {['@alpha.token'] * 9}", "at most 8"),
    "one token of two orgs": (
        "[orgs.a]\ntokens = ['@alpha.token']\n[orgs.b]\ntokens = ['@alpha.token']",
        "a token of 'b' is one of 'a' too",
    ),
    "a secret itself": (f"[orgs.a]\nsecrets = {{k = '{'t' * 40}'}}", "write @FILE, or env:NAME"),
    "a secret as a file's name": (f"[orgs.a]\nsecrets = {{k = '@{'t' * 40}'}}", "the file that it names"),
    "a variable that is not set": ("[orgs.a]\nsecrets = {k = 'env:NONE'}", "no such variable"),
    "a gateway without tokens": (f"[orgs.a]\n{URL}", "gateway_url is there without gateway_token_command"),
    "tokens without a gateway": (
        "[orgs.a]\ngateway_token_command = ['/bin/true']",
        "control.toml:2:1.*gateway_token_command is there without gateway_url",
    ),
    "a gateway elsewhere, in the open": (
        "[orgs.a]\ngateway_url = 'http://a.example'\ngateway_token_command = ['/bin/true']",
        "control.toml:2:1.*an http URL of another machine",
    ),
    "a command by its name": (f"[orgs.a]\n{URL}gateway_token_command = ['true']", "by its absolute path"),
    "a command that is a text": (f"[orgs.a]\n{URL}gateway_token_command = '/bin/true'", "not a list"),
    "no such command": (
        f"[orgs.a]\n{URL}gateway_token_command = ['/nowhere/x']",
        "/nowhere/x is not a program",
    ),
    "a command that others can change": (
        f"[orgs.a]\n{URL}gateway_token_command = ['FOLDER/loose']",
        "FOLDER/loose is not used: .*can be written",
    ),
    "a lifetime without a unit of time": (
        f"[orgs.a]\n{URL}gateway_token_command = ['/bin/true']\ngateway_token_lifetime = 'long'",
        "gateway_token_lifetime: ",
    ),
    "a hidden secret that is none": (
        "[orgs.a]\nhide = ['key@api.example.com']",
        "'key' is none of the secrets",
    ),
    "a host that is none": (
        "[orgs.a]\nsecrets = {key = '@alpha.key'}\nhide = ['key@a b']",
        "hide: key@a b: it",
    ),
    "a secret with a space": ("[orgs.a]\nsecrets = {'a b' = '@alpha.key'}", "'a b' cannot be the name"),
}


def test_faults_are_told_with_their_places_and_without_secrets(tmp_path: Path) -> None:
    market = Market(tmp_path)
    market.write("short", "t" * 31)
    market.write("open", "t" * 40).chmod(0o644)
    market.write("loose", "#!/bin/sh\n").chmod(0o777)
    assert read_control_settings(str(tmp_path / "control.toml"), {}).orgs.keys() == TOKENS.keys()

    def check(name: str, row: tuple[str, str]) -> None:
        text, pattern = row
        path = market.write("control.toml", text.replace("FOLDER", str(tmp_path)) + "\n")
        with pytest.raises(DocumentError) as caught:
            read_control_settings(str(path), {})
        said = "\n".join(f"{each.text()} {each.hint}" for each in caught.value.diagnostics)
        assert re.search(pattern.replace("FOLDER", re.escape(str(tmp_path))), said), said
        assert "t" * 31 not in said

    check_rows(FAULTS, check)
    market.settings().chmod(0o666)
    with pytest.raises(DocumentError, match="can be written by"):
        read_control_settings(str(tmp_path / "control.toml"), {})


def test_tokens_and_secrets_are_found_and_never_shown(tmp_path: Path) -> None:
    market = Market(tmp_path)
    secrets = 'secrets = {key = "@alpha.key", more = "env:MORE"}\nhide = ["key@api.example.com"]'
    market.settings(
        'registries = ["ghcr.io/acme", "localhost:5000"]',
        f'[orgs.alpha]\ntokens = ["@alpha.token"]\n{secrets}',
    )
    found = read_control_settings(str(tmp_path / "control.toml"), {"MORE": "the secret of MORE"})
    assert found.org_of(TOKENS["alpha"].encode()) == "alpha"
    for token in (b"", TOKENS["beta"].encode(), TOKENS["alpha"].encode()[:-1], b"\xff" * 40):
        assert found.org_of(token) == ""
    assert found.secret("secret://alpha/key") == "the secret of alpha"
    assert found.secret("secret://alpha/more") == "the secret of MORE"
    assert found.orgs["alpha"].hide == ("key@api.example.com:443",)
    for uri in ("secret://beta/key", "secret://alpha/none", "alpha/key", "secret://", ""):
        assert found.secret(uri) is None, uri
    assert found.secret_uris("alpha") == {"secret://alpha/key", "secret://alpha/more"}
    assert found.secret_uris("beta") == frozenset()
    command = 'gateway_token_command = ["/bin/true", "x"]\ngateway_token_lifetime = "15m"\n'
    market.settings("", f"[orgs.alpha]\n{URL}{command}[orgs.beta]\n")
    orgs = read_control_settings(str(tmp_path / "control.toml"), {}).orgs
    assert orgs["alpha"].gateway == OrgApiGateway("https://gateway.example.com", ("/bin/true", "x"), 900.0)
    assert orgs["beta"].gateway is None
    shown = repr(found)
    assert "alpha" in shown and "the secret of" not in shown and TOKENS["alpha"] not in shown
    allowed = {"ghcr.io/acme/devkit": True, "ghcr.io/acme": True, "localhost:5000/x": True}
    forbidden = dict.fromkeys(
        ("ghcr.io/acmes/devkit", "ghcr.io/other", "localhost:50001/x", "localhost"), False
    )
    assert {name: found.may_import(name) for name in allowed | forbidden} == allowed | forbidden


@pytest.mark.trio
async def test_a_change_of_a_file_counts_at_once_and_a_fault_changes_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    async with open_market(tmp_path, said) as ask:
        await ask.import_(ask.market.package())
        assert (await ask.bind()).status == 201
        ask.market.trust("two")
        with trio.fail_after(60):
            while (await ask("GET", "/v1/plugin-tools")).document["tools"]:
                pass
        ask.market.write("control.toml", "trust = 7")
        with trio.fail_after(60):
            while not (told := [each for each in said if "settings from before" in each]):
                await ask("GET", "/health")
        assert "control.toml:1:1" in told[0] and "trust is not the path" in told[0]
        faults = (await ask("GET", "/health")).document["configuration"]
        assert any("trust is not the path" in each["message"] for each in faults)
        assert (await ask("GET", "/v1/plugin-bindings", org="alpha")).status == 200
        os.remove(tmp_path / "control.toml")
        ask.market.settings()
        ask.market.trust("one")
        with trio.fail_after(60):
            while not (await ask("GET", "/v1/plugin-tools")).document["tools"]:
                pass
        faults = (await ask("GET", "/health")).document["configuration"]
        assert not any("trust" in each["message"] for each in faults)
        assert (await ask.bind(export_id="reader", secrets={})).document["scope"] == BINDING["scope"]
