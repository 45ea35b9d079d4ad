"""nexo manifests: each rule with the place it points at, and every table of the schema accepted."""

from __future__ import annotations

import tomllib
from typing import Any

import jsonschema
import pytest

from runner.contracts import nexo
from runner.contracts.nexo import exports, manifest, rules, tables
from runner.manifest.semver import admits, is_version
from runner.plugin import Entrypoint, Plugin
from sandbox.document import model
from sandbox.document.diagnostic import Diagnostic
from sandbox.document.read import parse
from sandbox.spec import EnvRequest, Limits, Network, PathRequest, SandboxSpec
from tests.tables import one_case

HOME = "/home/me"
# Seven lines: what a test adds starts in line 8.
HEAD = """\
manifest_version = 2
[plugin]
id = "demo"
version = "1.2.3"
name = "Demo"
description = "A demo."
min_nexo_version = ">=0.1.0"
"""


def read(text: str) -> tuple[Plugin | None, tuple[Diagnostic, ...]]:
    return manifest.read(parse("/plugins/demo/plugin.toml", text.encode(), "toml"), home=HOME)


def plugin(text: str) -> Plugin:
    found, diagnostics = read(HEAD + text)
    assert found is not None, [d.text() for d in diagnostics]
    return found


def faults(text: str) -> list[tuple[str, int, int]]:
    found, diagnostics = read(text)
    assert found is None
    return [(d.rule, d.line, d.column) for d in diagnostics if d.severity == "error"]


def test_the_numbers_of_its_supervisor() -> None:
    text = "[plugin.supervisor]\nrespawn = true\nmax_attempts = 7\nbackoff_ms = 250\nstderr_tail_lines = 0\n"
    assert dict(plugin(text).lifecycle) == {
        "respawn": "yes",
        "stderr_tail_lines": 0.0,
        "max_attempts": 7.0,
        "backoff": 0.25,
    }
    numbers = nexo.CONTRACT.supervision(plugin(text))
    assert (numbers.attempts, numbers.backoff, numbers.healthy) == (7, 0.25, 3.5)


def test_the_smallest_manifest_is_a_plugin_with_nothing_to_start() -> None:
    found, diagnostics = read(HEAD)
    assert found == Plugin(
        id="demo",
        version="1.2.3",
        contract="nexo",
        name="Demo",
        description="A demo.",
        manifest="/plugins/demo/plugin.toml",
        root="/plugins/demo",
        entrypoint=None,
        spec=SandboxSpec(enabled=False),
        timeouts=manifest.TIMEOUTS,
        lifecycle=(("respawn", "no"), ("stderr_tail_lines", 32.0)),
    )
    assert diagnostics == ()
    document = parse("/plugins/demo/plugin.toml", HEAD.encode(), "toml")
    assert [(d.rule, d.severity) for d in manifest.check_files(document)] == [("entrypoint_missing", "error")]


@pytest.mark.parametrize("command", ['""', '"  "'])
def test_a_blank_command_is_no_error_at_load(command: str) -> None:
    assert plugin(f"[plugin.entrypoint]\ncommand = {command}\n").entrypoint is None


# --- every rule, and where it points --------------------------------------------------------------

