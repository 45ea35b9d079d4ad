"""The result of `runner doctor --attack` as one HTML page: nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; --line: #ccc; --good: #17692b; --bad: #b3141f; --dim: #6b6b6b; }
@media (prefers-color-scheme: dark) {
  :root { --line: #444; --good: #6fce85; --bad: #ff7b84; --dim: #a0a0a0; } }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .6rem; text-align: left; vertical-align: top; }
td { overflow-wrap: anywhere; }
code { font-size: .9em; }
.facts { width: auto; margin-bottom: 1.5rem; }
.held { color: var(--good); }
.not_held { color: var(--bad); font-weight: bold; }
.not_counted, .note { color: var(--dim); }
@media print { body { margin: 0; max-width: none; font-size: 10px; } tr { break-inside: avoid; }
  thead { display: table-header-group; } }
"""
_SOURCES = "default-src 'none'; style-src 'unsafe-inline'"
_WORDS = {"held": "held", "not_held": "NOT HELD", "not_counted": "not counted"}


def html_page(document: Mapping[str, Any]) -> str:
    """Every text is escaped: some of it comes out of the sandbox."""
    return "\n".join(_lines(document)) + "\n"


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    count = document["count"]
    verdict = "Every attack that counts was held." if document["ok"] else "Not every attack was held."
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_SOURCES}">'
    yield f"<title>runner doctor --attack</title><style>{_STYLE}</style></head><body>"
    yield f"<h1>{escape(verdict)}</h1>"
    yield f"<p>{count['held']} held, {count['not_held']} not held, {count['not_counted']} do not count.</p>"
    yield '<table class="facts"><tbody>'
    for name, value in _facts(document):
        yield f"<tr><th>{escape(name)}</th><td><code>{escape(value)}</code></td></tr>"
    yield "</tbody></table><table><thead><tr>"
    yield from (
        f"<th>{name}</th>"
        for name in ("class", "attack", "layer that must hold", "observed", "without the layer", "verdict")
    )
    yield "</tr></thead><tbody>"
    for row in document["rows"]:
        note = "; ".join(filter(None, (row["note"], row["remedy"])))
        words = (row["class"], " ".join((row["tries"], *row["cves"])), row["layer"])
        yield "<tr>" + "".join(f"<td>{escape(word)}</td>" for word in words)
        yield "".join(f"<td><code>{escape(row[name])}</code></td>" for name in ("observed", "control"))
        yield f'<td class="{escape(row["verdict"])}">{_WORDS[row["verdict"]]}'
        yield f'<div class="note">{escape(note)}</div></td></tr>' if note else "</td></tr>"
    yield "</tbody></table></body></html>"


def _facts(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "time", document["time"]
    yield "runner", document["version"]
    yield from ((name, str(value)) for name, value in document["machine"].items())
    if "policy" in document:
        policy, bwrap = document["policy"], document["bwrap"]
        yield "policy", f"{policy['name']} ({policy['file']})"
        yield "policy's digest", policy["digest"]
        yield "bubblewrap", f"{bwrap['version']} ({bwrap['file']})"
    else:
        yield "sandbox", " ".join(document["against"])
