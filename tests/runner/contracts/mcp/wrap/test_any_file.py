"""Wrap and undo on generated files: the identity, and nothing but command lines changes in between."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
from hypothesis import assume, given

from runner.contracts.mcp.launchers import launcher_fault
from runner.contracts.mcp.wrap.changes import apply_steps
from runner.contracts.mcp.wrap.configuration import Configuration, configuration
from runner.contracts.mcp.wrap.steps import is_safe, plugin_words, undo_step, wrap_step
from sandbox.document.edit.words import encode_word

WORDS = st.text(
    st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp"), exclude_characters="\ufeff"), max_size=8
)
NAMES = st.text("abcdefgh-_. é", min_size=1, max_size=6).filter(lambda name: name.strip(" ."))
VARIABLES = st.sampled_from(
    ["A", "TOKEN", "_x", "PATH2", "LD_PRELOAD", "PLUGIN_ENV_A", "a-b", "é", "0", "x y"]
)
BLANKS = st.sampled_from(["", " ", "\n", "\n\t", "\r\n    ", "  "])
COMMENTS = st.sampled_from(["", "", '// c, "x" ]\n', "/* } */", "/**/ ", "// ü\r\n"])


@st.composite
def entries(draw: st.DrawFn) -> dict[str, Any]:
    entry: dict[str, Any] = {"command": "/opt/" + draw(WORDS).replace(" ", "")}
    if draw(st.booleans()):
        entry["args"] = draw(st.lists(WORDS, max_size=4))
    if draw(st.booleans()):
        entry["env"] = draw(st.dictionaries(VARIABLES, WORDS, max_size=3))
    if draw(st.booleans()):
        entry["timeout"] = draw(st.integers(-9, 10**9))
    return dict(draw(st.permutations(list(entry.items()))))


SERVERS = st.dictionaries(NAMES, entries(), min_size=1, max_size=3)


# --- JSON with comments -----------------------------------------------------------------------------------


@st.composite
def jsonc_texts(draw: st.DrawFn) -> str:
    def gap() -> str:
        return draw(BLANKS) + draw(COMMENTS) + draw(BLANKS)

    def word(value: str) -> str:
        return json.dumps(value, ensure_ascii=draw(st.booleans()))

    def text(value: Any) -> str:
        if isinstance(value, dict):
            parts = [f"{gap()}{word(key)}{gap()}:{gap()}{text(item)}{gap()}" for key, item in value.items()]
            return "{" + ",".join(parts) + (draw(st.sampled_from(["", ","])) if parts else gap()) + "}"
        if isinstance(value, list):
            parts = [f"{gap()}{text(item)}{gap()}" for item in value]
            return (
                "[" + ",".join(parts) + (draw(st.sampled_from(["", ","])) if parts else gap()) + gap() + "]"
            )
        return word(value) if isinstance(value, str) else json.dumps(value)

    data = {"a": 1, "mcpServers": draw(SERVERS), "z": [True, None]}
    return gap() + text(data) + gap()


@given(jsonc_texts())
def test_jsonc(text: str) -> None:
    check("/x/mcp.json", text)


# --- TOML ---------------------------------------------------------------------------------------------------


@st.composite
def toml_texts(draw: st.DrawFn) -> str:
    end = draw(st.sampled_from(["\n", "\r\n"]))

    def word(value: str) -> str:
        if "'" not in value and value.isprintable() and draw(st.booleans()):
            return f"'{value}'"
        return encode_word(value, "toml")

    def scalar(value: Any) -> str:
        if isinstance(value, list):
            comment = draw(st.sampled_from(["", f" # c ], {end}"]))
            if draw(st.booleans()) or comment:
                between = f",{comment or end}  "
                return f"[{comment}{end} " + between.join(map(scalar, value)) + f"{end}]"
            return "[" + ", ".join(map(scalar, value)) + "]"
        if isinstance(value, dict):
            return "{ " + ", ".join(f"{key(name)} = {scalar(item)}" for name, item in value.items()) + " }"
        return word(value) if isinstance(value, str) else str(value)

    def key(name: str) -> str:
        return (
            name if name.isalnum() and name.isascii() and draw(st.booleans()) else encode_word(name, "toml")
        )

    lines = ["# a file", 'model = "m"', ""]
    tables: list[str] = []
    inline: list[str] = []
    for name, entry in draw(SERVERS).items():
        style = draw(st.sampled_from(["table", "inline", "dotted"]))
        behind = draw(st.sampled_from(["", " # c", "  "]))
        if style == "table":
            tables += [f"[ mcp_servers . {key(name)} ]{behind}"]
            own = [(each, value) for each, value in entry.items() if each != "env"]
            tables += [f"{key(each)} = {scalar(value)}{behind}" for each, value in own]
            if "env" in entry:
                tables += [f"[mcp_servers.{key(name)}.env]"]
                tables += [f"{key(each)} = {scalar(value)}" for each, value in entry["env"].items()]
        elif style == "inline":
            inline += [f"{key(name)} = {inline_table(entry, key, scalar)}"]
        else:
            shown = key(name)
            inline += [f"{shown}.{each} = {scalar(value)}{behind}" for each, value in entry.items()]
    lines += ["[mcp_servers]", *inline, *tables] if inline else tables
    return end.join(lines) + draw(st.sampled_from(["", end]))


def inline_table(entry: dict[str, Any], key: Any, scalar: Any) -> str:
    return "{" + ",".join(f"{key(name)}={scalar(value)}" for name, value in entry.items()) + "}"


@given(toml_texts())
def test_toml(text: str) -> None:
    check("/x/config.toml", text)


# --- YAML ---------------------------------------------------------------------------------------------------


@st.composite
def yaml_texts(draw: st.DrawFn) -> str:
    end = draw(st.sampled_from(["\n", "\r\n"]))
    comment = st.sampled_from(["", "", " # c: [x", "  "])

    def word(value: str) -> str:
        plain = encode_word(value, "yaml")
        if plain == value and draw(st.booleans()):
            return f"'{value}'" if draw(st.booleans()) else json.dumps(value)
        return plain

    def flow(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{word(name)}: {flow(item)}" for name, item in value.items()) + "}"
        if isinstance(value, list):
            return "[" + draw(st.sampled_from(["", " "])) + ", ".join(map(flow, value)) + "]"
        return word(value) if isinstance(value, str) else str(value)

    def block(value: dict[str, Any], indent: str, first: str) -> list[str]:
        lines: list[str] = []
        for name, item in value.items():
            start = first if not lines else indent
            if isinstance(item, dict | list) and (not item or draw(st.booleans())):
                lines.append(f"{start}{word(name)}: {flow(item)}{draw(comment)}")
            elif isinstance(item, list):
                lines.append(f"{start}{word(name)}:{draw(comment)}")
                deeper = indent + draw(st.sampled_from(["", "  "]))
                lines += [f"{deeper}- {word(each)}{draw(comment)}" for each in item]
            elif isinstance(item, dict):
                lines.append(f"{start}{word(name)}:")
                lines += block(item, indent + "  ", indent + "  ")
            else:
                shown = word(item) if isinstance(item, str) else item
                lines.append(f"{start}{word(name)}: {shown}{draw(comment)}")
        return lines

    lines = ["# a file", "name: x", "mcpServers:"]
    indent = draw(st.sampled_from(["", "  "]))
    for name, entry in draw(SERVERS).items():
        named = {"name": name, **entry} if draw(st.booleans()) else {**entry, "name": name}
        if draw(st.integers(0, 3)):
            lines += block(named, indent + "  ", indent + "- ")
        else:
            lines.append(f"{indent}- {flow(named)}")
    return end.join(lines) + draw(st.sampled_from(["", end]))


@given(yaml_texts())
def test_yaml(text: str) -> None:
    check("/x/config.yaml", text)


# --- what holds for all -------------------------------------------------------------------------------------


def check(path: str, text: str) -> None:
    mark = "\ufeff" if len(text) % 2 else ""  # every second file has a byte order mark
    raw = (mark + text).encode()
    before = configuration(path, raw, "/home/user", {})
    assert before.servers
    assume(not any(launcher_fault(each.argv) for each in before.servers))  # a command called NPX
    steps = [wrap_step(before, each, "/opt/runner") for each in before.servers]
    wrapped, done = apply_steps(before, steps, "/opt/bin/runner")
    assert [(step.does, step.reason) for step in done] == [("wrap", "")] * len(before.servers)
    after = configuration(path, wrapped, "/home/user", {})
    assert rest(before) == rest(after)
    assert all(is_safe(after, each) for each in after.servers)
    undone, done = apply_steps(after, [undo_step(each) for each in after.servers], "")
    assert [step.does for step in done] == ["undo"] * len(before.servers)
    assert undone == raw


def rest(config: Configuration) -> object:
    """The data without the command lines."""
    data = json.loads(json.dumps(config.document.data))
    for server in config.servers:
        entry = data
        for key in server.keys:
            entry = entry[key]
        del entry["command"]
        entry.pop("args", None)
        if "env" in entry:
            entry["env"] = plugin_words(config, server)
    return data