SANDBOX = "[plugin.sandbox]\nenabled = true\n"
RULES: list[tuple[str, str, str, int, int]] = [
    # (what, text after HEAD, rule, line, column)
    ("namespace expose", '[plugin.tools]\nexpose = ["demo_a", "other"]', "tool_namespace", 9, 21),
    ("namespace extends", '[plugin.extends]\ntools = ["demo"]', "tool_namespace", 9, 10),
    ("namespace prefix alone", '[plugin.extends]\ntools = ["demo_"]', "tool_namespace", 9, 10),
    ("extends id", '[plugin.extends]\nhooks = ["Bad-Id"]', "extends_id", 9, 10),
    ("extends long id", f'[plugin.extends]\nhooks = ["{"a" * 33}"]', "extends_id", 9, 10),
    ("extends long tool", f'[plugin.extends]\ntools = ["demo_{"a" * 60}"]', "extends_id", 9, 10),
    ("unknown table", "[plugin.novelty]\nx = 1", "unknown_table", 8, 9),
    ("unknown table below", "[plugin.capabilities.brokr]\nx = 1", "unknown_table", 8, 22),
    ("unknown tables", "[[plugin.novelty]]\nx = 1", "unknown_table", 8, 10),
    ("unknown table at the top", "[other]\nx = 1", "unknown_table", 8, 2),
    ("extends twice", '[plugin.extends]\nhooks = ["a", "a"]', "extends_duplicate", 9, 15),
    ("extends conflict", '[plugin.extends]\nchannels = ["a"]\nhooks = ["a"]', "extends_conflict", 10, 10),
    ("deferred", '[plugin.tools]\nexpose = ["demo_a"]\ndeferred = ["demo_b"]', "tools_deferred", 10, 13),
    (
        "outbound name",
        '[[plugin.tools.outbound]]\nname = "demo_x"\ninput_schema = \'{"type":"object"}\'',
        "tools_outbound",
        9,
        1,
    ),
    (
        "outbound schema",
        'tools.expose = ["demo_x"]\n[[plugin.tools.outbound]]\nname = "demo_x"\ninput_schema = "[]"',
        "tools_outbound",
        11,
        1,
    ),
    ("config schema", '[plugin.config_schema]\nschema = \'{"type":"array"}\'', "config_schema", 9, 1),
    ("config schema json", "[plugin.config_schema]\nschema = '{'", "config_schema", 9, 1),
    ("path absolute", '[plugin.agents]\ncontributes_dir = "/x"', "path_field", 9, 1),
    ("path up", '[plugin.skills]\ncontributes_dir = "a/../b"', "path_field", 9, 1),
    ("path drive", '[plugin.config]\nschema_path = "C:x"', "path_field", 9, 1),
    ("channel", '[[plugin.channels.register]]\nkind = "Bad"', "channel_kind", 9, 1),
    ("provides", '[plugin.capabilities]\nprovides = ["hooks", "advisors"]', "capability_section", 9, 22),
    (
        "gates",
        '[[plugin.capability_gates.gate]]\nenv_var = "A"\n[[plugin.capability_gates.gate]]\nenv_var = "A"',
        "capability_gate",
        11,
        1,
    ),
    ("tail", "[plugin.supervisor]\nstderr_tail_lines = 513", "supervisor_bounds", 9, 1),
    ("attempts", "[plugin.supervisor]\nrespawn = true\nmax_attempts = 0", "supervisor_bounds", 10, 1),
    ("backoff low", "[plugin.supervisor]\nrespawn = true\nbackoff_ms = 99", "supervisor_bounds", 10, 1),
    ("backoff high", "[plugin.supervisor]\nrespawn = true\nbackoff_ms = 300001", "supervisor_bounds", 10, 1),
    ("pairing form", '[plugin.pairing]\nkind = "form"', "pairing", 9, 1),
    ("pairing custom", '[plugin.pairing]\nkind = "custom"', "pairing", 8, 9),
    (
        "pairing info",
        '[plugin.pairing]\nkind = "info"\n[[plugin.pairing.fields]]\nname = "x"',
        "pairing",
        10,
        18,
    ),
    (
        "pairing trigger",
        '[plugin.pairing]\nkind = "info"\ntrigger = { start_method = "a", cancel_method = "b" }',
        "pairing",
        10,
        1,
    ),
    (
        "pairing trigger blank",
        '[plugin.pairing]\nkind = "qr"\ntrigger = { start_method = " ", cancel_method = "b" }',
        "pairing",
        10,
        13,
    ),
    ("tunnel blank", '[plugin.public_tunnel]\nclose_on_event = ""', "public_tunnel", 9, 1),
    ("tunnel wildcard", '[plugin.public_tunnel]\nclose_on_event = "a.*.b"', "public_tunnel", 9, 1),
    ("ui version", "[plugin.admin_ui]\nschema_version = 2", "admin_ui", 9, 1),
    ("ui mode", '[plugin.admin_ui]\nmode = "embedded"', "admin_ui", 9, 1),
    ("ui id", '[[plugin.admin_ui.screens]]\nid = "Not_Kebab"', "admin_ui", 9, 1),
    (
        "ui twice",
        '[[plugin.admin_ui.screens]]\nid = "a"\n[[plugin.admin_ui.screens]]\nid = "a"',
        "admin_ui",
        11,
        1,
    ),
    ("ui slot", '[[plugin.admin_ui.contributions]]\nid = "a"\nslot = "core.x"', "admin_ui", 10, 1),
    (
        "ui other's slot",
        '[[plugin.admin_ui.contributions]]\nid = "a"\nslot = "plugin.other.x"',
        "admin_ui",
        10,
        1,
    ),
    ("ui no slot", '[[plugin.admin_ui.contributions]]\nid = "a"', "admin_ui", 8, 19),
    (
        "ui icon",
        '[[plugin.admin_ui.contributions]]\nid = "a"\nslot = "core.sidebar.root"\nicon = "nope"',
        "admin_ui",
        11,
        1,
    ),
    (
        "ui screen",
        '[[plugin.admin_ui.contributions]]\nid = "a"\nslot = "core.sidebar.root"\nscreen = "b"',
        "admin_ui",
        11,
        1,
    ),
    ("ui parent", '[[plugin.admin_ui.contributions]]\nid = "a"\nparent = "b"', "admin_ui", 10, 1),
    ("env reserved", '[plugin.entrypoint]\nenv = { A = "1", NEXO_X = "2" }', "env_reserved", 9, 18),
    ("env name", '[plugin.entrypoint]\nenv = { "A-B" = "1" }', "env_name", 9, 9),
    ("required env name", '[plugin.requires]\nenv = ["A", "B=1"]', "env_name", 9, 13),
    ("sandbox key", '[plugin.sandbox]\nnetwrok = "deny"', "sandbox_unknown_key", 9, 1),
    ("sandbox network", '[plugin.sandbox]\nnetwork = "some"', "invalid_value", 9, 1),
    ("relative", SANDBOX + 'fs_read_paths = ["a"]', "sandbox_relative_path", 10, 18),
    ("other token", SANDBOX + 'fs_write_paths = ["${HOME}/x"]', "sandbox_relative_path", 10, 19),
    ("state read", SANDBOX + 'fs_read_paths = ["${state_dir}"]', "sandbox_state_dir", 10, 18),
    ("state middle", SANDBOX + 'fs_write_paths = ["/a/${state_dir}"]', "sandbox_state_dir", 10, 19),
    ("state glued", SANDBOX + 'fs_write_paths = ["${state_dir}x"]', "sandbox_state_dir", 10, 19),
    ("state up", SANDBOX + 'fs_write_paths = ["${state_dir}/../x"]', "sandbox_path_detour", 10, 19),
    ("dot dot", SANDBOX + 'fs_read_paths = ["/usr/../opt"]', "sandbox_path_detour", 10, 18),
    ("dot", SANDBOX + 'fs_read_paths = ["/./opt"]', "sandbox_path_detour", 10, 18),
    ("empty segment", SANDBOX + 'fs_read_paths = ["//opt"]', "sandbox_path_detour", 10, 18),
    ("trailing slash", SANDBOX + 'fs_read_paths = ["/opt/"]', "sandbox_path_detour", 10, 18),
    ("long path", SANDBOX + f'fs_read_paths = ["/{"a" * 300}"]', "sandbox_path_too_long", 10, 18),
    ("denied equal", SANDBOX + 'fs_read_paths = ["/etc/shadow"]', "denylist", 10, 18),
    ("denied below", SANDBOX + 'fs_read_paths = ["/root/x"]', "denylist", 10, 18),
    ("denied above", SANDBOX + 'fs_read_paths = ["/etc"]', "denylist", 10, 18),
    ("denied all", SANDBOX + 'fs_write_paths = ["/"]', "denylist", 10, 19),
    ("denied home", SANDBOX + 'fs_read_paths = ["/home/me/.ssh"]', "denylist", 10, 18),
    ("denied above home", SANDBOX + 'fs_read_paths = ["/home/me"]', "denylist", 10, 18),
    ("no allowlist", SANDBOX + 'network = "allowlist"', "network_allowlist", 10, 1),
    ("idle allowlist", SANDBOX + 'network_allowlist = ["a:1"]', "network_allowlist", 10, 1),
    (
        "bad host",
        SANDBOX + 'network = "allowlist"\nnetwork_allowlist = ["a.example:443", "b:"]',
        "network_allowlist",
        11,
        39,
    ),
    ("seccomp", SANDBOX + 'seccomp = "loose"', "invalid_value", 10, 1),
    ("limit", '[plugin.limits]\nmemory = "lots"', "limit_value", 9, 1),
    ("limit unknown", "[plugin.limits]\nmemroy = 1", "limit_unknown", 9, 1),
    ("limit zero", "[plugin.limits]\npids = 0", "limit_value", 9, 1),
    ("limit without a unit", "[plugin.limits]\npids = 5\n  memory = 256", "limit_value", 10, 3),
    ("limit too fine", "[plugin.limits]\ncpu = 0.001", "limit_value", 9, 1),
    ("limit kind", "[plugin.limits]\noutput_lines = 1.5", "limit_value", 9, 1),
    ("own word", "[plugin.limits]\nmem_mb = '256'", "limit_value", 9, 1),
    ("own word zero", "[plugin.limits]\ncpu_pct = 0", "limit_value", 9, 1),
    ("own word twice", "[plugin.limits]\nmem_mb = 256\nmemory = '256M'", "limit_twice", 10, 1),
    ("limits shape", "", "invalid_type", 8, 1),
    ("type", "[plugin.entrypoint]\nargs = [1]", "invalid_type", 9, 9),
    ("table type", "", "invalid_type", 8, 1),
]
RULES_TEXT = {"limits shape": "limits = 1", "table type": "sandbox = true"}


