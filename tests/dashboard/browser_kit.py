"""A headless Chromium, and gateways for it to look at."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

ROOT = Path(__file__).parents[2]
WIDE, PHONE = 1280, 390
WAIT_SECONDS = 60


class Browser:
    """What the tests do with a page. `errors` are what its console said."""

    def __init__(self, screenshots: Path):
        self._screenshots = screenshots
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
        for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", "hide-scrollbars"):
            options.add_argument(f"--{argument}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = shutil.which("chromedriver")
        if not options.binary_location or not driver:
            pytest.skip("no Chromium here: install the packages chromium and chromium-driver")
        self.driver = webdriver.Chrome(options=options, service=Service(driver))

    def resize(self, width: int, height: int = 900) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def open(self, address: str, theme: str = "light") -> None:
        """As in a new tab: nothing of the page before is left, except the key and the theme."""
        self.driver.get("about:blank")
        self.driver.get(address)
        script = "localStorage.setItem('harnessrl.theme', arguments[0]); document.documentElement.dataset.theme = "
        self.js(f"{script} arguments[0]", theme)

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def text(self) -> str:
        return self.js("return document.body.innerText")

    def see(self, *texts: str, seconds: float = WAIT_SECONDS) -> str:
        """Wait until the page shows all of `texts`; returns all that it shows."""
        missing = f"the page does not show {texts}"
        return until(self.text, lambda shown: all(text in shown for text in texts), missing, seconds)

    def click(self, text: str) -> None:
        script = "[...document.querySelectorAll('button')].find((b) => b.textContent === arguments[0]).click()"
        self.js(script, text)

    def select(self, selector: str) -> Any:
        def found() -> Any:
            return self.js("return document.querySelector(arguments[0])", selector)

        return until(found, lambda element: element is not None, f"the page has no {selector}")

    def screenshot(self, name: str) -> None:
        width = self.js("return innerWidth")
        self.resize(width, min(3000, self.js("return document.documentElement.scrollHeight")))
        time.sleep(0.3)  # charts are drawn anew when their size changes
        self.driver.save_screenshot(str(self._screenshots / f"{name}.png"))
        self.resize(width)

    def errors(self) -> list[str]:
        """What the console said, but for a gateway that a test has ended."""
        severe = [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]
        return [message for message in severe if "ERR_CONNECTION_REFUSED" not in message]

    def too_wide(self) -> int:
        """Pixels that the page is wider than the window."""
        return self.js("return document.documentElement.scrollWidth - innerWidth")

    def nameless(self) -> list[str]:
        """Controls that a screen reader has no name for."""
        return self.js(
            "const all = [...document.querySelectorAll('a, button, input, select, summary, [tabindex=\"0\"]')];"
            "const named = (e) => (e.innerText?.trim() && e.tagName !== 'SELECT') || e.labels?.length || "
            "e.getAttribute('aria-label');"
            "return all.filter((e) => e.checkVisibility() && !named(e)).map((e) => e.outerHTML.slice(0, 200))"
        )


def until(
    ask: Callable[[], Any], enough: Callable[[Any], bool], otherwise: str, seconds: float = WAIT_SECONDS
) -> Any:
    deadline = time.monotonic() + seconds
    while not enough(last := ask()):
        assert time.monotonic() < deadline, f"{otherwise}: {last}"
        time.sleep(0.05)
    return last


class Served:
    """`harnessrl COMMAND` as a process."""

    def __init__(self, *command: str, **env: str):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harnessrl", *command],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | env,
        )  # fmt: skip
        self._said = ""

    def says(self, pattern: str) -> str:
        """Wait until it says so; the first group of `pattern`."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said += line
            if match := re.search(pattern, line):
                return match[1]
        raise AssertionError(f"it ended without saying {pattern!r}:\n{self._said}")

    def end(self) -> None:
        """As Ctrl-C does; it has to end well."""
        self._process.send_signal(signal.SIGINT)
        rest, _ = self._process.communicate(timeout=60)
        print(self._said, rest)
        assert self._process.returncode == 0


@contextmanager
def served(*command: str, **env: str) -> Iterator[Served]:
    process = Served(*command, **env)
    try:
        yield process
    finally:
        process.end()


@contextmanager
def gateway(store: Path, key: str = "") -> Iterator[str]:
    """The address of `harnessrl gateway` on that store."""
    with served("gateway", "--port", "0", "--store", str(store), "--key", key) as process:
        yield process.says(r"gateway ready at (\S+)")
