"""Groups that nobody else is in."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from sandbox.identity.accounts import is_private_group
from sandbox.policy.load import trust_fault

ME = os.geteuid()


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "passwd").write_text(
        f"root:x:0:0::/root:/bin/sh\nme:x:{ME}:5000::/home/me:/bin/sh\nother:x:5001:5001::/home/o:/bin/sh\n"
    )
    (tmp_path / "group").write_text(
        "me:x:5000:\nshared:x:5002:me,other\nempty:x:5003:\nmine:x:5004:me,root\nother:x:5001:\n"
    )
    return {"group": str(tmp_path / "group"), "passwd": str(tmp_path / "passwd")}


def test_a_group_with_other_members_is_not_private(files: dict[str, str]) -> None:
    private = [gid for gid in (5000, 5001, 5002, 5003, 5004, 5005) if is_private_group(gid, **files)]
    assert private == [5000, 5003, 5004]
    assert not is_private_group(5000, group="/no/such", passwd=files["passwd"])


def test_a_program_that_such_a_group_may_write(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text("")
    program.chmod(0o775)
    assert trust_fault(str(program)) is not None  # the control: no group may write a policy
    monkeypatch.setattr("sandbox.identity.accounts.is_private_group", lambda gid: gid == os.getegid())
    assert trust_fault(str(program), private_groups=True) is None
    # An access control list lets somebody else write. Its mask is where the mode has the group's rights.
    others = ((1, 7, -1), (2, 6, 4321), (4, 5, -1), (0x10, 7, -1), (0x20, 5, -1))
    entries = (struct.pack("<HHi", *entry) for entry in others)
    os.setxattr(program, "system.posix_acl_access", struct.pack("<I", 2) + b"".join(entries))
    assert program.stat().st_mode & 0o777 == 0o775
    assert trust_fault(str(program), private_groups=True) is not None
    os.removexattr(program, "system.posix_acl_access")
    program.chmod(0o775)
    assert trust_fault(str(program), private_groups=True) is None
    program.chmod(0o777)
    assert trust_fault(str(program), private_groups=True) is not None
    monkeypatch.setattr("sandbox.identity.accounts.is_private_group", lambda gid: False)
    program.chmod(0o775)
    assert trust_fault(str(program), private_groups=True) is not None
