"""From an export to its cage: what each permission becomes, and how an export is chosen."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.contracts.vai import CONTRACT, manifest
from runner.contracts.vai import binding as bindings
from runner.contracts.vai.binding import Binding
from runner.contracts.vai.cage import OptionsFault, choice_fault, exports_asked, scratch_dir, shape
from runner.contracts.vai.declared import DeclaredExport, Permissions, declared_by
from runner.launch.read import load as load_stage
from runner.launch.stages import Invocation, Stopwatch
from runner.manifest.load import load, load_all
from runner.plugin import Plugin
from sandbox.document.diagnostic import Diagnostic
from sandbox.document.read import parse
from sandbox.spec import EnvRequest, MemoryFile, Network, SandboxSpec, Scratch
from tests.conftest import ROOT, Caller
from tests.runner.contracts.vai.package import bound, make_package
from tests.runner.contracts.vai.test_manifest import LEAST, SHOWN
from tests.tables import one_case

PERMISSIONS = "[exports.permissions]\n"
AT = ("exports", 0, "permissions")
ALWAYS = ("bin", "schemas", "vai-plugin.toml")


def read(text: str, **options: str) -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
    return manifest.read(parse("/srv/package/vai-plugin.toml", text.encode(), "toml"), options=options)


def with_cage(permissions: str = "", **options: str) -> Plugin:
    """The only export of the smallest manifest, with these permissions. It chooses itself."""
    found, diagnostics = read(LEAST + PERMISSIONS + permissions, **options)
    assert found is not None, [d.text() for d in diagnostics]
    assert declared_by(found).chosen == "ask"
    return found


# --- what each permission becomes ---------------------------------------------------------------------------


def test_an_export_that_asks_for_nothing() -> None:
    found = with_cage()
    assert found.spec == SandboxSpec(network=Network("none", where=(*AT, "network")))
    assert found.root_parts == ALWAYS and found.root_inside == "/sandbox/package"
    assert dict(found.timeouts) == {"handshake": 10.0, "shutdown": 5.0, "call": 20.0}


@pytest.mark.parametrize(("given", "place"), [("", "/sandbox/scratch"), ("inv_1", "/sandbox/scratch/inv_1")])
def test_scratch(given: str, place: str) -> None:
    """Assets are not there: the field has one value."""
    options = {"invocation_id": given} if given else {}
    found = with_cage('filesystem = "scratch"\n', **options)
    where = (*AT, "filesystem")
    assert found.spec.scratch == Scratch(place, where=where)
    assert found.spec.env == (
        EnvRequest("HOME", place, where=where, fixed=True),
        EnvRequest("TMPDIR", place, where=where, fixed=True),
    )
    assert found.root_parts == ALWAYS


def test_assets() -> None:
    found = with_cage('filesystem = "assets_ro"\n', invocation_id="inv_1")
    assert found.root_parts == (*ALWAYS, "assets")
    assert found.spec.scratch is None and found.spec.env == ()


def test_secret_slots() -> None:
    found = with_cage('secret_slots = ["jira_token", "other"]\n')
    assert found.spec.memory_files == (
        MemoryFile("/sandbox/secrets/jira_token", 0o400, "jira_token"),
        MemoryFile("/sandbox/secrets/other", 0o400, "other"),
    )
    where = (*AT, "secret_slots")
    assert found.spec.env == (EnvRequest("VAI_SECRETS_DIR", "/sandbox/secrets", where=where, fixed=True),)


GATEWAY = "https://api.example.com/v1"
SCOPES = 'gateway_api_scopes = ["runs:read"]\n'
EGRESS = 'network = "egress"\n'


@pytest.mark.parametrize(
    ("permissions", "options", "expected"),
    [
        ("", {}, None),
        ("", {"gateway_url": GATEWAY}, None),  # without scopes there is no gateway
        (SCOPES, {}, None),
        (SCOPES, {"gateway_url": GATEWAY}, ("api.example.com:443",)),  # the only host
        (EGRESS, {}, ("*",)),
        (EGRESS, {"gateway_url": GATEWAY}, ("*",)),
        (EGRESS + SCOPES, {"gateway_url": GATEWAY}, ("*", "api.example.com:443")),
    ],
)
def test_network(permissions: str, options: dict[str, str], expected: tuple[str, ...] | None) -> None:
    where = (*AT, "network")
    wanted = Network("none", where=where) if expected is None else Network("allowlist", expected, where)
    assert with_cage(permissions, **options).spec.network == wanted


def test_a_wrong_gateway_refuses_the_launch() -> None:
    """test_context.py has the table of URLs."""
    found, [fault] = read(LEAST + PERMISSIONS + SCOPES, gateway_url="nonsense")
    assert found is None and fault.rule == "gateway_url" and "--gateway-url" in fault.hint


@pytest.mark.parametrize("given", ["..", ".", "a/b", "../x", "a b", "a\n", "-a", "a" * 129, "é"])
def test_an_invocation_id_that_cannot_name_a_folder(given: str) -> None:
    with pytest.raises(OptionsFault):
        scratch_dir(given)
    found, [fault] = read(LEAST + PERMISSIONS + 'filesystem = "scratch"\n', invocation_id=given)
    assert found is None and fault.rule == "invocation_id"


def test_the_longest_invocation_id() -> None:
    assert scratch_dir("a" * 128).endswith("a" * 128)


@pytest.mark.parametrize(
    ("program", "parts"),
    [
        ("bin/plugin", ALWAYS),
        ("./libexec/a/plugin", (*ALWAYS, "libexec")),
        ("plugin", (*ALWAYS, "plugin")),
        ("schemas/run", ALWAYS),
    ],
)
def test_parts_of_the_package(program: str, parts: tuple[str, ...]) -> None:
    found, _ = read(LEAST.replace("bin/plugin", program))
    assert found is not None and found.root_parts == parts


# --- choosing -----------------------------------------------------------------------------------------------


def test_without_a_choice_a_package_with_several_exports_asks_for_nothing() -> None:
    found, diagnostics = read(SHOWN)
    assert found is not None and diagnostics == ()
    assert found.spec == SandboxSpec(network=Network("none", where=("exports",)))
    assert found.root_parts == ALWAYS
    fault = choice_fault(found, {})
    assert fault is not None
    shown = "triage (harness), jira_search (tool), slack_notify (hook), coder_window (compactor)"
    assert shown in fault.message and "--export ID or --binding FILE" in fault.hint


@pytest.mark.parametrize(
    ("name", "number", "mode", "scratch", "slots"),
    [
        ("triage", 0, "allowlist", True, ("anthropic_key", "openai_key")),
        ("jira_search", 1, "allowlist", False, ("jira_token",)),
        ("slack_notify", 2, "allowlist", False, ("slack_webhook",)),
        ("coder_window", 3, "none", True, ()),
    ],
)
def test_the_cage_is_that_of_the_chosen_export(
    name: str, number: int, mode: str, scratch: bool, slots: tuple[str, ...]
) -> None:
    found, _ = read(SHOWN, export=name)
    assert found is not None and choice_fault(found, {}) is None
    declared = declared_by(found)
    assert declared.chosen == name and declared.effective == declared.exports[number]
    assert len(declared.exports) == 4
    assert found.spec.network is not None
    assert (found.spec.network.mode, found.spec.network.where[1]) == (mode, number)
    assert (found.spec.scratch is not None) is scratch
    assert tuple(file.secret for file in found.spec.memory_files) == slots


def test_an_unknown_export_is_refused() -> None:
    found, [fault] = read(SHOWN, export="jira_serch")
    assert found is None and fault.rule == "export_unknown" and "jira_search" in fault.hint
    found, [fault] = read(SHOWN, export="zebra")
    assert found is None and "triage (harness), jira_search (tool)" in fault.hint


def test_a_long_list_of_exports_is_cut() -> None:
    more = "".join(f'[[exports]]\nid = "e{n}"\nkind = "compactor"\n' for n in range(1000))
    found, _ = read(LEAST + more)
    assert found is not None
    fault = choice_fault(found, {})
    assert fault is not None and fault.message.endswith("e18 (compactor), …")


def test_explain_says_what_each_export_asks_for() -> None:
    found, _ = read(SHOWN)
    assert found is not None
    rows = dict(exports_asked(found))
    assert rows["slack_notify"] == (
        "hook, worker; network egress; filesystem none; gateway runs:read; secrets slack_webhook"
    )
    assert rows["coder_window"] == "compactor, worker; network none; filesystem scratch"


# --- bindings -----------------------------------------------------------------------------------------------

Bind = Callable[[Binding | None, Callable[[DeclaredExport], DeclaredExport]], None]


@pytest.fixture
def bind(monkeypatch: pytest.MonkeyPatch) -> Bind:
    """A binding record stands for what reading one gives: its own tests are elsewhere."""

    def install(record: Binding | None, narrow: Callable[[DeclaredExport], DeclaredExport]) -> None:
        def read_binding(text: str, file: str, plugin: Plugin, export: str = "") -> Any:
            assert (text, file) == ("{}", "binding.json") and declared_by(plugin).chosen == ""
            fault = Diagnostic(file, 1, 2, "binding_invalid", "it is wrong")
            return record, () if record is not None else (fault,)

        monkeypatch.setattr(bindings, "read_binding", read_binding)
        monkeypatch.setattr(bindings, "narrow_export", lambda export, binding: narrow(export))

    return install


BOUND = {"binding": "{}", "binding_file": "binding.json"}


def test_a_binding_chooses_its_export_and_narrows_it(bind: Bind) -> None:
    less = Permissions("egress", "none", (), ("openai_key",))
    bind(
        Binding(export="triage", egress=("a.example:443",)),
        lambda export: export._replace(permissions=less, timeout=2.0),
    )
    found, diagnostics = read(SHOWN, **BOUND)
    assert found is not None and diagnostics == ()
    assert found.spec.network == Network("allowlist", ("a.example:443",), (*AT, "network"))
    assert found.spec.scratch is None and [file.secret for file in found.spec.memory_files] == ["openai_key"]
    assert dict(found.timeouts)["call"] == 2.0
    declared = declared_by(found)
    assert declared.effective is not None and declared.effective.permissions == less
    assert declared.exports[0].permissions.filesystem == "scratch"  # the upper bound stays known


def test_a_binding_without_hosts_leaves_no_network(bind: Bind) -> None:
    bind(Binding(export="triage", egress=()), lambda export: export)
    found, _ = read(SHOWN, **BOUND)
    assert found is not None and found.spec.network == Network("none", where=(*AT, "network"))


def test_a_binding_of_another_export_is_refused(bind: Bind) -> None:
    bind(Binding(export="triage"), lambda export: export)
    found, [fault] = read(SHOWN, export="jira_search", **BOUND)
    assert found is None and fault.rule == "export_mismatch"
    found, _ = read(SHOWN, export="triage", **BOUND)
    assert found is not None


def test_a_wrong_binding_refuses_the_launch(bind: Bind) -> None:
    bind(None, lambda export: export)
    found, [fault] = read(SHOWN, **BOUND)
    assert found is None and (fault.rule, fault.line) == ("binding_invalid", 1)


LOOKED_AT_ONLY: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"status": "disabled"}, "binding_inactive", "'bind_123' is disabled"),
    ({"rollout": {"traffic_percent": 0}}, "binding_inactive", "leaves everybody out"),
    ({"config": {}}, "binding_invalid", "cannot be used: (the value): the key 'base_url' is missing"),
)


@pytest.mark.parametrize(("changes", "cause", "said"), LOOKED_AT_ONLY)
def test_a_binding_that_lets_nothing_run(
    tmp_path: Path, changes: dict[str, Any], cause: str, said: str
) -> None:
    plugin = make_package(tmp_path)
    for options, expected in ((bound(), None), (bound(**changes), cause)):
        shaped, found = CONTRACT.choice.shape(plugin, options)
        assert shaped is not None and all(each.severity == "warning" for each in found)
        fault = CONTRACT.choice.choice_fault(shaped, options)
        assert (fault.cause if fault is not None else None) == expected
    assert fault is not None and said in fault.message and "--binding" in fault.hint


@pytest.mark.parametrize("changes", [changes for changes, cause, _ in LOOKED_AT_ONLY[:2]])
def test_an_export_whose_binding_lets_nothing_run_is_not_listed(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    plugin = make_package(tmp_path)
    for options, names in ((bound(), ["jira_search", "plain"]), (bound(**changes), ["plain"])):
        shaped, _ = CONTRACT.choice.shape(plugin, options)
        assert shaped is not None
        assert [tool["name"] for tool in CONTRACT.prepared_calls.catalogue(shaped)["tools"]] == names
    again, _ = CONTRACT.choice.shape(shaped or plugin, {})
    assert again is not None and len(CONTRACT.prepared_calls.catalogue(again)["tools"]) == 2


def test_check_holds_the_configuration_of_a_binding_against_its_schema(plugin_dir: Path) -> None:
    folder = devkit(plugin_dir)
    schema = {"type": "object", "properties": {"depth": {"type": "integer"}}}
    (folder / "schemas/config.json").write_text(json.dumps(schema))
    manifest = folder / "vai-plugin.toml"
    text = manifest.read_text()
    manifest.write_text(
        text.replace('config_schema = "schemas/any.json"', 'config_schema = "schemas/config.json"')
    )
    secrets = {"api_key": "secret://org_123/api_key"}
    for depth, rules in ((3, []), ("deep", [("binding_invalid", "binding.json", True)])):
        options = bound(export_id="triage", secrets=secrets, config={"depth": depth})
        [loaded] = load_all(str(folder), options=options)
        assert (loaded.plugin is None) is bool(rules)
        assert [(d.rule, d.file, "/depth" in d.message) for d in loaded.diagnostics] == rules


# --- on the command line ------------------------------------------------------------------------------------


def devkit(plugin_dir: Path) -> Path:
    folder = plugin_dir / "devkit"
    shutil.copytree(ROOT / "tests/plugins/vai_devkit", folder, ignore=shutil.ignore_patterns("__pycache__"))
    folder.chmod(0o755)
    return folder


@pytest.mark.launches
@pytest.mark.usefixtures("nothing_left")
def test_exec_wants_a_choice(runner_as: Caller, plugin_dir: Path) -> None:
    folder = devkit(plugin_dir)
    done = runner_as("exec", folder)
    assert done.returncode == 126 and done.stdout == ""
    assert "launch_failed" in done.stderr and "export ID" in done.stderr
    for name in ("triage", "search", "reader", "notify", "window"):
        assert f"{name} (" in done.stderr
    # Nor is a plan made or kept: `exec` would not ask again.
    planned = runner_as("plan", folder)
    assert (planned.returncode, planned.stdout, planned.stderr) == (10, "", done.stderr)
    done = runner_as("exec", "--export", "notify", folder)
    assert (done.returncode, done.stderr) == (0, "")
    done = runner_as("exec", "--export", "notfy", folder)
    assert done.returncode == 126 and "did you mean 'notify'?" in done.stderr


@pytest.mark.launches
@pytest.mark.usefixtures("nothing_left")
def test_exec_runs_no_disabled_binding(runner_as_user: Caller, plugin_dir: Path) -> None:
    folder, binding = devkit(plugin_dir), plugin_dir / "binding.json"
    for status, code in (("active", 0), ("disabled", 126)):
        secrets = {"api_key": "secret://org_123/api_key"}
        binding.write_text(bound(export_id="search", secrets=secrets, config=None, status=status)["binding"])
        key = plugin_dir / "key"
        key.write_text("a-secret-key")
        done = runner_as_user("exec", "--binding", binding, "--secret", f"api_key=@{key}", folder)
        assert done.returncode == code and ("is disabled" in done.stderr) is bool(code), done.stderr
    done = runner_as_user("explain", "--binding", binding, folder)
    assert done.returncode == 0 and "would refuse it: the binding 'bind_123' is disabled" in done.stdout


def test_tools_does_not_list_the_export_of_a_disabled_binding(
    runner_as_user: Caller, plugin_dir: Path
) -> None:
    folder, binding = devkit(plugin_dir), plugin_dir / "binding.json"
    for status, names in (("active", ["search", "reader"]), ("disabled", ["reader"])):
        secrets = {"api_key": "secret://org_123/api_key"}
        binding.write_text(bound(export_id="search", secrets=secrets, config=None, status=status)["binding"])
        done = runner_as_user("tools", "--json", "--binding", binding, folder)
        assert [tool["name"] for tool in json.loads(done.stdout)["tools"]] == names


@one_case(
    ("context", "said"),
    [
        ('{"delivery_id": "del_1"}', "'delivery_id', which is an option of its own: give --delivery-id"),
        ('{"agent_id": "x"}', "not sent along with an export; known are invocation_id"),
    ],
)
def test_a_stray_context_on_the_command_line(
    runner_as_user: Caller, plugin_dir: Path, context: str, said: str
) -> None:
    done = runner_as_user("call", devkit(plugin_dir), "notify", "--context", context)
    assert done.returncode == 2 and said in done.stderr


@pytest.mark.launches
def test_a_variable_of_the_contract_stays(runner_as_user: Caller, plugin_dir: Path) -> None:
    """The control: another variable can be given."""
    folder = devkit(plugin_dir)
    for word in ("VAI_SECRETS_DIR=/x", "HOME=/x", "TMPDIR=/x"):
        done = runner_as_user("explain", "--export", "triage", "--env", word, folder)
        name = word.partition("=")[0]
        assert done.returncode == 21 and f"leave --env {name} out" in done.stdout
    assert runner_as_user("explain", "--export", "triage", "--env", "X=/x", folder).returncode == 0


@pytest.mark.launches
def test_explain_and_check_need_none(runner_as_user: Caller, plugin_dir: Path) -> None:
    folder = devkit(plugin_dir)
    assert runner_as_user("check", folder).returncode == 0
    done = runner_as_user("explain", folder)
    assert done.returncode == 0 and "It would be launched." in done.stdout
    assert "But `runner exec` would refuse it" in done.stdout and "by its manifest: triage" in done.stdout
    chosen = json.loads(runner_as_user("explain", "--format", "json", "--export", "search", folder).stdout)
    assert chosen["outcome"]["code"] == "ok"
    assert {row["asked"] for row in chosen["asked"]} >= {"none", "VAI_SECRETS_DIR=…"}


# --- files that a call brings along -------------------------------------------------------------------------


def test_the_file_of_a_call_is_in_its_scratch_folder() -> None:
    path = "/sandbox/scratch/inv_1/projection.json"
    found = with_cage('filesystem = "scratch"\n', invocation_id="inv_1", artifact=path)
    assert found.spec.memory_files == (MemoryFile(path, 0o600),)


@pytest.mark.parametrize(
    ("permissions", "path"),
    [
        ("", "/sandbox/scratch/inv_1/x"),
        ('filesystem = "scratch"\n', "/sandbox/scratch/inv_2/x"),
        ('filesystem = "scratch"\n', "/sandbox/scratch/inv_1/../x"),
        ('filesystem = "scratch"\n', "/sandbox/scratch/inv_1/.."),
        ('filesystem = "scratch"\n', "/sandbox/scratch/inv_1/"),
        ('filesystem = "scratch"\n', "/etc/passwd"),
    ],
)
def test_a_file_of_a_call_elsewhere_is_refused(permissions: str, path: str) -> None:
    found, diagnostics = read(LEAST + PERMISSIONS + permissions, invocation_id="inv_1", artifact=path)
    assert found is None
    assert diagnostics[-1].rule == "artifact"


# --- options and the cache ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [SHOWN, LEAST + PERMISSIONS + 'filesystem = "assets_ro"\n' + SCOPES])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"export": "triage", "invocation_id": "inv_1"},
        {"export": "ask", "gateway_url": GATEWAY},
        {"invocation_id": "inv_2", "gateway_url": GATEWAY},
        {"export": "nobody"},
    ],
)
def test_options_on_a_cached_plugin_give_what_reading_with_them_gives(
    text: str, options: dict[str, str]
) -> None:
    shape = CONTRACT.choice.shape
    plain, _ = read(text)
    assert plain is not None
    assert shape(plain, options) == read(text, **options)
    shaped, _ = shape(plain, options)
    if shaped is not None:  # what was chosen before does not count
        assert shape(shaped, {}) == (plain, ())
        assert shape(shaped, options) == (shaped, ())


def test_a_launch_with_options_imports_no_model(tmp_path: Path) -> None:
    path = tmp_path / "vai-plugin.toml"
    path.write_text(SHOWN)
    program = (
        "import sys; from runner.manifest import load as manifest; from sandbox import cache;"
        f"cache.directory = lambda: {str(tmp_path / 'cache')!r};"
        "options = dict(zip(('export', 'invocation_id'), sys.argv[1:]));"
        f"found = manifest.load({str(path)!r}, options=options);"
        "assert found.plugin and found.plugin.spec.scratch.dest.endswith(sys.argv[2]);"
        "print(*(name for name in ('pydantic', 'tomllib', 'yaml', 'hashlib', 'ipaddress')"
        " if name in sys.modules))"
    )
    seen = [
        subprocess.run(
            [sys.executable, "-c", program, export, f"inv_{export}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for export in ("triage", "coder_window")
    ]
    assert "pydantic" in seen[0] and seen[1] == []


def test_an_option_of_another_contract_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vai-plugin.toml").write_text(LEAST)
    for _ in range(2):  # read, and from the cache
        refused = load(str(tmp_path), options={"project": "/srv"})
        assert refused.plugin is None and [d.rule for d in refused.diagnostics] == ["option_foreign"]
        further = {"timeout": "3", "output_schema": "", "artifact": "", "binding_file": "a.json"}
        assert load(str(tmp_path), options=further).plugin is not None


def test_parts_that_do_not_exist_are_left_out_of_a_launch(tmp_path: Path) -> None:
    (tmp_path / "vai-plugin.toml").write_text(LEAST)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/plugin").write_text("")
    loaded = load_stage(Invocation(str(tmp_path)), Stopwatch())
    assert loaded.plugin.root_parts == ("bin", "vai-plugin.toml")
    (tmp_path / "schemas").mkdir()  # the manifest is in the cache by now
    assert load_stage(Invocation(str(tmp_path)), Stopwatch()).plugin.root_parts == ALWAYS


# --- the limit of a frame -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "fits"), [("1K", True), ("16M", True), ("1023", False), ("17M", False), ("x", False)]
)
def test_the_frame_limit_is_checked_before_the_launch(tmp_path: Path, limit: str, fits: bool) -> None:
    made, found = shape(make_package(tmp_path), {"export": "jira_search", "frame_limit": limit})
    assert (made is not None) == fits
    assert [fault.rule for fault in found] == ([] if fits else ["frame_limit"])
    assert fits or found[0].file == "--frame-limit"
