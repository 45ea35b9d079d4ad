"""A plan as a line for bash, for people to read and try."""

from __future__ import annotations

import os

from sandbox.plan.bwrap import flat, head, tail, without_source
from sandbox.plan.plan import Bind, LaunchPlan, Operation, Text
from sandbox.spec import MemoryFile
from sandbox.typed import Mapping


def command_line(
    plan: LaunchPlan, bwrap: str, seccomp_file: str, environ: Mapping[str, str] | None = None
) -> str:
    """The same launch as a line for bash, with paths where a launch has descriptors: for people to read and
    try. A path can be swapped between two looks; that is why the runner itself does not use it. What the
    runner mounts idmapped is a plain bind here. There is no gate, and so no host can be reached.

    What exists only in memory is read from a file here, named after the secret.

    A variable that has the value it has in `environ` is named instead of shown: it may be a secret, and a
    line that is read is also pasted.
    """
    from shlex import quote as quote_printable

    def quote(word: str) -> str:
        if word.isprintable():
            return quote_printable(word)
        # A stranger's file names go to a terminal: use bash's own notation for unprintable characters.
        return "$'" + "".join(c if c.isprintable() and c not in "'\\" else _escaped(c) for c in word) + "'"

    files = [op for op in plan.operations if isinstance(op, Text | MemoryFile)]
    texts = {op.dest: fd for fd, op in enumerate(files, 11)}
    options = [
        bwrap,
        *head(plan, plan.share_network),
        *flat(_with_paths(op, texts) for op in plan.operations),
        *tail(plan._replace(env=())),
    ]
    variables = [
        f"--setenv {quote(name)} " + (f'"${name}"' if (environ or {}).get(name) == value else quote(value))
        for name, value in plan.env
    ]
    rest = [*(("--seccomp", "10") if plan.layers.seccomp_filter else ()), "--", *plan.argv]
    redirections = [f"10<{quote(seccomp_file)}"] if plan.layers.seccomp_filter else []
    for op in files:
        if isinstance(op, Text):
            content = op.content.decode(errors="replace")
            redirections.append(f"{texts[op.dest]}< <(printf %s {quote(content)})")
        else:  # a file that whoever tries the line has to bring
            redirections.append(f"{texts[op.dest]}<{quote(op.secret or os.path.basename(op.dest))}")
    return " ".join((*map(quote, options), *variables, *map(quote, rest), *redirections))


def _escaped(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))


def _with_paths(op: Operation, texts: Mapping[str, int]) -> tuple[str, ...]:
    match op:
        case Bind(dest, real, writable, _):
            return ("--bind" if writable else "--ro-bind", real, dest)
        case _:
            return without_source(op, texts)