def test_an_empty_allowlist_is_no_network() -> None:
    found, told = read(HEAD + SANDBOX + 'network = "allowlist"\nnetwork_allowlist = []')
    [warning] = (each for each in told if each.rule == "network_allowlist")
    assert found is not None and found.spec.network is not None and found.spec.network.mode == "none"
    assert (warning.severity, warning.line) == ("warning", 11)


@one_case(("what", "text", "rule", "line", "column"), RULES, ids=[row[0] for row in RULES])
def test_each_rule_points_at_its_place(what: str, text: str, rule: str, line: int, column: int) -> None:
    assert faults(HEAD + RULES_TEXT.get(what, text)) == [(rule, line, column)]


@pytest.mark.parametrize(
    ("old", "new", "rule", "line"),
    [
        ('id = "demo"', 'id = "Demo"', "plugin_id", 3),
        ('id = "demo"', f'id = "{"a" * 33}"', "plugin_id", 3),
        ('version = "1.2.3"', 'version = "1.2"', "plugin_version", 4),
        ('name = "Demo"', 'name = " "', "name_blank", 5),
        ('description = "A demo."', 'description = ""', "description_blank", 6),
        ('">=0.1.0"', '">=99"', "min_nexo_version", 7),
        ('">=0.1.0"', '"newest"', "min_nexo_version", 7),
        ("manifest_version = 2", "manifest_version = 3", "manifest_version", 1),
        ("manifest_version = 2", "manifest_version = 1", "legacy_manifest", 1),
        ("manifest_version = 2", 'transport = { kind = "stdio" }', "legacy_manifest", 1),
        ("manifest_version = 2", "manifest_version = true", "invalid_type", 1),
    ],
)
def test_rules_about_the_head(old: str, new: str, rule: str, line: int) -> None:
    assert old in HEAD
    assert faults(HEAD.replace(old, new)) == [(rule, line, 1)]


