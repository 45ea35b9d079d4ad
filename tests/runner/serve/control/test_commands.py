"""`runner package` and `runner binding` at a control plane: what they print, and what they refuse."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import trio

from runner.cli import main
from runner.outcome import EXIT, USAGE_ERROR
from tests.runner.serve.control.market import BINDING, open_market

USAGE = {
    ("package", "list", "x"): "unrecognized arguments: x (use runner package list [--state STATE]",
    ("package", "show"): "or NAME@VERSION; use runner package show [--socket PATH]",
    ("package", "show", ""): "ID is empty; is a variable unset?",
    (
        "package",
        "install",
        "a@1",
    ): "required: --export, --org (use runner package install --export EXPORT --org ORG",
    ("package", "review", "a@1"): "--verdict, --publisher or --for-org",
    (
        "package",
        "withdraw",
        "a@1",
        "--percent",
        "5",
    ): "--percent goes with runner package install (use runner package withdraw ",
    (
        "package",
        "import",
        "a",
        "--token-file",
        "x",
    ): "--token-file goes with runner package list, show, install (use runner package import",
    (
        "package",
        "lint",
        ".",
        "--org",
        "a",
    ): "--org goes with runner package install (use runner package lint ",
    ("package", "sign"): "required: --key (use runner package sign ",
    ("binding", "create"): "use runner binding create [--json] [--socket PATH] [--token-file FILE] FILE",
    ("binding", "list", "x"): "unrecognized arguments: x (use runner binding list ",
    ("binding", "rollback", "a"): "runner binding history lists them; use runner binding rollback ",
    (
        "binding",
        "show",
        "a",
        "--percent",
        "5",
    ): "--percent goes with runner binding set (use runner binding show ",
    ("binding", "show", "a", "--token-file", "/none"): "--token-file: /none cannot be read",
    ("binding", "create", "/none"): "/none: No such file",
    ("binding", "paint"): "invalid choice: 'paint' (choose from ",
}


def test_wrong_usage_is_told_without_a_daemon(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in USAGE.items():
        try:
            status = main([*words, "--socket", "/none.sock"])
        except SystemExit as exited:
            status = int(str(exited.code))
        told = capsys.readouterr().err
        assert (status, said in told) == (USAGE_ERROR, True), (words, told)
    assert main(["binding", "list", "--socket", "/none.sock"]) == EXIT["launch_failed"]
    assert "start one with runner serve" in capsys.readouterr().err


@pytest.mark.trio
async def test_commands_say_what_they_did_and_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_market(tmp_path) as ask:

        async def run(*words: str, fails: int = 0) -> str:
            status = await trio.to_thread.run_sync(partial(main, [*words, "--socket", ask.door.unix]))
            out, err = capsys.readouterr()
            assert status == fails, (words, out, err)
            return err if fails else out

        root, devkit = str(ask.market.package(key=None)), "acme/devkit@0.1.0"
        as_alpha = ("--token-file", str(tmp_path / "alpha.token"))
        said = await run("package", "import", root, "--for-org", "alpha")
        assert said == "acme~devkit@0.1.0: imported: the package is not signed\n"
        install = ("package", "install", devkit, "--export", "reader", "--org", "alpha")
        refused = await run(*install, fails=USAGE_ERROR)
        assert "package_unavailable" in refused and "not signed" in refused
        await run("package", "import", str(ask.market.package()))
        assert "policy" in await run("package", "withdraw", devkit, "--format", "json")
        assert "withdrawn" in await run("package", "list", "--state", "withdrawn")
        assert json.loads(await run("package", "list", "--state", "available", "--format", "json")) == {
            "packages": []
        }
        assert await run("package", "restore", devkit) == "acme~devkit@0.1.0: available\n"
        assert "rejected" in await run("package", "review", devkit, "--verdict", "rejected")
        assert (
            await run("package", "review", devkit, "--verdict", "approved")
            == "acme~devkit@0.1.0: available\n"
        )
        history = (await run("package", "history", devkit)).splitlines()
        assert [line.split()[3] for line in history] == [
            *("CHANGE", "changed", "changed", "restored", "withdrawn", "signed", "imported")
        ]
        made = json.loads(await run(*install, "--percent", "30", *as_alpha, "--format", "json"))
        name = made["binding_id"]
        assert made["rollout"] == {"traffic_percent": 30}
        record = tmp_path / "record.json"
        record.write_text(json.dumps({**BINDING, "status": "off"}))
        said = await run("binding", "create", str(record), fails=USAGE_ERROR)
        assert "binding_invalid" in said and "neither active nor disabled" in said
        shown = await trio.to_thread.run_sync(
            partial(main, ["binding", "validate", str(record), "--socket", ask.door.unix])
        )
        assert shown == EXIT["manifest_invalid"] and "NOT ok" in capsys.readouterr().out
        record.write_text(json.dumps(BINDING))
        assert "record.json: ok" in await run("binding", "validate", str(record), *as_alpha)
        assert "secret://alpha/key" in await run("binding", "create", str(record), *as_alpha)
        # A change of what somebody has changed meanwhile.
        await run("binding", "set", name, "--percent", "40", "--if-match", "1", *as_alpha)
        stale = await run("binding", "set", name, "--percent", "50", "--if-match", "1", fails=USAGE_ERROR)
        assert "stale_revision" in stale and "If-Match" in stale
        nothing = await run("binding", "set", name, fails=USAGE_ERROR)
        assert "nothing to change" in nothing
        assert json.loads(await run("binding", "rollback", name, "1", "--json"))["revision"] == 3
        other = ("--token-file", str(tmp_path / "beta.token"))
        assert "unknown_binding" in await run("binding", "show", name, *other, fails=USAGE_ERROR)
        assert "unknown_package" in await run("package", "show", devkit, *other, fails=USAGE_ERROR)
        assert len((await run("binding", "list", *other)).splitlines()) == 1
        assert len((await run("binding", "list", *as_alpha)).splitlines()) == 3
