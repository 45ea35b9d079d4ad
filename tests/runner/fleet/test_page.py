"""The page of a door in front of a fleet, in a browser: what workers tell, or that nobody tells it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.by import By

from runner.fleet import names, operate
from runner.fleet.client import FleetClient
from tests.conftest import Caller
from tests.runner.fleet.bus import Bus, ask, bus_in, working
from tests.runner.fleet.test_fleet import fails_if_asked
from tests.runner.serve.page.browser import Page, chromium
from tests.runner.serve.served import serving
from tests.runner.serve.shelf import put_example
from tests.tables import wait_for

pytestmark = [pytest.mark.launches, pytest.mark.needs("chromium", "nats", "user")]

MARKUP = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>\u202egnp'
WELL = "return document.querySelector('#attention .empty').hidden"


def test_the_page_of_a_fleet(
    runner_as: Caller, plugin_dir: Path, nothing_left: None, write_file: Any, tmp_path: Path
) -> None:
    (plugin_dir / "plugins").mkdir()
    put_example("mcp", "mcp7", plugin_dir / "plugins")
    fails_if_asked(plugin_dir / "plugins/mcp7/server.py")
    settings = write_file(plugin_dir / "settings.toml", "[mcp7]\nnumbers = {respawn = false}\n", 0o644)
    token = write_file(plugin_dir / "token", "t" * 43, 0o600)
    runner_as.give(token)
    options = ("--http", "127.0.0.1:0", "--token-file", str(token))
    with (
        bus_in(tmp_path / "bus") as bus,
        chromium() as browser,
        serving(runner_as, plugin_dir, "--fleet", bus.url, *options, config=False) as served,
    ):
        page = Page(browser, served, runner_as)
        browser.get(page.ctl("open"))
        page.until("#cards", "Nobody takes calls")
        page.until("#cards", "No worker tells how many the fleet has")
        with working(runner_as, plugin_dir, bus.url, "--settings", str(settings), name="w7"):
            check_all_is_well(page)
            check_nothing_is_offered_that_is_refused(page)
            check_dead_letters(page, bus)
            check_quarantine(page, bus)
            check_given_up(page, bus)
            check_hostile_worker(page, bus)
            bus.kill()
            # Nobody knows how it is. What was known before is not shown as if it were so now.
            page.until("#cards", "Nobody tells what workers, quarantines and dead letters there are")
            page.until("#memory", "not known")
            assert page.run(WELL) and cards(page) == 1 and "59 calls" not in page.text("#cards")


def check_all_is_well(page: Page) -> None:
    page.until_state("mcp7", "ready")
    page.until("#worker-rows", "w7")
    page.until("#memory", "1 of 1")
    assert wait_for(lambda: not page.run(WELL), step=0.1), page.text("#cards")
    assert page.text("#cards") == "" and page.text("#ready") == "1 of 1"
    assert page.row("mcp7", "return row.cells[2].textContent") == "on 1 worker"
    assert page.served.call("mcp7", "greet", {"name": "you"})[0] == 200
    page.until("#call-rows", "greet")


def check_nothing_is_offered_that_is_refused(page: Page) -> None:
    seen = "return [...document.querySelectorAll(arguments[0])].filter(e => e.checkVisibility()).length"
    assert page.run(seen, "#plugins button, #cards button, #logs, nav [href='#logs']") == 0
    assert page.run(seen, "#call-pause, nav [href='#fleet']") == 2  # the control
    assert 'reason="fleet"' not in page.served.ask("GET", "/metrics")[1]
    for path in ("start", "stop", "reset"):
        assert page.served.ask("POST", f"/plugins/mcp7/{path}")[0] == 501
    assert 'reason="fleet"' in page.served.ask("GET", "/metrics")[1]


def check_dead_letters(page: Page, bus: Bus) -> None:
    async def bury(client: FleetClient) -> None:
        for number in range(59):
            raw = json.dumps({"plugin": "mcp7", "reason": "it failed", "at": 1.0}).encode()
            await client.js.publish(names.dead("somebody", f"k{number}"), raw)

    ask(bus.url, bury)
    page.until("#cards", "59 calls that somebody has to decide about")
    assert page.run(WELL)


def cards(page: Page) -> int:
    return len(page.browser.find_elements(By.CSS_SELECTOR, "#cards li"))


def check_quarantine(page: Page, bus: Bus) -> None:
    def hold(action: str, name: str, reason: str = "") -> None:
        ask(bus.url, lambda client: operate.hold(client, action, name, reason))

    hold("quarantine", "mcp7", f"pays twice {MARKUP}")
    page.until("#cards", "on 1 worker (w7); runner ctl release --fleet URL ends it. pays twice <img")
    page.until_state("mcp7", "quarantined")
    assert page.text("#ready") == "0 of 1" and cards(page) == 2
    hold("release", "mcp7")
    hold("drain", "w7")
    page.until("#worker-rows", "drained")
    page.until("#memory", "0 of 1")
    assert wait_for(lambda: cards(page) == 1, step=0.1), page.text("#cards")  # a person has drained it
    hold("release", "w7")
    page.until_state("mcp7", "ready")


def check_given_up(page: Page, bus: Bus) -> None:
    status, answer = page.served.call("mcp7", "greet", {"name": "nobody"})
    assert (status, answer["error"]["code"]) == (502, "crashed"), answer
    page.until("#cards", "quarantined")
    page.until("#cards", "the database")  # the worker's stderr: this door's user may ask for it
    ask(bus.url, lambda client: operate.ask_workers(client, "reset", "mcp7", None, lambda *_: None))
    assert wait_for(lambda: cards(page) == 1, step=0.1), page.text("#cards")


def check_hostile_worker(page: Page, bus: Bus) -> None:
    """A worker may say anything. The page shows it as text, and a bounded number of it."""
    held = {"digest": "d" * 64, "contract": "mcp", "version": MARKUP}
    plugins = [{**held, "name": f"{number}{MARKUP}", "held": MARKUP * 3} for number in range(600)]
    said = {"worker": "evil", "state": MARKUP, "reason": MARKUP, "dead": 1e300, "plugins": plugins}

    async def lie(client: FleetClient) -> None:
        await client.js.publish(names.entry(names.WORKERS, "evil"), json.dumps(said).encode())

    def is_shown() -> bool:
        ask(bus.url, lie)  # again and again: a worker that is silent is forgotten
        return "window.pwned" in page.text("#cards")

    assert wait_for(is_shown, step=1.0), page.text("#cards")
    assert page.run("return window.pwned") is None
    assert page.run("return document.querySelectorAll('img, body script').length") == 0
    assert "\u202e" not in page.run("return document.body.textContent")
    assert cards(page) <= 60
    assert len(page.browser.find_elements(By.CSS_SELECTOR, "#plugin-rows tr")) <= 500
    assert [each for each in page.log() if "Content Security Policy" in each] == []
