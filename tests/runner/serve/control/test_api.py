"""The control plane at real sockets: packages, bindings, discovery, and who sees what."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from openapi_spec_validator import validate

from runner.contracts.registry import example_folder
from runner.ledger.file import LedgerFile
from runner.manifest.unpack import unpacked_folder
from runner.serve.control.invoking import RunningRoutes
from runner.serve.control.operations import OPERATIONS as CONTROL
from runner.serve.openapi import OPERATIONS, document
from tests.runner.serve.control.market import BINDING, TOKENS, ControlHouse, open_market
from tests.runner.serve.house import TOKEN, house, request, status
from tests.tables import check_rows

PACKAGES, BINDINGS = "/v1/plugin-packages", "/v1/plugin-bindings"
DEVKIT = f"{PACKAGES}/acme~devkit@0.1.0"


async def state(ask: ControlHouse, path: str = DEVKIT, **more: Any) -> str:
    found: str = (await ask("GET", path, **more)).document["state"]
    return found


# --- packages -----------------------------------------------------------------------------------------------


@pytest.mark.trio
async def test_a_package_is_imported_once_and_never_changes(tmp_path: Path) -> None:
    async with open_market(tmp_path) as ask:
        root = ask.market.package()
        first = await ask.import_(root, publisher="Acme")
        assert (first.status, first.document["state"], first.document["publisher"]) == (
            201,
            "available",
            "Acme",
        )
        again = await ask.import_(root, publisher="Acme")
        assert (again.status, again.document, again.etag) == (200, first.document, first.etag)
        other = await ask.import_(root, publisher="Somebody else")
        assert other.code == "conflict" and "another publisher" in other.document["error"]["message"]
        # A tar of the same files is the same package.
        tar = tmp_path / "devkit.tar"
        await trio.run_process(["tar", "-cf", tar, "-C", root, "."])
        assert (await ask.import_(tar)).document == first.document
        shutil.rmtree(Path(unpacked_folder()) / hashlib.sha256(tar.read_bytes()).hexdigest())
        # What is stored does not change with the folder that it came from, and other bytes are refused.
        (root / "assets/note.txt").write_text("other")
        ask.market.package()  # signs again
        other = await ask.import_(root)
        assert (other.status, other.code) == (409, "conflict")
        stored = {path.read_text() for path in (tmp_path / "store").glob("*/*/package/assets/note.txt")}
        assert "other" in stored and len(stored) == 2  # until the next start
        assert (await ask("GET", DEVKIT)).document == first.document
        assert await state(ask) == "available"
        history = (await ask("GET", f"{DEVKIT}/history")).document["history"]
        assert [(each["revision"], each["change"], each["caller"][:4]) for each in history] == [
            (1, "imported", "uid:")
        ]
    async with open_again(ask) as ask:
        assert len(list((tmp_path / "store").glob("*/*/package"))) == 1
        assert (await ask("GET", DEVKIT)).document == first.document
    # Another database with the same settings knows nothing of it, and removes nothing of it.
    ledger = str(tmp_path / "other/ledger.db")
    async with house(tmp_path, control=str(tmp_path / "control.toml"), ledger=ledger) as door:
        assert (await ControlHouse(door, ask.market)("GET", PACKAGES)).document["packages"] == []
        assert len(list((tmp_path / "store").glob("*/*/package"))) == 1


@pytest.mark.trio
async def test_a_package_that_is_imported_several_times_at_once(tmp_path: Path) -> None:
    async with open_market(tmp_path) as ask:
        root, answers = ask.market.package(), list[int]()

        async def import_it() -> None:
            answers.append((await ask.import_(root)).status)

        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(import_it)
        assert sorted(answers) == [200] * 5 + [201]
        assert len(list((tmp_path / "store").glob("*/*"))) == 1  # nothing unfinished is left


def open_again(ask: ControlHouse) -> Any:
    @asynccontextmanager
    async def opened() -> Any:
        folder = ask.market.folder
        async with house(folder, control=str(folder / "control.toml")) as door:
            yield ControlHouse(door, ask.market)

    return opened()


@pytest.mark.trio
async def test_what_cannot_be_imported_is_told(tmp_path: Path) -> None:
    async with open_market(tmp_path) as ask:
        broken = ask.market.package("0.3.0")
        (broken / "vai-plugin.toml").write_text('api_version = "vai.plugin.v1"\n')
        linked = ask.market.package("0.4.0")
        (linked / "link").symlink_to("/etc/passwd")
        other = tmp_path / "rune"
        shutil.copytree(example_folder("rune"), other)

        async def said(given: Any) -> str:
            found = await ask("POST", PACKAGES, given)
            assert found.status in (400, 403, 404, 422), found
            return f"{found.code}: {found.document['error']['message']} {found.document['error']['hint']}"

        table = {
            "a broken manifest": ({"source": str(broken)}, "manifest: .*0.3.0.*vai-plugin.toml:1"),
            "a link": ({"source": str(linked)}, "package_kind: .*link is a symbolic link"),
            "another contract": ({"source": str(other)}, "package_contract: .*have no bindings"),
            "no folder": ({"source": str(tmp_path / "none")}, "package_none: .*neither a folder nor a tar"),
            "a file": ({"source": str(linked / "vai-plugin.toml")}, "package_none: "),
            "a tar that is none": ({"source": str(ask.market.write("a.tar", "x"))}, "package_tar: "),
            "a relative path": ({"source": "devkit"}, "invalid_source: .*absolute path"),
            "a NUL": ({"source": "/a\0"}, "invalid_source"),
            "a registry that is not listed": (
                {"source": "oci://ghcr.io/acme/devkit:1"},
                "registry_forbidden: .*registries",
            ),
            "a wrong reference": ({"source": "oci://ghcr.io"}, "reference: "),
            "an unknown key": ({"source": "/a", "reviewed": True}, "invalid_body: .*'reviewed'"),
            "a wrong review": ({"source": "/a", "review": "yes"}, "invalid_body: review is one of"),
            "a wrong policy": ({"source": "/a", "install_policy": "all"}, "invalid_body: install_policy"),
            "nothing": ({}, "invalid_body: .*source"),
            "an id with a space": ({"package_id": "a b", "version": "1"}, "invalid_body: .*package_id"),
            "a version with a slash": ({"package_id": "a/b", "version": "1/2"}, "invalid_body: .*version"),
            "an id that is too long": ({"package_id": "a" * 129, "version": "1"}, "128"),
            "a number for an id": ({"package_id": 1, "version": "1"}, "invalid_body"),
        }
        rows = {name: (pattern, await said(given)) for name, (given, pattern) in table.items()}
        check_rows(rows, _matches)
        assert (await ask("GET", PACKAGES)).document["packages"] == []
        longest = await ask("POST", PACKAGES, {"package_id": "a" * 128, "version": "1"})
        assert longest.status == 201  # the control of the bound


def _matches(name: str, row: tuple[str, str]) -> None:
    assert re.search(*row), row[1]


@pytest.mark.trio
async def test_only_signed_packages_are_available_and_keys_rotate(tmp_path: Path) -> None:
    async with open_market(tmp_path) as ask:
        market, control = ask.market, ask.door.control
        assert control is not None
        unsigned = await ask.import_(market.package(key=None))
        assert unsigned.document["state"] == "imported" and "not signed" in unsigned.document["reason"]
        refused = await ask.bind()
        assert (refused.status, refused.code) == (422, "package_unavailable")
        untrusted = await ask.import_(market.package(key="two"))
        assert untrusted.status == 200  # the same files
        assert untrusted.document["signature"] == {"state": "signature_untrusted", "key_id": "two"}
        # A signature of a trusted key takes its place, and no worse one takes that one's.
        signed = await ask.import_(market.package(key="one"))
        assert (signed.document["state"], signed.document["signature"]["key_id"]) == ("available", "one")
        for key in ("two", None):
            assert (await ask.import_(market.package(key=key))).document == signed.document
        bound = await ask.bind()
        assert bound.status == 201, bound
        tools = "/v1/plugin-tools"
        assert len((await ask("GET", tools)).document["tools"]) == 1
        # The old key is not trusted any more: nothing new by its packages, until they are signed again.
        market.trust("two")
        await control.reload()
        assert await state(ask) == "imported"
        assert (await ask("GET", tools)).document["tools"] == []
        shown = (await ask("GET", f"{BINDINGS}/{bound.document['binding_id']}")).document
        assert "'one', which signed the package, is not trusted" in shown["inactive"]
        assert (await ask.import_(market.package(key="two"))).document["state"] == "installed"
        assert len((await ask("GET", tools)).document["tools"]) == 1
        changes = [each["change"] for each in (await ask("GET", f"{DEVKIT}/history")).document["history"]]
        assert changes == ["signed", "judged", "signed", "signed", "imported"]
        # A signature of another package.
        other = market.package("0.2.0")
        text = (market.package() / "marketplace.signature.json").read_text()
        (other / "marketplace.signature.json").write_text(text)
        found = (await ask.import_(other)).document
        assert (found["state"], found["signature"]["state"]) == ("imported", "signature_untrusted")
        market.trust("one", "two")
        await control.reload()
        assert (await ask("GET", f"{PACKAGES}/acme~devkit@0.2.0")).document["signature"]["state"] == (
            "signature_identity"
        )


@pytest.mark.trio
async def test_reviews_withdrawals_and_entries_without_files(tmp_path: Path) -> None:
    async with open_market(tmp_path) as ask:
        given: dict[str, Any] = {"package_id": "acme/devkit", "version": "0.1.0", "publisher": "A"}
        entry = await ask("POST", PACKAGES, given)
        assert (await ask("POST", PACKAGES, given)).status == 200
        assert (entry.status, entry.document["state"]) == (201, "contract-ready")
        bare = {"export_id": "reader", "scope": {"org_id": "alpha"}}
        refused = await ask("POST", f"{DEVKIT}:install", bare)
        assert (refused.status, refused.code) == (422, "package_unavailable")
        imported = await ask.import_(ask.market.package(), install_policy=["*", "beta"])
        assert (imported.status, imported.document["state"]) == (201, "available")
        card = await ask("GET", DEVKIT)
        assert (card.document["publisher"], card.document["install_policy"]) == ("A", ["*", "beta"])
        # A change needs the ETag of what it changes.
        change = {"review": "rejected"}
        assert (await ask("PATCH", DEVKIT, change)).status == 428
        for word in ('"1"', "*", '"x"', '"99999999999"'):
            stale = await ask("PATCH", DEVKIT, change, headers={"If-Match": word})
            assert (stale.status, stale.code) == (412, "stale_revision"), word
        rejected = await ask("PATCH", DEVKIT, change, headers=card.etag)
        assert rejected.document["state"] == "imported" and "rejected" in rejected.document["reason"]
        approved = await ask("PATCH", DEVKIT, {"review": "approved"}, headers=rejected.etag)
        assert approved.document["state"] == "available"
        # Where a review is required, a package without one is not available.
        assert (await ask.import_(ask.market.package("0.2.0"))).document["state"] == "available"
        ask.market.settings('review = "required"')
        assert ask.door.control is not None
        await ask.door.control.reload()
        found = (await ask("GET", f"{PACKAGES}?state=imported")).document["packages"]
        assert [(each["version"], each["reason"]) for each in found] == [
            ("0.2.0", "the operator has not approved the package yet")
        ]
        # Install binds it; a withdrawal stops that, and what is bound can still be disabled.
        given = {**bare, "rollout": {"traffic_percent": 25}}
        installed = await ask("POST", f"{DEVKIT}:install", given, org="alpha")
        assert (installed.status, installed.document["inactive"]) == (201, "")
        assert await state(ask) == await state(ask, org="alpha") == "installed"
        assert await state(ask, org="beta") == "available"
        withdrawn = await ask("POST", f"{DEVKIT}:withdraw")
        assert (withdrawn.document["state"], withdrawn.document["reason"]) == (
            "withdrawn",
            "the package was withdrawn",
        )
        path = f"{BINDINGS}/{installed.document['binding_id']}"
        assert (await ask("GET", path)).document["inactive"] == "the package was withdrawn"
        assert (await ask("GET", "/v1/plugin-tools", org="alpha")).document["tools"] == []
        assert (await ask.bind(export_id="notify", secrets={})).code == "package_unavailable"
        more = await ask("PATCH", path, {"rollout": {"traffic_percent": 50}}, headers=installed.etag)
        assert more.code == "package_unavailable"
        stopped = await ask("PATCH", path, {"status": "disabled"}, headers=installed.etag)
        assert (stopped.status, stopped.document["status"]) == (200, "disabled")
        assert (await ask("POST", f"{DEVKIT}:withdraw")).etag == withdrawn.etag  # nothing changes
        assert (await ask("POST", f"{DEVKIT}:restore")).document["state"] == "installed"
        started = await ask("PATCH", path, {"status": "active"}, headers=stopped.etag)
        assert (started.status, started.document["inactive"]) == (200, "")
        changes = [each["change"] for each in (await ask("GET", f"{DEVKIT}/history")).document["history"]]
        assert changes == ["restored", "withdrawn", "changed", "changed", "imported", "imported"]


@pytest.mark.trio
async def test_lists_are_filtered_and_come_in_pages(tmp_path: Path) -> None:
    async with open_market(tmp_path) as ask:
        for number in range(5):
            given = {"package_id": f"acme/p{number}", "version": "1", "publisher": f"by{number % 2}"}
            await ask("POST", PACKAGES, given)
        await ask.import_(ask.market.package(), install_policy=["alpha"])

        async def names(query: str, **more: Any) -> list[str]:
            found = (await ask("GET", f"{PACKAGES}?{query}", **more)).document["packages"]
            return [each["package_id"].removeprefix("acme/") for each in found]

        assert await names("publisher=by1") == ["p1", "p3"]
        assert await names("state=available&signature=trusted&review=none") == ["devkit"]
        assert await names("package_id=acme/p4") == ["p4"]
        assert await names("", org="alpha") == ["devkit", "p0", "p1", "p2", "p3", "p4"]
        assert await names("", org="beta") == ["p0", "p1", "p2", "p3", "p4"]
        seen: list[int] = []
        following: Any = ""
        while following is not None:
            page = (await ask("GET", f"{PACKAGES}?most=2&after={following}")).document
            seen.append(len(page["packages"]))
            following = page["next"]
        assert seen == [2, 2, 2, 0]
        for query in ("state=new", "most=x", "most=-1"):
            assert (await ask("GET", f"{PACKAGES}?{query}")).status == 400, query


@pytest.mark.trio
async def test_the_install_policy_says_who_may_bind(tmp_path: Path) -> None:
    async with open_market(tmp_path) as ask:
        await ask.import_(ask.market.package(), install_policy=[])
        assert (await ask.bind(org="alpha")).code == "package_unknown"
        # The operator may bind it for anybody. That org sees it then, may change its binding, bind no more.
        given = await ask.bind()
        assert (given.status, await state(ask, org="alpha")) == (201, "installed")
        path = f"{BINDINGS}/{given.document['binding_id']}"
        change = {"rollout": {"traffic_percent": 5}}
        assert (await ask("PATCH", path, change, headers=given.etag, org="alpha")).status == 200
        more = {"export_id": "reader", "secrets": {}}
        assert (await ask.bind(org="alpha", **more)).code == "install_policy"
        bare = {"export_id": "reader", "scope": {"org_id": "alpha"}}
        assert (await ask("POST", f"{DEVKIT}:install", bare, org="alpha")).code == "install_policy"
        assert (await ask("GET", DEVKIT, org="beta")).status == 404
        card = await ask("GET", DEVKIT)
        both = {"install_policy": ["alpha", "beta"]}
        card = await ask("PATCH", DEVKIT, both, headers=card.etag)
        assert card.document["install_policy"] == ["alpha", "beta"]
        assert (await ask("GET", DEVKIT, org="alpha")).document["install_policy"] == ["alpha"]
        assert (await ask("PATCH", DEVKIT, {"install_policy": ["alpha"]}, headers=card.etag)).status == 200
        assert (await ask.bind(org="alpha", **more)).status == 201  # the control
        assert (await ask("GET", DEVKIT, org="alpha")).document["source"] == "local"


# --- bindings -----------------------------------------------------------------------------------------------


@pytest.mark.trio
async def test_a_binding_is_checked_in_order_and_the_first_fault_ends_it(tmp_path: Path) -> None:
    """Each row has its own fault and all that come after it in the order of the check."""
    faults: list[tuple[str, dict[str, Any], str, str]] = [
        ("package", {"package_id": "acme/none"}, "package_unknown", "there is no package 'acme/none'"),
        ("version", {"package_version": "9.9.9"}, "version_unknown", "no version '9.9.9'"),
        ("export", {"export_id": "none"}, "binding_invalid", "no export 'none'"),
        ("scope", {"scope": {"org_id": "gamma"}}, "binding_invalid", "there is no org 'gamma'"),
        ("config", {"config": 7}, "binding_invalid", "config is not an object"),
        ("secret org", {"secrets": {"api_key": "secret://beta/key"}}, "binding_invalid", "the org 'beta'"),
        ("secret", {"secrets": {"api_key": "secret://alpha/x"}}, "binding_secret_missing", "no secret 'x'"),
        ("slot", {"secrets": {}}, "binding_secret_missing", "secret slot 'api_key'"),
        ("other slot", {"secrets": {"api_key": None, "b": None}}, "binding_invalid", "no secret slot 'b'"),
        ("status", {"status": "paused"}, "binding_invalid", "neither active nor disabled"),
        ("rollout", {"rollout": {"traffic_percent": 101}}, "binding_invalid", "from 0 to 100"),
        ("policy", {"policy": {"timeout_ms": 0}}, "binding_invalid", "above 0"),
    ]
    async with open_market(tmp_path) as ask:
        await ask.import_(ask.market.package())
        for index, (name, wrong, rule, message) in enumerate(faults):
            record = dict(BINDING)
            for _, later, _, _ in reversed(faults[index + 1 :]):
                record |= later
            record = {**record, **wrong}
            found = (await ask("POST", f"{BINDINGS}:validate", record)).document
            errors = [each for each in found["faults"] if each["severity"] == "error"]
            assert not found["valid"] and errors[0]["rule"] == rule, (name, found)
            assert message in errors[0]["message"] and errors[0]["line"] == 1, (name, found)
            refused = await ask("POST", BINDINGS, record)
            assert (refused.status, refused.code) == (422, rule), (name, refused)
            assert message in refused.document["error"]["message"] and refused.document["faults"]
        assert (await ask("POST", f"{BINDINGS}:validate", BINDING)).document["valid"]
        assert (await ask("GET", BINDINGS)).document["bindings"] == []
        # The place of a fault in the text that was sent.
        text = json.dumps({**BINDING, "status": "paused"}, indent=1).encode()
        place = (await ask("POST", BINDINGS, text)).document["error"]["message"].split(": ")[0]
        line = next(number for number, each in enumerate(text.split(b"\n"), 1) if b"paused" in each)
        assert place.endswith(f":{line}:2")
        # Bodies that are none, and one that is a byte too long.
        for body in (b"", b"[]", b"{", b"\xff"):
            assert (await ask("POST", BINDINGS, body)).status == 400, body
        assert (await ask("POST", BINDINGS, b'{"a": 1, "a": 2}')).code == "duplicate_key"
        raw = json.dumps(BINDING).encode()
        assert (await ask("POST", f"{BINDINGS}:validate", raw.ljust(64 << 10))).document["valid"]
        assert (await ask("POST", f"{BINDINGS}:validate", raw.ljust((64 << 10) + 1))).status == 413
        for path in (BINDINGS, f"{BINDINGS}:validate"):
            assert (await ask("POST", path, raw.replace(b"search", b"\xff"))).code == "invalid_json"


@pytest.mark.trio
async def test_a_binding_changes_by_revisions_and_can_be_rolled_back(tmp_path: Path) -> None:
    async with open_market(tmp_path) as ask:
        for version in ("0.1.0", "0.2.0"):
            await ask.import_(ask.market.package(version))
        first = await ask.bind(org="alpha")
        assert (first.status, first.headers["etag"]) == (201, '"1"')
        path = f"{BINDINGS}/{first.document['binding_id']}"
        assert (await ask.bind()).code == "conflict"  # the same export and scope
        assert (await ask.bind(scope={"org_id": "alpha", "project_id": "p"})).status == 201
        assert (await ask("PATCH", path, {"status": "disabled"}, org="alpha")).status == 428
        second = await ask(
            "PATCH",
            path,
            {"package_version": "0.2.0", "rollout": {"traffic_percent": 25}},
            headers=first.etag,
        )
        assert (second.status, second.headers["etag"], second.document["package"]) == (
            *(200, '"2"'),
            "acme~devkit@0.2.0",
        )
        # Two who have seen the same: the second one is told.
        stale = await ask("PATCH", path, {"status": "disabled"}, headers=first.etag, org="alpha")
        assert (stale.status, stale.code) == (412, "stale_revision")
        for tag in ('"0"', '"3"', "*"):  # what the change is for is looked at before the change
            stale = await ask("PATCH", path, {"status": "x"}, headers={"If-Match": tag})
            assert (stale.status, stale.code) == (412, "stale_revision"), tag
        for change in ({"export_id": "reader"}, {"scope": {"org_id": "beta"}}, {"binding_id": "x"}, {"x": 1}):
            assert (await ask("PATCH", path, change, headers=second.etag)).status == 400, change
        wrong = await ask("PATCH", path, {"rollout": {"traffic_percent": 200}}, headers=second.etag)
        assert (wrong.status, wrong.code) == (422, "binding_invalid")
        rolled = await ask("PATCH", path, {"revision": 1}, headers=second.etag, org="alpha")
        assert (rolled.document["package_version"], rolled.document["revision"]) == ("0.1.0", 3)
        history = (await ask("GET", f"{path}/history", org="alpha")).document["history"]
        assert [(each["revision"], each["change"], each["caller"]) for each in history] == [
            (3, "rolled back", "org:alpha"),
            (2, "changed", history[1]["caller"]),
            (1, "created", "org:alpha"),
        ]
        assert history[0]["document"] == history[2]["document"]
        assert [
            each["revision"]
            for each in (await ask("GET", f"{path}/history?before=3&most=1")).document["history"]
        ] == [2]
        for revision, expected in ((9, 404), ("1", 400), (True, 400), (2**63 - 1, 400)):
            given = {"revision": revision}
            assert (await ask("PATCH", path, given, headers=rolled.etag)).status == expected, revision
        # A binding that was right may be wrong by now.
        assert (await ask("POST", f"{path}:validate", org="alpha")).document["valid"]
        ask.market.write("alpha.other", "x")
        ask.market.settings(
            orgs='[orgs.alpha]\ntokens = ["@alpha.token"]\nsecrets = {other = "@alpha.other"}\n'
        )
        assert ask.door.control is not None
        await ask.door.control.reload()
        found = (await ask("POST", f"{path}:validate", org="alpha")).document
        assert [each["rule"] for each in found["faults"]] == ["binding_secret_missing"]
        change = {"secrets": {"api_key": "secret://alpha/other"}}
        assert (await ask("POST", f"{path}:validate", change, org="alpha")).document["valid"]


@pytest.mark.trio
async def test_every_change_is_audited_without_secrets(tmp_path: Path) -> None:
    async with open_market(tmp_path) as ask:
        await ask.import_(ask.market.package())
        bound = await ask.bind(org="alpha", config={})
        path = f"{BINDINGS}/{bound.document['binding_id']}"
        changed = await ask("PATCH", path, {"status": "disabled"}, headers=bound.etag, org="alpha")
        await ask("POST", f"{DEVKIT}:withdraw")
        await ask("PATCH", path, {"status": "active"}, headers=changed.etag, org="alpha")  # is refused
        rows = (await ask.door.ledger.do(LedgerFile.audit, "control"))[::-1]
        details = [json.loads(row.detail) for row in rows]
        assert [
            (row.caller[:4], row.plugin[:5], each["change"]) for row, each in zip(rows, details, strict=True)
        ] == [
            ("uid:", "acme~", "imported"),
            ("org:", "bind_", "created"),
            ("org:", "bind_", "changed"),
            ("uid:", "acme~", "withdrawn"),
        ]
        assert details[0]["before"] is details[1]["before"] is None
        assert details[2]["before"] == details[1]["after"] != details[2]["after"]
        assert details[3]["before"] == details[0]["after"] != details[3]["after"]
        everything = b"".join(path.read_bytes() for path in (tmp_path / "ledger").iterdir() if path.is_file())
        assert b"bind_" in everything and b"the secret of" not in everything
        assert not any(token.encode() in everything for token in TOKENS.values())
        assert all(path.stat().st_mode & 0o77 == 0 for path in (tmp_path / "ledger").iterdir())


# --- who sees what ------------------------------------------------------------------------------------------


@pytest.mark.trio
async def test_what_belongs_to_another_org_does_not_exist(tmp_path: Path) -> None:
    async with open_market(tmp_path) as ask:
        await ask.import_(ask.market.package(), install_policy=["beta"])
        theirs = await ask.bind(
            scope={"org_id": "beta"}, secrets={"api_key": "secret://beta/key"}, org="beta"
        )
        assert theirs.status == 201, theirs
        # Every route with an id answers for one of another org as for one that never was.
        ids = {"binding": theirs.document["binding_id"], "package": "acme~devkit@0.1.0"}
        nobodys = {"binding": "bind_" + "0" * 24, "package": "acme~devkit@9.9.9"}
        asked = 0
        for each in CONTROL:
            if "{" not in each.path or each.control != "org":
                continue
            answers = []
            for names in (ids, nobodys):
                body = None if each.method == "GET" else {"status": "disabled"}
                found = await ask(
                    *(each.method, each.path.format(**names), body),
                    org="alpha",
                    headers={"If-Match": '"1"'},
                )
                text = json.dumps(found.document)
                answers.append(
                    (found.status, text.replace(names["binding"], "ID").replace(names["package"], "ID"))
                )
            assert answers[0] == answers[1] and answers[0][0] == 404, each.name
            asked += 1
        assert asked >= 6
        for path in (BINDINGS, f"{BINDINGS}?org_id=beta", "/v1/plugin-tools", "/v1/plugin-tools?org_id=beta"):
            found = (await ask("GET", path, org="alpha")).document
            assert next(iter(found.values())) == [], path
            own = (await ask("GET", path, org="beta")).document  # the control
            assert len(next(iter(own.values()))) == 1, path
        # Neither its name nor its secrets can be used, and its orgs cannot be told from those that are none.
        record = {"package_id": "acme/devkit", "secrets": {}}
        assert (await ask("POST", f"{BINDINGS}:validate", record, org="alpha")).document["faults"][0][
            "rule"
        ] == ("package_unknown")
        await ask.import_(ask.market.package("0.2.0"))
        for org in ("beta", "gamma"):
            scope = {"package_version": "0.2.0", "scope": {"org_id": org}}
            refused = await ask.bind(org="alpha", **scope, secrets={"api_key": f"secret://{org}/key"})
            assert f"there is no org '{org}'" in refused.document["error"]["message"]
        stolen = await ask.bind(
            org="alpha", package_version="0.2.0", secrets={"api_key": "secret://beta/key"}
        )
        assert (stolen.status, stolen.code) == (422, "binding_invalid")
        assert (await ask.bind(org="alpha", binding_id=ids["binding"])).code == "invalid_body"
        assert (await ask.bind(org="alpha", package_version="0.2.0")).status == 201  # the control


@pytest.mark.trio
async def test_tokens_of_orgs_open_the_control_plane_and_nothing_else(tmp_path: Path) -> None:
    async with open_market(tmp_path) as ask:
        tried = 0
        for each in OPERATIONS:
            path = each.path.replace("{", "").replace("}", "")
            for tcp in (False, True):
                found = await ask(each.method, path, org="alpha", tcp=tcp)
                assert (found.status, found.code) == (403, "org_token"), each.name
                tried += 1
        for path in ("/", "/page.js", "/mcp", "/nowhere"):
            assert (await ask("GET", path, org="alpha", tcp=True)).code == "org_token", path
        for each in CONTROL:
            path = each.path.format(package="a@1", binding="b")
            by_org = await ask(each.method, path, org="alpha")
            if each.control == "operator":
                assert (by_org.status, by_org.code) == (403, "operator_only"), each.name
            else:
                assert by_org.status != 403, (each.name, by_org)
            # Neither the daemon's own token nor a stranger's opens it.
            by_token = await ask(each.method, path, org=TOKEN.decode(), tcp=True)
            assert (by_token.status, by_token.code) == (403, "org_required"), each.name
            assert (await ask(each.method, path, org="x" * 40, tcp=True)).status == 401
            assert (await ask(each.method, path, org="x" * 40)).status == 401
        # The daemon's token keeps its meaning, on both sockets.
        assert (await ask("GET", "/plugins", org=TOKEN.decode(), tcp=True)).status == 200
        assert (await ask("POST", "/reload", org=TOKEN.decode())).status == 200
        assert (await ask("POST", "/reload", org=TOKEN.decode(), tcp=True)).code == "local_only"
        # A token that is replaced: both count until the old one is taken away.
        control = ask.door.control
        assert control is not None
        ask.market.write("alpha.new", "n" * 32)
        for tokens, old, new in (('"@alpha.token", "@alpha.new"', 200, 200), ('"@alpha.new"', 401, 200)):
            ask.market.settings(orgs=f"[orgs.alpha]\ntokens = [{tokens}]\n")
            await control.reload()
            assert (await ask("GET", BINDINGS, org="alpha")).status == old
            assert (await ask("GET", BINDINGS, org="n" * 32)).status == new


@pytest.mark.trio
async def test_without_settings_there_is_no_control_plane(tmp_path: Path) -> None:
    async with house(tmp_path) as door:
        for each in CONTROL:
            path = each.path.format(package="a", binding="b")
            assert status(await door.ask(request(path, "Host: localhost", method=each.method))) == 404


@pytest.mark.trio
async def test_the_api_is_described(tmp_path: Path) -> None:
    async with open_market(tmp_path) as ask:
        found = (await ask("GET", "/openapi.json")).document
        validate(found)
        assert {each.path for each in CONTROL} <= found["paths"].keys()
        assert set(found["paths"]) - set(document()["paths"]) == {
            each.path for each in (*CONTROL, *RunningRoutes.OPERATIONS)
        }


# --- discovery ----------------------------------------------------------------------------------------------


@pytest.mark.trio
async def test_discovery_shows_what_the_caller_can_use(tmp_path: Path) -> None:
    async with open_market(tmp_path) as ask:
        await ask.import_(ask.market.package())
        made = {}
        wanted: dict[str, dict[str, Any]] = {
            "whole": {},
            "project": {"scope": {"org_id": "alpha", "project_id": "p"}},
            "harness": {"export_id": "triage"},
            "hook": {"export_id": "notify", "secrets": {}},
            "compactor": {"export_id": "window", "secrets": {}},
            "other": {"scope": {"org_id": "beta"}, "secrets": {"api_key": None}},
        }
        for name, changes in wanted.items():
            made[name] = await ask.bind(**changes)
            assert made[name].status == 201, made[name]
        ids = {found.document["binding_id"]: name for name, found in made.items()}

        async def shown(kind: str, query: str = "", org: str = "alpha") -> list[str]:
            found = (await ask("GET", f"/v1/plugin-{kind}?{query}", org=org)).document[kind]
            return sorted(ids[each["binding_id"]] for each in found)

        assert await shown("tools") == ["project", "whole"]
        assert await shown("tools", org="beta") == ["other"]
        assert await shown("tools", org="") == ["other", "project", "whole"]
        assert await shown("tools", "org_id=beta", org="") == ["other"]
        assert await shown("tools", "project_id=p") == ["project"]
        assert await shown("tools", "project_id=q") == ["whole"]
        assert [await shown(kind) for kind in ("harnesses", "hooks", "compactors")] == [
            *(["harness"], ["hook"], ["compactor"])
        ]
        first = (await ask("GET", "/v1/plugin-tools?most=2")).document
        rest = (await ask("GET", f"/v1/plugin-tools?most=2&after={first['next']}")).document
        assert (len(first["tools"]), len(rest["tools"]), rest["next"]) == (2, 1, None)
        (entry,) = (await ask("GET", "/v1/plugin-hooks", org="alpha")).document["hooks"]
        assert (entry["export_id"], entry["subscribes_to"]) == ("notify", ["run.completed"])
        assert "secrets" not in entry and "config" not in entry
        # What is not active is hidden; the project's own goes before that of its org whatever its status.
        path = f"{BINDINGS}/{made['project'].document['binding_id']}"
        disabled = await ask("PATCH", path, {"status": "disabled"}, headers=made["project"].etag)
        assert (await shown("tools"), await shown("tools", "project_id=p")) == (["whole"], [])
        given = {"status": "active", "rollout": {"traffic_percent": 0}}
        nobody = await ask("PATCH", path, given, headers=disabled.etag)
        assert (await shown("tools"), nobody.document["inactive"]) == (
            ["whole"],
            "the binding has the traffic_percent 0",
        )
        given = {"rollout": {"traffic_percent": 1}}
        assert (await ask("PATCH", path, given, headers=nobody.etag)).status == 200
        assert await shown("tools", "project_id=p") == ["project"]
