"""A missing layer stops the launch unless the policy prefers it; every missing layer is reported."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox.plan import available_layers as module
from sandbox.plan.available_layers import available_layers
from sandbox.plan.layers import Layers, LayerUnavailable, list_layers, with_owner
from sandbox.seccomp import filter as seccomp_filter
from tests.sandbox.cages import grant, policy

BWRAP = "/usr/bin/bwrap"


def available(prefer: str = "", *, keyring: bool = True) -> Layers:
    rules = policy(layers=((prefer, "prefer"),) if prefer else ())
    return available_layers(grant(), rules, BWRAP, can_join_keyring=keyring)


def no_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(profile: str) -> bytes:
        raise seccomp_filter.SeccompUnavailable("no table for this machine")

    monkeypatch.setattr(seccomp_filter, "filter_bytes", missing)


def no_cgroup_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    there = os.path.lexists
    monkeypatch.setattr(os.path, "lexists", lambda path: path != "/proc/self/ns/cgroup" and there(path))


def unmapped_uids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(module, "usable_range", lambda wanted: None)


LACKS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "seccomp": no_filter,
    "cgroup_namespace": no_cgroup_namespace,
    "uid": unmapped_uids,
    "session_keyring": lambda monkeypatch: None,
}


@pytest.mark.parametrize("layer", LACKS)
def test_a_missing_layer_stops_the_launch(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    LACKS[layer](monkeypatch)
    with pytest.raises(LayerUnavailable) as caught:
        available(keyring=layer != "session_keyring")
    assert caught.value.layer == layer
    assert f'{layer} = "prefer" under [layers]' in caught.value.hint


@pytest.mark.parametrize("layer", LACKS)
def test_a_missing_layer_does_not_stop_the_launch_if_the_policy_prefers_it(
    layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    LACKS[layer](monkeypatch)
    found = available(layer, keyring=layer != "session_keyring")
    rows = {row.name: row for row in list_layers(found, grant(), policy())}
    assert [name for name, row in rows.items() if row.degraded] == [layer]
    assert rows[layer].effective == "NONE"
    other = next(name for name in LACKS if name != layer)
    with pytest.raises(LayerUnavailable):
        available(other, keyring=layer != "session_keyring")


def test_the_options_of_bwrap_are_read_only_if_it_matters(tmp_path: Path) -> None:
    old = tmp_path / "bwrap"
    old.write_text("#!/bin/sh\necho '    --unshare-user'\n")
    old.chmod(0o755)
    required = available_layers(grant(), policy(), "/nonexistent", can_join_keyring=True)
    assert required.user_namespace_lock  # an old one refuses the option itself
    preferred = policy(layers=(("user_namespace_lock", "prefer"),))
    assert not available_layers(grant(), preferred, str(old), can_join_keyring=True).user_namespace_lock
    assert available_layers(grant(), preferred, BWRAP, can_join_keyring=True).user_namespace_lock


def test_nothing_is_degraded_here() -> None:
    assert not [row for row in with_owner(list_layers(available(), grant(), policy()), 61200) if row.degraded]


def test_without_a_cage_most_layers_are_reported_missing() -> None:
    bare = grant()._replace(unsandboxed=True)
    rows = list_layers(available_layers(bare, policy(), BWRAP, can_join_keyring=False), bare, policy())
    held = {row.name for row in rows if not row.degraded}
    assert held == {"environment", "descriptors", "core_dumps"}
