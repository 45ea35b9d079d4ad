"""Chromium without a window, as an ordinary user, with a profile of its own; and the page in it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.remote.webelement import WebElement

from tests.conftest import SPARE_UID, SYSTEM_PATH, TEMP_PREFIX, Caller
from tests.runner.serve.served import Served
from tests.tables import wait_for

_END_SECONDS = 30.0


@contextlib.contextmanager
def chromium() -> Iterator[WebDriver]:
    """As root it runs as a uid that nobody has, so that it can have its own sandbox."""
    become: tuple[str, ...] = ()
    folder = Path(tempfile.mkdtemp(prefix=TEMP_PREFIX, dir="/tmp"))
    if os.geteuid() == 0:
        uid = SPARE_UID + 7
        os.chown(folder, uid, uid)
        become = ("/usr/bin/setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--")
    environ = {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8"}
    environ |= dict.fromkeys(("HOME", "TMPDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"), str(folder))
    driver = subprocess.Popen(
        [*become, "chromedriver", "--port=0"],
        env=environ,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        with driver:
            try:
                yield from _session(driver, folder)
            finally:
                # The browser is in the same process group, also if the driver has lost it.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(driver.pid, signal.SIGKILL)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _session(driver: subprocess.Popen[bytes], folder: Path) -> Iterator[WebDriver]:
    assert driver.stdout is not None
    said = b""
    while not (port := re.search(rb"started successfully on port (\d+)", said)):
        line = driver.stdout.readline()
        assert line, said.decode()
        said += line
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium", path=SYSTEM_PATH) or "chromium"
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for each in (
        *("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio"),
        *("--disable-background-networking", "--disable-component-update", "--disable-extensions"),
        "--force-prefers-reduced-motion",
        *(f"--user-data-dir={folder}/profile", "--window-size=1280,900", "--force-device-scale-factor=1"),
    ):
        options.add_argument(each)
    if not _has_user_namespaces(driver):
        options.add_argument("--no-sandbox")
    browser = webdriver.Remote(f"http://127.0.0.1:{int(port[1])}", options=options)
    try:
        yield browser
    finally:
        browser.quit()


def _has_user_namespaces(driver: subprocess.Popen[bytes]) -> bool:
    from tests.conftest import lacks

    return not lacks("user")


class Page:
    def __init__(self, browser: WebDriver, served: Served, caller: Caller) -> None:
        self.browser, self.served, self.caller = browser, served, caller

    def ctl(self, *words: str) -> str:
        done = self.caller("ctl", "--socket", self.served.socket, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def run(self, script: str, *given: Any) -> Any:
        return self.browser.execute_script(script, *given)

    def text(self, css: str) -> str:
        found: str = self.run("return document.querySelector(arguments[0])?.textContent ?? ''", css)
        return found

    def until(self, css: str, word: str) -> None:
        assert wait_for(lambda: word in self.text(css), step=0.1), (css, word, self.text(css))

    def row(self, name: str, script: str) -> Any:
        """The value of a script about the row of a plugin, `row`; None if there is no row."""
        find = "const row = [...document.querySelectorAll('#plugin-rows tr')].find(e =>"
        return self.run(f"{find} e.querySelector('.name').textContent === arguments[0]); {script}", name)

    def state(self, name: str) -> str:
        return str(self.row(name, "return row?.querySelector('.pill').textContent"))

    def until_state(self, name: str, state: str) -> None:
        assert wait_for(lambda: self.state(name) == state, step=0.1), (name, self.state(name))

    def click(self, name: str, verb: str) -> None:
        """Click a button of a plugin's row, and wait for what the page says about it."""
        self.run("document.getElementById('said').textContent = ''")
        button: WebElement = self.row(name, f"return row.querySelector('button[data-verb={verb}]')")
        self.press(button)
        assert wait_for(lambda: (said := self.text("#said")) and "…" not in said, step=0.1)

    def press(self, button: WebElement) -> None:
        self.run("arguments[0].scrollIntoView({block: 'center'})", button)  # not below the header
        button.click()

    def is_named(self, css: str) -> bool:
        """Whether the first such element has a name for people who hear the page. Plots are drawn again."""
        with contextlib.suppress(StaleElementReferenceException):
            return bool(self.browser.find_element(By.CSS_SELECTOR, css).accessible_name)
        return False

    def choose(self, css: str, value: str) -> None:
        script = "const [css, value] = arguments, it = document.querySelector(css); it.value = value;"
        self.run(script + " it.dispatchEvent(new Event('change'))", css, value)

    def media(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.cdp("Emulation.setEmulatedMedia", {"features": features})

    def log(self) -> list[str]:
        """What the browser has said about the page since the last time."""
        found = self.browser.execute("getLog", {"type": "browser"})["value"]
        return [each["message"] for each in found]

    def cdp(self, name: str, given: dict[str, Any]) -> Any:
        return self.browser.execute("executeCdpCommand", {"cmd": name, "params": given})["value"]