LEGACY = """\
manifest_version = 1
[plugin]
id = "demo"
version = "1.2.3"
[transport]
kind = "stdio"
command = "./demo"
args = ["-v"]
[capabilities]
tools = ["a"]
[meta]
author = "me"
"""


def test_a_legacy_manifest_is_told_what_to_do_and_that_helps() -> None:
    document = parse("/plugins/demo/any.toml", LEGACY.encode(), "toml")
    assert nexo.CONTRACT.recognises(document)
    _, (fault,) = manifest.read(document, home=HOME)
    assert fault.hint.split("; ") == [
        "write manifest_version = 2",
        "give [plugin] name, description, min_nexo_version",
        "move command and args from [transport] to [plugin.entrypoint]",
        "remove [transport], [capabilities], [meta]",
        "port the program to JSON-RPC lines with initialize (nexo's plugin contract 1.10)",
    ]
    # The same, done.
    ported, told = read(HEAD + '[plugin.entrypoint]\ncommand = "./demo"\nargs = ["-v"]\n')
    assert ported is not None and ported.entrypoint is not None and told == ()
    # One without even a [plugin] is recognised; one that is not on stdio cannot be helped.
    bare = 'manifest_version = 1\n[transport]\nkind = "nats"\n'
    assert nexo.CONTRACT.recognises(parse("/plugins/demo/any.toml", bare.encode(), "toml"))
    assert "only stdio plugins can be hosted" in read(bare)[1][0].hint


def test_ids_of_32_characters_are_allowed_and_tools_of_64() -> None:
    name = "a" * 32
    tool = f"ext_{name}_".ljust(64, "b")
    found, _ = read(
        HEAD.replace('"demo"', f'"{name}"') + f'[plugin.extends]\nhooks = ["{name}"]\ntools = ["{tool}"]\n'
    )
    assert found is not None and dict(found.exports)["tools"] == (tool,)


def test_missing_keys_point_at_the_table_and_come_all_at_once() -> None:
    assert faults("[plugin]\n") == [("missing_key", 1, 2)] * 5
    assert faults("x = 1\n") == [("missing_key", 1, 1)]


def test_every_fault_in_one_pass() -> None:
    text = "[plugin]\n" + "".join(f"{row[1]}\n" for row in RULES if row[0] in ("deferred", "tail", "channel"))
    text += SANDBOX + 'fs_read_paths = [1, "/root", "a"]\nnope = 1\n'
    _, diagnostics = read(text)
    found = {d.rule for d in diagnostics}
    assert found >= {
        "missing_key",
        "tools_deferred",
        "supervisor_bounds",
        "channel_kind",
        "invalid_type",
        "denylist",
        "sandbox_relative_path",
        "sandbox_unknown_key",
    }
    assert [(d.line, d.column) for d in diagnostics] == sorted((d.line, d.column) for d in diagnostics)


