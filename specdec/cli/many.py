"""Many concurrent prompts, limited by --concurrency and the servers' capacity. Results are printed in the order of the
prompts. A results file receives each result when it is complete, so that an interruption loses none, and is sorted at
the end."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specdec.cli.access import Access
from specdec.cli.failure import STATUS, described
from specdec.cli.prompt_file import Prompt, PromptFile
from specdec.cli.report import CompletionReport
from specdec.cli.results_file import ResultsFile
from specdec.cli.shown import for_stdout
from specdec.cli.waiting import WaitReporter
from specdec.client import AsyncClient, Overloaded, SpecdecError
from specdec.exit_status import ExitStatus

WAITING = 4
"""Maximum results per concurrent prompt that are held in memory until earlier ones are printed."""

OVERLOADED_SECONDS = 600.0
"""Seconds during which a prompt without a timeout is retried while the servers are full; any other, until its
timeout."""

Given = TypeVar("Given")
Made = TypeVar("Made")


@dataclass(frozen=True)
class PromptResult:
    """The result or the error of a prompt."""

    prompt: Prompt
    result: dict[str, Any]
    error: SpecdecError | None = None


async def in_order(
    action: Callable[[Given], Awaitable[Made]], given: Iterable[Given], at_once: int
) -> AsyncGenerator[Made, None]:
    """Run an action on the items of `given`, at most `at_once` concurrently, and yield the results in order. At most
    (1 + WAITING) * at_once items are taken ahead; an exception, or closing the generator, cancels the rest."""
    room = asyncio.Semaphore(at_once)
    tasks: deque[asyncio.Task[Made]] = deque()

    async def run(item: Given) -> Made:
        async with room:
            return await action(item)

    try:
        for item in given:
            tasks.append(asyncio.create_task(run(item)))
            while len(tasks) >= (1 + WAITING) * at_once or (tasks and tasks[0].done()):
                yield await tasks[0]
                tasks.popleft()
        while tasks:
            yield await tasks[0]
            tasks.popleft()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def as_done(
    action: Callable[[Given], Awaitable[Made]], given: Iterable[Given], at_once: int
) -> AsyncGenerator[Made, None]:
    """Like `in_order`, but yield results when actions finish, in any order."""
    left = iter(given)
    running: set[asyncio.Future[Made]] = set()
    done: set[asyncio.Future[Made]] = set()
    try:
        while True:
            running |= {asyncio.ensure_future(action(item)) for item in islice(left, at_once - len(running))}
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                yield future.result()
    finally:
        for future in running:
            future.cancel()
        await asyncio.gather(*running, *done, return_exceptions=True)


async def ask(client: AsyncClient, prompt: Prompt, timeout: float | None, heard: Callable[[], None]) -> PromptResult:
    """Request one prompt; while the servers are full, retry after a pause. Call `heard` for every chunk."""
    deadline = time.monotonic() + (OVERLOADED_SECONDS if timeout is None else timeout)
    while True:
        report = CompletionReport()
        try:
            left = None if timeout is None else max(0.001, deadline - time.monotonic())
            async with client.generate(prompt.text, timeout=left, **prompt.options) as stream:
                report.request_id = stream.request_id
                async for chunk in stream:
                    heard()
                    report.add(chunk)
            return PromptResult(prompt, report.as_json())
        except Overloaded as error:
            pause = error.retry_after or 1.0
            if time.monotonic() + pause >= deadline:
                return PromptResult(prompt, _error_json(error), error)
            await asyncio.sleep(pause)
        except SpecdecError as error:
            return PromptResult(prompt, _error_json(error), error)


def _error_json(error: SpecdecError) -> dict[str, Any]:
    fields: dict[str, Any] = {"type": type(error).__name__, "code": error.code.name, "message": str(error)}
    if error.violations:
        fields["violations"] = [{"field": field, "problem": problem} for field, problem in error.violations]
    return {"error": fields}


async def generate_many(
    address: str,
    file: PromptFile,
    count: int,
    *,
    access: Access,
    timeout: float | None,
    concurrency: int,
    json_output: bool,
    out: ResultsFile | None,
    fail_fast: bool,
) -> ExitStatus | None:
    """Request all `count` prompts of a file; print each result, or append it to `out`. Return the exit status: None for
    success, otherwise the first error's."""
    kept = 0
    if out is not None:
        out.begin()
        kept = len(out)
    left = (prompt for prompt in file.prompts() if out is None or prompt not in out)
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    start, tokens, done = time.monotonic(), 0, 0
    failed: list[ExitStatus] = []
    drawn = console.is_terminal and (out is not None or not sys.stdout.isatty())  # never mixed with results
    bar = Progress(*columns, console=console, disable=not drawn, redirect_stdout=False)
    waiting = WaitReporter(address, lambda line: console.print(f"specdec: {line}"), access=access)
    async with AsyncClient(address, **access.for_client) as client:

        async def one(prompt: Prompt) -> PromptResult:
            answer = await ask(client, prompt, timeout, waiting.heard)
            if out is not None:  # immediately: the consumer may stop before this answer's turn
                out.append(answer.prompt, answer.result)
            bar.advance(shown)
            return answer

        shown = bar.add_task("prompts", total=count, completed=kept)
        with bar, waiting:
            in_turn = in_order if out is None else as_done
            async with aclosing(in_turn(one, left, concurrency)) as answers:
                async for answer in answers:
                    if json_output and out is None:
                        print(json.dumps({"line": answer.prompt.line, **answer.result}), flush=True)
                    elif answer.error is None and out is None:
                        print(for_stdout(answer.result["text"]), flush=True)
                    done += 1
                    tokens += len(answer.result.get("tokens", ()))
                    if answer.error is not None:
                        failed.append(STATUS[type(answer.error)])
                        console.print(f"specdec: {file.path}:{answer.prompt.line}: {described(answer.error)}")
                        if fail_fast:
                            break
    seconds = time.monotonic() - start
    if out is not None or not json_output:
        console.print(
            f"{tokens} tokens of {done} prompts in {seconds:.2f} s ({tokens / seconds:.0f}/s), {len(failed)} failed"
            + (f", {kept} were already done" if kept else ""),
            style="dim",
        )
    return failed[0] if failed else None
