"""Run a command under a container's seccomp filter: python filtered.py PROFILE COMMAND...

The profile has the format of container engines. Like them, this program skips calls that libseccomp does not
know.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pyseccomp


def install(profile: dict[str, Any]) -> None:
    rules = pyseccomp.SyscallFilter(_action(profile["defaultAction"], profile.get("defaultErrnoRet")))
    for entry in profile["syscalls"]:
        action = _action(entry["action"], entry.get("errnoRet"))
        for name in entry["names"]:
            if pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name) >= 0:
                rules.add_rule(action, name, *(_argument(each) for each in entry.get("args", ())))
    rules.load()


def _action(name: str, number: int | None) -> Any:
    known = {"SCMP_ACT_ALLOW": pyseccomp.ALLOW, "SCMP_ACT_KILL_PROCESS": pyseccomp.KILL_PROCESS}
    return pyseccomp.ERRNO(number) if name == "SCMP_ACT_ERRNO" else known[name]


def _argument(argument: dict[str, Any]) -> Any:
    operator = getattr(pyseccomp, argument["op"].removeprefix("SCMP_CMP_"))
    values = (argument["value"], argument["valueTwo"]) if "valueTwo" in argument else (argument["value"],)
    return pyseccomp.Arg(argument["index"], operator, *values)


if __name__ == "__main__":
    install(json.loads(Path(sys.argv[1]).read_text()))
    os.execv(sys.argv[2], sys.argv[2:])