def test_a_flood_of_faults_is_counted_not_shown() -> None:
    _, diagnostics = read(HEAD + "".join(f"k{i} = 1\n" for i in range(5000)))
    assert len(diagnostics) == 201
    assert diagnostics[-1].rule == "too_many_faults" and "4800" in diagnostics[-1].message


def test_unknown_keys_are_warnings_with_a_suggestion() -> None:
    found, diagnostics = read(HEAD + "novelty = 1\n[plugin.tools]\nexposed = []\n")
    assert found is not None
    shown = [(d.rule, d.line, d.column, d.severity, d.hint) for d in diagnostics if d.rule == "unknown_key"]
    assert shown == [
        ("unknown_key", 8, 1, "warning", ""),
        ("unknown_key", 10, 1, "warning", "did you mean 'expose'?"),
    ]


def test_strangers_words_in_messages_are_escaped_and_bounded() -> None:
    _, diagnostics = read(HEAD + f'[plugin.extends]\nhooks = ["\\u001b[2J{"x" * 9999}"]\n')
    [diagnostic] = [d for d in diagnostics if d.severity == "error"]
    assert "\\x1b" in diagnostic.message and len(diagnostic.message) < 200


# --- what becomes of it ---------------------------------------------------------------------------


def test_entrypoint_and_environment() -> None:
    found = plugin(
        """
[plugin.entrypoint]
command = "./bin/demo"
args = ["--mode", "stdio"]
env = { RUST_LOG = "info", TOKEN = "t" }
[plugin.requires]
env = ["API_KEY", "TOKEN"]
nexo_capabilities = ["broker", "memory", "broker"]
"""
    )
    assert found.entrypoint == Entrypoint("./bin/demo", ("--mode", "stdio"), "/plugins/demo")
    assert [tuple(request[:3]) for request in found.spec.env] == [
        ("RUST_LOG", "info", True),
        ("TOKEN", "t", True),
        ("API_KEY", None, False),
    ]
    assert found.capabilities == ("broker", "memory")


def test_the_sandbox_becomes_requests() -> None:
    found = plugin(
        """
[plugin.sandbox]
enabled = true
network = "allowlist"
network_allowlist = ["API.example.com:443", "10.0.0.1:80"]
fs_read_paths = ["/usr/bin/chromium", "/etc/ssl/certs"]
fs_write_paths = ["${state_dir}", "${state_dir}/cache", "/srv/data"]
seccomp = "compat"
[plugin.limits]
memory = "256M"
pids = 20
cpu = "50%"
cpu_time = "1m"
io = "10M"
open_files = 64
file_size = "1G"
locked_memory = "1M"
message_queues = "64K"
disk = "1G"
tmp = "16M"
shm = "16M"
output = "1M"
output_lines = 500
launch = "5s"
handshake = 2.5
call = "1m"
idle = "1h"
teardown = "500ms"
deadline = 30
"""
    )
    spec = found.spec
    assert spec.enabled
    assert spec.network == Network(
        "allowlist", ("api.example.com:443", "10.0.0.1:80"), ("plugin", "sandbox", "network")
    )
    read_at, write_at = ("plugin", "sandbox", "fs_read_paths"), ("plugin", "sandbox", "fs_write_paths")
    assert spec.paths == (
        PathRequest("/usr/bin/chromium", "read", False, (*read_at, 0)),
        PathRequest("/etc/ssl/certs", "read", False, (*read_at, 1)),
        PathRequest("${state_dir}", "write", True, (*write_at, 0)),
        PathRequest("${state_dir}/cache", "write", True, (*write_at, 1)),
        PathRequest("/srv/data", "write", True, (*write_at, 2)),
    )
    assert spec.seccomp == "compat"
    assert spec.limits == Limits(
        memory=256 << 20,
        pids=20,
        cpu=0.5,
        cpu_time=60.0,
        io=10 << 20,
        open_files=64,
        file_size=1 << 30,
        locked_memory=1 << 20,
        message_queues=64 << 10,
        disk=1 << 30,
        tmp=16 << 20,
        shm=16 << 20,
        output=1 << 20,
        output_lines=500,
        launch=5.0,
        handshake=2.5,
        call=60.0,
        idle=3600.0,
        teardown=0.5,
        deadline=30.0,
    )
    assert None not in spec.limits  # or a limit has been forgotten here
    places = dict(spec.where)
    assert places["seccomp"] == ("plugin", "sandbox", "seccomp")
    assert places["memory"] == ("plugin", "limits", "memory")


