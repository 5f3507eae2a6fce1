"""A real Chromium without a window, driven over a pipe by its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from patience import scaled

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


class Browser:
    """One page of it. What the page reports as wrong is in `errors`, what it asked for in
    `requests`."""

    def __init__(self, to: int, answers: int) -> None:
        self._to, self._answers, self._number, self._rest = to, answers, 0, b""
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """What the browser answers."""
        self._number += 1
        number = self._number
        session = {} if self._session is None else {"sessionId": self._session}
        message = {"id": number, "method": method, "params": parameters, **session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            said = self._hear()
            if said.get("id") == number:
                assert "error" not in said, (method, said)
                return dict(said["result"])

    def open(self, path: Path, width: int, dark: bool) -> None:
        """Load a file in a window of this width, as high as the page."""
        self.size(width, 900)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            self._hear()

    def size(self, width: int, height: int) -> None:
        """Have the window so large, in pixels of a style sheet."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def value(self, expression: str) -> Any:
        """What a JavaScript expression comes to in the page."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, path: Path, whole: bool = True) -> None:
        """A picture of the page, as PNG; with `whole` also of what is below the window."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _hear(self) -> dict[str, Any]:
        """The next message; what it says of the page is kept."""
        end = time.monotonic() + scaled(60)
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            piece = os.read(self._answers, 1 << 20) if ready else b""
            assert piece, "the browser does not answer"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        said: dict[str, Any] = json.loads(message)
        match said.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.exceptionThrown" | "Runtime.consoleAPICalled" | "Log.entryAdded":
                self.errors.append(json.dumps(said["params"]))
            case "Network.requestWillBeSent":
                self.requests.append(said["params"]["request"]["url"])
        return said


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser with a new `profile`; the test is skipped where there is none.

    With KEMPNER_REQUIRE_CHROMIUM=1 the test fails then.
    """
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        if os.environ.get("KEMPNER_REQUIRE_CHROMIUM") == "1":
            raise AssertionError("there is no chromium: apt-get install chromium")
        pytest.skip("there is no chromium: apt-get install chromium")
    to_read, to = os.pipe()
    answers, answers_write = os.pipe()
    # The browser reads its file descriptor 3 and writes to 4; the shell puts ours there.
    script = f'exec 3<&{to_read} 4>&{answers_write}; exec "$@"'
    command = ["bash", "-c", script, "chromium", program, *FLAGS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        [*command, "about:blank"],
        pass_fds=(to_read, answers_write),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(answers_write)
    try:
        browser = Browser(to, answers)
        yield browser
        browser._session = None
        browser.call("Browser.close")
        process.wait(timeout=scaled(20))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(to)
        os.close(answers)
