"""Chromium without a window, as an ordinary user, with a profile of its own."""

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

from selenium import webdriver
from selenium.webdriver.remote.webdriver import WebDriver

from tests.conftest import SPARE_UID, SYSTEM_PATH, TEMP_PREFIX

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