@pytest.mark.parametrize(
    ("written", "limits", "word"),
    [
        ("cpu_pct = 50", Limits(cpu=0.5), "cpu_pct"),
        ("cpu_pct = 250", Limits(cpu=2.5), "cpu_pct"),
        ("cpu_pct = 12.5", Limits(cpu=0.125), "cpu_pct"),
        ("mem_mb = 256", Limits(memory=256 << 20), "mem_mb"),
        ("startup_timeout_ms = 1500", Limits(handshake=1.5), "startup_timeout_ms"),
        ("handshake = 1.5", Limits(handshake=1.5), "handshake"),
    ],
)
def test_the_contracts_own_words_for_limits(written: str, limits: Limits, word: str) -> None:
    spec = plugin(f"[plugin.limits]\n{written}\n").spec
    assert spec.limits == limits
    [name] = [name for name, amount in limits._asdict().items() if amount is not None]
    assert spec.where == ((name, ("plugin", "limits", word)),)
    assert jsonschema.Draft202012Validator(_schema()).is_valid(
        tomllib.loads(HEAD + f"[plugin.limits]\n{written}\n")
    )


@pytest.mark.parametrize(
    ("own", "ours"),
    [
        ("cpu_pct = 50", "cpu = 0.5"),
        ("mem_mb = 256", "memory = '256M'"),
        ("startup_timeout_ms = 1500", "handshake = 1.5"),
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_both_words_for_one_limit_are_an_error_at_the_second(own: str, ours: str, swapped: bool) -> None:
    first, second = (ours, own) if swapped else (own, ours)
    found, diagnostics = read(HEAD + f"[plugin.limits]\n{first}\n  {second}\n")
    [fault] = [diagnostic for diagnostic in diagnostics if diagnostic.severity == "error"]
    names = [line.partition(" ")[0] for line in (first, second)]
    assert found is None
    assert fault.message == f"{names[0]} and {names[1]} set the same limit"
    assert (fault.rule, fault.line, fault.column) == ("limit_twice", HEAD.count("\n") + 3, 3)


@pytest.mark.parametrize(
    ("written", "mode"), [("", "none"), ('network = "deny"', "none"), ('network = "host"', "host")]
)
def test_networks(written: str, mode: str) -> None:
    network = plugin(SANDBOX + written).spec.network
    assert network is not None and network.mode == mode


def test_a_disabled_sandbox_asks_for_nothing_but_its_limits_count() -> None:
    found = plugin(
        '[plugin.sandbox]\nenabled = false\nnetwork = "host"\nfs_read_paths = ["/root", "rel"]\n'
        '[plugin.limits]\nmemory = "1G"\n[plugin.requires]\nenv = ["A"]\n'
    )
    assert not found.spec.enabled and not found.spec.paths and found.spec.network is None
    assert found.spec.limits.memory == 1 << 30
    assert found.spec.env == (EnvRequest("A", None, False, ("plugin", "requires", "env", 0)),)


def test_a_user_that_is_not_dropped_is_a_warning() -> None:
    _, diagnostics = read(HEAD + SANDBOX + "drop_user = false\n")
    assert "drop_user_ignored" in [d.rule for d in diagnostics if d.severity == "warning"]


@pytest.mark.parametrize(
    "text",
    [
        "[plugin.supervisor]\nmax_attempts = 0\nbackoff_ms = 1\n",  # only counts with respawn
        "[plugin.supervisor]\nrespawn = true\nbackoff_ms = 300000\nstderr_tail_lines = 512\n",
        '[plugin.extends]\ntools = ["ext_demo_a", "demo_b"]\n',
        '[plugin.capabilities]\nprovides = ["hooks", "llm_providers"]\n',
        SANDBOX + 'fs_read_paths = ["/etc/ssl/certs", "/etc/shadow_backup", "/rootfs", "/var/lib/x"]\n',
    ],
)
def test_manifests_that_are_allowed_to_be_odd(text: str) -> None:
    plugin(text)


EVERY_TABLE = (
    HEAD
    + """\
enabled_by_default = false
[plugin.entrypoint]
command = "./bin/demo"
args = ["--stdio"]
env = { A = "1" }
[plugin.requires]
bins = ["git"]
env = ["TOKEN"]
features = ["x"]
nexo_capabilities = ["broker"]
[plugin.capabilities]
provides = ["tools", "advisors", "agents", "skills", "channels", "hooks", "mcp_servers", "webhooks", \
"poller_drivers", "llm_providers"]
skills = ["search"]
[plugin.capabilities.admin]
required = ["a"]
optional = ["b"]
[plugin.capabilities.http_server]
port = 8765
bind = "127.0.0.1"
token_env = "TOKEN"
health_path = "/healthz"
extra_env_passthrough = ["X"]
[plugin.capabilities.broker]
subscribe = ["plugin.outbound.demo.>"]
publish = []
[[plugin.channels.register]]
kind = "demo"
adapter = "DemoAdapter"
[plugin.extends]
channels = ["demo_channel"]
llm_providers = ["demo_llm"]
memory_backends = ["demo_memory"]
hooks = ["demo_hook"]
tools = ["demo_click"]
[plugin.tools]
expose = ["demo_a", "demo_b"]
deferred = ["demo_b"]
[[plugin.tools.outbound]]
name = "demo_a"
description = "does a"
input_schema = '{"type": "object"}'
rpc_method = "outbound_tool.invoke"
timeout_ms = 1000
[plugin.supervisor]
stderr_tail_lines = 64
respawn = true
max_attempts = 5
backoff_ms = 1000
[plugin.sandbox]
enabled = true
network = "deny"
fs_read_paths = []
fs_write_paths = ["${state_dir}"]
drop_user = true
[plugin.config]
schema_path = "schema.json"
hot_reload = true
[plugin.config_schema]
shape = "array"
schema = '{"type": "object"}'
hot_reload = false
[plugin.credentials_schema]
enabled = true
accounts_shape = "array"
[plugin.subscriptions]
broker_topics = ["a.*"]
[plugin.pairing]
kind = "qr"
label = "Demo"
rpc_namespace = "demo"
instance_field = "instance"
[plugin.pairing.instructions]
en = "Scan."
[plugin.pairing.adapter]
channel_id = "demo"
broker_topic_prefix = "plugin.demo"
format_challenge_text_kind = "default"
normalize_cache_ttl_seconds = 60
[plugin.pairing.trigger]
start_method = "nexo/admin/demo/start"
cancel_method = "nexo/admin/demo/cancel"
timeout_seconds = 120
[[plugin.pairing.fields]]
name = "instance"
label = "Name"
help = "h"
sensitive = false
placeholder = "p"
required = true
[plugin.http]
mount_prefix = "/demo"
timeout_seconds = 30
[plugin.http_server]
port_env = "PORT"
anything = { goes = true }
[plugin.admin]
method_prefix = "nexo/admin/demo/"
broker_topic_prefix = "plugin.demo.admin"
timeout_seconds = 15
[plugin.admin_ui]
schema_version = 1
mode = "declarative"
describe = false
[[plugin.admin_ui.contributions]]
id = "demo-settings"
slot = "core.sidebar.integrations"
label = { en = "Demo" }
icon = "mail"
order = 1000
screen = "main"
visible_when = "true"
[[plugin.admin_ui.contributions]]
id = "demo-more"
parent = "demo-settings"
label = "More"
[[plugin.admin_ui.screens]]
id = "main"
title = "Main"
load = "nexo/admin/demo/load"
refresh = { method = "nexo/admin/demo/refresh", interval_seconds = 5 }
[[plugin.admin_ui.screens.fields]]
key = "host"
type = "select"
label = "Host"
required = true
help = "h"
placeholder = "p"
visible_when = "true"
options = [{ value = "a", label = "A" }]
options_source = { kind = "static" }
[[plugin.admin_ui.screens.actions]]
id = "save"
label = "Save"
method = "nexo/admin/demo/save"
confirm = "Sure?"
on_success = "toast"
[[plugin.admin_ui.screens.actions.prompt_fields]]
key = "k"
type = "text"
label = "K"
[plugin.metrics]
prometheus = true
broker_topic_prefix = "plugin.demo"
timeout_seconds = 5
[plugin.dashboard.layout]
kind = "workspace_walk"
subdir = "demo"
[plugin.dashboard.auth_check]
kind = "session_dir_files"
candidates = ["x"]
[plugin.poller]
kinds = ["demo"]
broker_topic_prefix = "plugin.poller.demo"
lifecycle = "long_lived"
max_concurrent_ticks = 4
tick_timeout_secs = 60
[plugin.public_tunnel]
enabled = true
close_on_event = "plugin.demo.paired"
[plugin.agents]
contributes_dir = "agents"
allow_override = false
[plugin.skills]
contributes_dir = "skills"
[plugin.advisors]
register = ["DemoAdvisor"]
[[plugin.capability_gates.gate]]
extension = "demo"
env_var = "DEMO_SEND"
kind = "Boolean"
risk = "High"
effect = "Sends."
hint = "export DEMO_SEND=1"
[plugin.ui.fields."demo.api_key"]
label = "Key"
help = "h"
tags = ["t"]
advanced = true
sensitive = true
placeholder = "p"
[plugin.contracts]
provides = ["x"]
consumes = ["y"]
[plugin.meta]
author = "A"
license = "MIT"
homepage = "https://example.com"
repository = "https://example.com/r"
[plugin.limits]
memory = "1G"
"""
)


def test_every_table_and_key_of_the_schema_is_accepted_without_a_word() -> None:
    found, diagnostics = read(EVERY_TABLE)
    assert [d.text() for d in diagnostics] == []
    assert found is not None
    assert dict(found.exports) == {
        "channels": ("demo", "demo_channel"),
        "llm_providers": ("demo_llm",),
        "memory_backends": ("demo_memory",),
        "hooks": ("demo_hook",),
        "tools": ("demo_a", "demo_b", "demo_click"),
        "extends.tools": ("demo_click",),
        "broker.subscribe": ("plugin.outbound.demo", "plugin.outbound.demo.>"),
        "broker.publish": ("plugin.inbound.demo", "plugin.inbound.demo.>"),
    }
    assert exports.configuration_of(found) == (True, '{"type": "object"}')
    assert exports.outbound_tools_of(found) == {
        "demo_a": ("outbound_tool.invoke", 1.0, "does a", '{"type": "object"}')
    }


def test_the_manifest_of_every_table_really_has_every_key_of_the_model() -> None:
    """So that a key added to the model is added to the test."""
    data = tomllib.loads(EVERY_TABLE)["plugin"]
    own = {"network_allowlist", "seccomp"}
    for name, field in tables.PluginTable.model_fields.items():
        assert name in data
        table = model._bare(field.annotation)
        if hasattr(table, "model_fields"):
            keys = {inner.alias or key for key, inner in table.model_fields.items()}
            assert keys - own == set(data[name]) - own, name


# --- versions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requirement", "met"),
    [
        (">=0.1.0", True),
        (">=0.2.0", True),
        (">0.2.0", False),
        (">0.1", True),
        (">0.2", False),
        ("^0.2", True),
        ("^0.1.0", False),
        ("0.2", True),
        ("0.1", False),
        ("~0.2.0", True),
        ("~0", True),
        ("=0.2.0", True),
        ("=0.2.0-rc.1", False),
        (">=0.2.0-rc.1", True),
        (">0.2.0-rc.1", True),
        ("<0.2.0", False),
        ("<=0.2", True),
        ("<=0.1", False),
        (">=0.1.0, <0.3", True),
        (">=0.1.0, <0.2", False),
        ("*", True),
        ("0.*", True),
        ("0.2.x", True),
        ("0.1.*", False),
        ("^0.0.3", False),
    ],
)
def test_requirements(requirement: str, met: bool) -> None:
    assert rules.NEXO_VERSION == (0, 2, 0)
    assert admits(requirement, rules.NEXO_VERSION) is met


@pytest.mark.parametrize(
    "text", ["", " ", "latest", ">=", "1.2.3.4", ">= 1 2", "1.*.3", "01.2.3", ",", ">=1," * 40]
)
def test_wrong_version_requirements_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not|has"):
        admits(text, rules.NEXO_VERSION)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("1.2.3", True),
        ("1.2.3-rc.1+b.5", True),
        ("0.0.0", True),
        ("1.2", False),
        ("v1.2.3", False),
        ("01.2.3", False),
    ],
)
def test_versions(text: str, right: bool) -> None:
    assert is_version(text) is right


# --- for editors ----------------------------------------------------------------------------------


def _schema() -> Any:
    return manifest.json_schema()


def test_the_schema_is_a_schema_and_agrees_with_the_reader() -> None:
    jsonschema.Draft202012Validator.check_schema(_schema())
    validator = jsonschema.Draft202012Validator(_schema())
    assert validator.is_valid(tomllib.loads(EVERY_TABLE))
    assert validator.is_valid(tomllib.loads(HEAD + "novelty = 1\n"))
    assert not validator.is_valid(tomllib.loads(HEAD + "[plugin.novelty]\nx = 1\n"))
    assert not validator.is_valid(tomllib.loads(HEAD + "[plugin.sandbox]\nnope = 1\n"))
    assert not validator.is_valid(tomllib.loads(HEAD + "[plugin.limits]\npids = []\n"))
    assert not validator.is_valid(tomllib.loads(HEAD + "[plugin.limits]\nmem_mb = '1'\n"))
    assert not validator.is_valid(tomllib.loads(HEAD + "[plugin.limits]\nmemroy = 1\n"))
    assert not validator.is_valid({"plugin": {}})


def test_every_table_of_the_schema_has_a_description() -> None:
    assert all(table.get("description") for table in _schema()["$defs"].values())
