"""The process between a session and its plugin: what it says, whose death it follows, who follows its own."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.launch.carry_out import CalledOff
from runner.launch.remote import control as controls
from runner.launch.remote import monitor
from runner.launch.remote.control import Control, Interruptible
from runner.launch.remote.messages import Born, Launched, LaunchOrder, decode_order
from runner.launch.stages import Invocation
from runner.outcome import Failure
from sandbox.spec import Limits, Overrides
from sandbox.speed.codec import encode
from tests import elsewhere
from tests.conftest import Caller, vanished
from tests.limits.cage import Box
from tests.runner.launch import monitored_plugins
from tests.runner.launch.monitored_plugins import CAT, SLEEPS, holding, in_cage, invocation, line, summed
from tests.tables import wait_for


@pytest.fixture
def box(runner_as: Caller, plugin_dir: Path, nothing_left: None) -> Box:
    runner_as.give(plugin_dir)
    return Box(runner_as, plugin_dir)


def test_an_order_arrives_as_it_was() -> None:
    asked = Invocation(
        "a/b",
        "nexo",
        None,
        "strict",
        "/state",
        ("--x", "\udcff"),
        Overrides((("A", "1"), ("B", "")), ("C",), Limits(memory=1 << 40, cpu=0.5, deadline=1.25)),
    )
    order = LaunchOrder(asked, {"PATH": "/bin", "ODD": "\udce9 é \n"}, "/tmp/\udcff", 12345.678901234, True)
    assert decode_order(encode(order)) == order
    smallest = LaunchOrder(Invocation("m"), {}, "/", 0.0)
    assert decode_order(encode(smallest)) == smallest
    assert encode(order).isascii()


# --- the socket --------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[Control, socket.socket]]:
    ours, theirs = socket.socketpair()
    control = Control(ours.detach())
    with theirs:
        yield control, theirs
    control._socket.close()


def test_numbers_are_orders(pair: tuple[Control, socket.socket]) -> None:
    control, host = pair
    assert (control.read_orders(), control.over, control.is_called()) == ([], False, False)
    host.send(b"\x0f\x00\x09\xff\x40")
    assert control.is_called()
    assert control.read_orders() == [15, 9, 64]  # what is no signal is no order
    assert (control.read_orders(), control.over) == ([], False)
    host.shutdown(socket.SHUT_WR)
    assert control.is_called()
    assert (control.read_orders(), control.over) == ([], True)


def test_a_host_that_is_gone_with_our_words_unread(pair: tuple[Control, socket.socket]) -> None:
    control, host = pair
    assert control.tell(Born(1))
    host.close()
    assert control.is_called()
    assert (control.read_orders(), control.over) == ([], True)
    assert not control.tell(Launched({}))  # and no signal kills us for it


def test_a_lack_of_memory_is_not_a_host_that_is_gone(pair: tuple[Control, socket.socket]) -> None:
    class Full:
        def send(self, *_: object) -> int:
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))

    control, _ = pair
    real, control._socket = control._socket, Full()  # type: ignore[assignment]
    try:
        control.mention(Born(1))  # the host can do without
        with pytest.raises(OSError, match="No buffer space"):
            control.tell(Launched({}))
    finally:
        control._socket = real


def test_a_host_that_does_not_listen(
    pair: tuple[Control, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    control, host = pair
    monkeypatch.setattr(controls, "TELL_SECONDS", 0.1)
    assert control.tell(Launched({"x" * 1000: 1.0}))
    assert not control.tell(Launched({"x" * (8 << 20): 1.0}))
    host.setblocking(False)
    assert json.loads(host.recv(1 << 16).splitlines()[0]) == ["Launched", {"x" * 1000: 1.0}, 0]


def test_a_word_of_the_host_interrupts_what_hangs(pair: tuple[Control, socket.socket]) -> None:
    """Before the launch: whatever we wait for then, nobody else does."""
    control, host = pair
    before = Interruptible(control)
    old = signal.getsignal(signal.SIGIO)
    pid = 0
    try:
        before.start()
        control.tell(Born(1))
        host.recv(100)  # signals that there is room; nothing was said
        waiting = Path(f"/proc/{os.getpid()}/stat")
        pid = os.fork()
        if pid == 0:
            wait_for(lambda: waiting.read_text().rpartition(")")[2].split()[0] == "S")
            host.send(b"\x09")
            os._exit(0)
        with pytest.raises(CalledOff):
            time.sleep(60)
    finally:
        before.stop()
        signal.signal(signal.SIGIO, old)
        if pid:
            os.waitpid(pid, 0)
    with pytest.raises(CalledOff):
        before.look()
    assert monitor._called_off(control)[0].cause == "signal:9"
    before.look()  # it has been taken
    host.close()
    with pytest.raises(CalledOff):
        before.look()
    assert monitor._called_off(control)[0].cause == "caller_died"


def test_a_launch_that_others_wait_for_is_bounded(pair: tuple[Control, socket.socket]) -> None:
    control, _ = pair
    before = Interruptible(control)
    old = signal.getsignal(signal.SIGIO), signal.getsignal(signal.SIGALRM)
    try:
        with pytest.raises(Failure, match="too long to prepare"):  # noqa: PT012 -- the clock runs at once
            before.start(0.1)
            time.sleep(60)
        before.stop()
        before.start(1000.0)
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0  # the control
        before.stop()
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0  # nothing is raised any more
    finally:
        before.stop()
        signal.signal(signal.SIGIO, old[0])
        signal.signal(signal.SIGALRM, old[1])


# --- without trio ------------------------------------------------------------------------------------------


def spoken(given: dict[str, Any]) -> list[Any]:
    """All a monitor says of a plugin that ends at once; or of an order that is none."""
    import os

    from runner.launch.remote import forkserver
    from runner.launch.remote.messages import MESSAGES
    from sandbox.speed.codec import decode

    ticket = forkserver.LaunchTicket(invocation(given), environ={"PATH": "/usr/bin:/bin"})
    if given.get("spoil"):
        assert ticket._given is not None
        os.truncate(ticket._given.order, 10)
    ticket.send(forkserver.current())
    with open(ticket.control, "rb", closefd=False) as control:
        messages = [decode(text, MESSAGES) for text in control]
    told = [[type(message).__name__, message._asdict()] for message in messages]
    ticket.close()
    forkserver.close()
    return told


def test_what_is_said_in_which_order(box: Box) -> None:
    told = monitored_plugins.run(box, spoken, monitored_plugins.given(box, "#!/bin/sh\nexit 4\n"))
    assert [kind for kind, _ in told] == ["Born", "Born", "Terms", "Launched", "MonitorEnd"]
    planner, monitor, terms, launched, ended = (fields for _, fields in told)
    assert planner != monitor
    assert terms["unsandboxed"] is False
    assert list(launched["timings"]) == ["manifest", "policy", "plan", "launch"]
    assert ended["status"] == 4
    assert ended["explanation"] == ["runner: crashed: the plugin ended with status 4"]
    monitored_plugins.is_sound(json.loads(ended["report_json"]))


def test_an_order_that_is_none(box: Box) -> None:
    told = monitored_plugins.run(box, spoken, monitored_plugins.given(box, CAT, spoil=True))
    assert [kind for kind, _ in told] == ["Born", "MonitorEnd"]
    ended = told[1][1]
    assert ended["outcome"][0] == "internal" and json.loads(ended["report_json"])["plugin"] is None
    assert ended["explanation"][0].startswith("runner: internal: ")


def test_a_birth_that_cannot_be_told(box: Box) -> None:
    """There is no memory for the message. Who waits for the receipt goes on, and nothing stays open."""

    def unborn() -> list[Any]:
        import errno
        import os
        import socket

        from runner.launch.remote import control, monitor
        from runner.launch.remote.messages import MESSAGES, Born, LaunchDescriptors
        from runner.launch.wait import drive
        from sandbox.speed.codec import decode

        real = control.Control.telling

        def telling(self: Any, message: Any) -> Any:
            if isinstance(message, Born):
                raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
            return real(self, message)

        setattr(control.Control, "telling", telling)  # noqa: B010 -- a method
        host, ours = socket.socketpair()
        receipt, theirs = socket.socketpair()
        order = os.memfd_create("order")
        os.write(order, b"no plan")
        before = len(os.listdir("/proc/self/fd"))
        given = {"control": ours.detach(), "order": order}
        rest = {name: os.dup(0) for name in LaunchDescriptors._fields if name not in given}
        drive(monitor.serve(LaunchDescriptors(**given, **rest), (), receipt=theirs.detach()))
        with host.makefile("rb") as said:
            messages = [decode(line, MESSAGES) for line in said]
        told = [type(each).__name__ for each in messages]
        return [told, receipt.recv(1) == b"", len(os.listdir("/proc/self/fd")) - before]

    assert elsewhere.run(box.caller, unborn) == [["MonitorEnd"], True, -3]


def faulty(given: dict[str, Any]) -> list[Any]:
    """A monitor whose own code fails, when all is over but the telling."""
    from runner.launch.remote import forkserver, monitor
    from runner.launch.remote.messages import MESSAGES
    from sandbox.speed.codec import decode

    def report(*_: object) -> Any:
        raise KeyError("ours")

    setattr(monitor, "report", report)  # noqa: B010 -- not exported there
    made = forkserver.start_by_fork()
    assert made is not None
    ticket = forkserver.LaunchTicket(invocation(given), environ={"PATH": "/usr/bin:/bin"})
    ticket.send(made)
    with open(ticket.control, "rb", closefd=False) as control:
        messages = [decode(text, MESSAGES) for text in control]
    told = [[type(message).__name__, message._asdict()] for message in messages]
    with open(ticket.stderr, closefd=False) as stream:
        err = stream.read()
    ticket.close()
    forkserver.close()
    return [told, err]


def test_a_fault_of_ours_is_told_too(box: Box) -> None:
    told, err = monitored_plugins.run(box, faulty, monitored_plugins.given(box, "#!/bin/sh\necho mine >&2\n"))
    assert [kind for kind, _ in told] == ["Born", "Terms", "Launched", "MonitorEnd"]
    code, _, message, *_ = told[-1][1]["outcome"]
    assert (code, message) == ("internal", "KeyError: 'ours'")
    assert err == "mine\n"  # and nothing of ours where only the plugin speaks


def early(given: dict[str, Any], how: str) -> list[Any]:
    """Ordered, and called off before the fork server has even looked."""
    import signal

    import trio

    from runner.launch.remote import forkserver
    from runner.launch.remote.remote_cell import aclose_forkserver, open_cage

    async def main() -> list[Any]:
        taker = forkserver.current()
        signal.pidfd_send_signal(taker.pidfd, signal.SIGSTOP)
        async with open_cage(invocation(given), environ={"PATH": "/usr/bin:/bin"}) as cage:
            if how == "signal":
                cage.signal(15)
            elif how == "killed":
                signal.pidfd_send_signal(taker.pidfd, signal.SIGKILL)
            signal.pidfd_send_signal(taker.pidfd, signal.SIGCONT)
            ended = summed(await cage.ended())
        await aclose_forkserver()
        return [ended]

    return trio.run(main)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("signal", ["cancelled", "launch", "signal:15", 143]),
        ("killed", ["launch_failed", "launch", "spawn", 125]),
        ("", ["ok", "run", "", 0]),
    ],
)
def test_called_off_before_it_began(box: Box, how: str, expected: list[Any]) -> None:
    mark = box.folder / "marks" / "ran"
    mark.parent.mkdir()
    mark.parent.chmod(0o777)
    policy = f'version = 1\n[write]\nceiling = ["{mark.parent}"]\n'
    code = f"#!/bin/sh\ntouch {mark}\n"
    given = monitored_plugins.given(box, code, policy=policy, write=(str(mark.parent),))
    assert monitored_plugins.run(box, early, given, how) == [expected]
    assert mark.exists() is (how == "")


# --- whose death ends whom ---------------------------------------------------------------------------------


def test_a_host_that_is_killed_takes_its_plugin_along(box: Box) -> None:
    with monitored_plugins.host(box, monitored_plugins.given(box, SLEEPS)) as host:
        family = host.plugin | {host.monitor, host.forkserver}
        assert len(family) >= 6  # init, two bwraps, the program
        host.process.kill()
        assert vanished(family, 30)


def test_also_if_a_child_of_the_host_lives_on(box: Box) -> None:
    """It has a copy of the control socket, so that nobody sees that one closed."""
    with monitored_plugins.host(box, monitored_plugins.given(box, SLEEPS, child=True)) as host:
        assert monitored_plugins.settled(lambda: len(monitored_plugins.below(host.process.pid)) < 2) is False
        (child,) = set(monitored_plugins.below(host.process.pid)) - {host.forkserver}
        family = host.plugin | {host.monitor}
        host.process.kill()
        assert vanished(family, 30)
        assert not vanished({child}, 0.0)  # else nothing was shown
        os.kill(child, signal.SIGKILL)


def test_a_monitor_that_is_killed_takes_its_plugin_along(box: Box) -> None:
    with monitored_plugins.host(box, monitored_plugins.given(box, SLEEPS)) as host:
        family = host.plugin
        os.kill(host.monitor, signal.SIGKILL)
        assert vanished(family | {host.monitor}, 30)
        assert host.ended() == ["internal", "run", "monitor", 125]


def stopped(given: dict[str, Any]) -> int:
    """The monitor is stopped for good while its cage is open. Who it was."""
    import os
    import signal
    import sys

    import trio

    from runner.launch.remote import remote_cell as module

    vars(module).update(KILL_SECONDS=1.0, _MARGIN_SECONDS=1.0)

    async def act(cage: Any) -> int:
        await line(cage.stdout)
        os.write(1, b"%d\n" % cage._pid)
        await trio.to_thread.run_sync(sys.stdin.readline)
        os.kill(cage._pid, signal.SIGSTOP)
        return int(cage._pid)

    return int(in_cage(given, act))


def test_a_monitor_that_does_not_answer_is_ended(box: Box) -> None:
    """And its plugin with it, which would not end by itself."""
    given = monitored_plugins.given(box, SLEEPS)
    with elsewhere.start(
        box.caller, stopped, given, using=monitored_plugins.TRAVEL, stdin=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        init = monitored_plugins.below(pid := int(elsewhere.line(process)))
        assert len(init) == 1
        process.stdin.write(b"\n")
        assert int(elsewhere.line(process, 60)) == pid
    assert vanished({pid, *init}, 30)


def test_a_monitor_obeys_its_host_only(box: Box) -> None:
    with monitored_plugins.host(box, monitored_plugins.given(box, SLEEPS)) as host:
        family = host.plugin
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            os.kill(host.monitor, number)
        os.kill(host.init, signal.SIGKILL)  # what comes of that is told, so it lives to tell
        assert vanished(family, 30)
        code, phase, _, _ = host.ended()
        assert (code, phase) == ("crashed", "run")


def test_a_stopped_host_does_not_stop_the_clock(box: Box) -> None:
    given = monitored_plugins.given(box, SLEEPS, limits={"deadline": 5.0})
    with monitored_plugins.host(box, given) as host:
        family = host.plugin
        os.kill(host.process.pid, signal.SIGSTOP)
        assert vanished(family | {host.monitor}, 60)  # told, with nobody listening, and gone
        os.kill(host.process.pid, signal.SIGCONT)
        assert host.ended() == ["timeout", "invocation", "deadline", 124]


def test_a_terminals_interrupt_is_not_for_plugins(box: Box) -> None:
    """^C goes to everybody in the foreground; the host decides what it means for its plugins."""

    def heedless(given: dict[str, Any]) -> None:
        import signal

        signal.signal(signal.SIGINT, signal.SIG_IGN)
        holding(given)

    given = monitored_plugins.given(box, "#!/bin/sh\necho runs\nread word\nexit 6\n")
    process = elsewhere.start(
        box.caller,
        heedless,
        given,
        using=(*monitored_plugins.TRAVEL, holding),
        stdin=-1,
        start_new_session=True,
    )
    with process:
        try:
            host = monitored_plugins.Host(process)
            own = os.getpgid(process.pid)
            others = host.plugin | {host.monitor, host.forkserver}
            assert own == process.pid
            assert all(os.getpgid(pid) != own and os.getsid(pid) != own for pid in others)
            os.killpg(own, signal.SIGINT)
            os.kill(host.forkserver, signal.SIGINT)  # not even there
            assert not vanished({host.init}, 0.3)
            assert not vanished({host.forkserver}, 0.1)
        finally:
            process.kill()


def test_a_monitor_has_nothing_of_the_plugins_streams(box: Box) -> None:
    """Or the host would never see their end; and what a monitor printed would be the plugin's word."""
    with monitored_plugins.host(box, monitored_plugins.given(box, SLEEPS)) as host:
        held = monitored_plugins.descriptors(host.monitor)
        assert {held[number] for number in (0, 1, 2)} == {"/dev/null"}
        pipes = {
            name
            for name in monitored_plugins.descriptors(host.process.pid).values()
            if name.startswith("pipe:")
        }
        assert pipes and not pipes & set(held.values())
        init = monitored_plugins.descriptors(host.init)
        assert not pipes & set(init.values())
