"""A headless Chromium, driven by its DevTools protocol over a pipe."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
"""The browser's path; None if there is none."""

OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # containers have no user namespaces; the browser sees only our own page
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
)

MAX_MESSAGE_BYTES = 1 << 26
"""Maximum bytes of a message from the browser, large enough for a screenshot."""

PATIENCE_SECONDS = 60.0
"""Timeout in seconds for a condition or a command."""


class PageError(Exception):
    """A script in the page failed."""


class Page:
    """A page in a browser, with its requests and its errors."""

    def __init__(self, send: Callable[..., Any], session: str) -> None:
        self._send = send
        self._session = session
        self.urls: list[str] = []
        """URLs of all requests."""
        self.complaints: list[str] = []
        """Exceptions, console errors and violations of the content security policy."""
        self.streams: list[str] = []
        """Ids of the requests answered by server-sent events, in order; for `body`."""

    def happened(self, method: str, params: dict[str, Any]) -> None:
        """Record an event of the protocol."""
        match method:
            case "Network.requestWillBeSent":
                self.urls.append(params["request"]["url"])
            case "Network.responseReceived" if params["response"]["mimeType"] == "text/event-stream":
                self.streams.append(params["requestId"])
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.complaints.append(params["entry"]["text"])

    async def command(self, method: str, **params: Any) -> Any:
        return await self._send(method, params, self._session)

    async def open(self, url: str) -> None:
        """Load a page, even if it is already open, and wait until its scripts have run."""
        await self.command("Page.navigate", url="about:blank")
        await self.command("Page.navigate", url=url)
        await self.until(f"location.href.startsWith({json.dumps(url.partition('#')[0])})")
        await self.until("document.readyState === 'complete'")

    async def run(self, script: str) -> Any:
        """Return the value of an expression in the page; PageError if it throws."""
        answer = await self.command("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise PageError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    async def until(self, script: str, seconds: float = PATIENCE_SECONDS) -> Any:
        """Wait until an expression is true, and return its value; TimeoutError after `seconds`."""
        async with asyncio.timeout(seconds):
            while not (value := await self.run(script)):  # noqa: ASYNC110 (the page has no events for this)
                await asyncio.sleep(0.05)
        return value

    async def press(self, key: str, *, control: bool = False) -> None:
        """Press a key."""
        for kind in ("rawKeyDown", "keyUp"):
            await self.command("Input.dispatchKeyEvent", type=kind, key=key, modifiers=2 if control else 0)

    async def body(self, request: str) -> str:
        """Return the body of a complete answer."""
        found = await self.command("Network.getResponseBody", requestId=request)
        return base64.b64decode(found["body"]).decode() if found["base64Encoded"] else str(found["body"])

    async def look(self, *, width: int, height: int, dark: bool) -> None:
        """Set the size of the window in pixels, and the preferred colours."""
        await self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.command("Emulation.setEmulatedMedia", features=[scheme])

    async def screenshot(self, file: Path) -> None:
        """Write a PNG of the window."""
        shot = await self.command("Page.captureScreenshot", format="png")
        await asyncio.to_thread(file.write_bytes, base64.b64decode(shot["data"]))


@asynccontextmanager
async def page() -> AsyncIterator[Page]:
    """Yield an empty page of a new browser with a profile of its own."""
    assert CHROMIUM is not None
    answers_read, answers_write = os.pipe()
    commands_read, commands_write = os.pipe()
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The browser reads commands from file descriptor 3 and writes answers to 4.
        script = f'exec "$@" 3<&{commands_read} 4>&{answers_write}'
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", script, "chromium", CHROMIUM, *OPTIONS, f"--user-data-dir={profile}", "about:blank",
            pass_fds=(commands_read, answers_write),
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        os.close(commands_read)
        os.close(answers_write)
        reader = asyncio.StreamReader(limit=MAX_MESSAGE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(answers_read, "rb")
        )
        waiting: dict[int, asyncio.Future[Any]] = {}
        pages: dict[str, Page] = {}
        numbers = itertools.count(1)

        async def listen() -> None:
            while True:
                message = json.loads((await reader.readuntil(b"\0"))[:-1])
                if "id" not in message:
                    if (known := pages.get(message.get("sessionId", ""))) is not None:
                        known.happened(message["method"], message["params"])
                elif "error" in message:
                    waiting.pop(message["id"]).set_exception(PageError(message["error"]["message"]))
                else:
                    waiting.pop(message["id"]).set_result(message["result"])

        async def send(method: str, params: dict[str, Any], session: str | None = None) -> Any:
            number = next(numbers)
            waiting[number] = asyncio.get_running_loop().create_future()
            message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
            os.write(commands_write, json.dumps(message).encode() + b"\0")
            return await asyncio.wait_for(waiting[number], PATIENCE_SECONDS)

        listening = asyncio.create_task(listen())
        try:
            target = await send("Target.createTarget", {"url": "about:blank"})
            attached = await send("Target.attachToTarget", {"targetId": target["targetId"], "flatten": True})
            made = pages[attached["sessionId"]] = Page(send, attached["sessionId"])
            for domain in ("Page", "Runtime", "Network", "Log"):
                await made.command(f"{domain}.enable")
            await made.command("Page.bringToFront")  # pages behind others draw nothing
            await made.command("Emulation.setFocusEmulationEnabled", enabled=True)
            yield made
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            transport.close()
            os.close(commands_write)  # the browser ends with its pipe
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                process.kill()
                await process.wait()
