"""Install third-party clients, run them against a server, and print a table of what works.

    python -m tests.clients                      # all, against copies of the demo pair
    python -m tests.clients openai codex         # some
    python -m tests.clients --address http://127.0.0.1:8000 --api-key KEY

`make clients` also writes the results of all clients run so far to docs/clients.md. The exit status is 1 if a use fails
although the server does not refuse it, or works although it does.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path

from specdec.local.child import LocalError
from tests.clients.checks.uses import Server
from tests.clients.clients import CLIENTS, Client
from tests.clients.environment import FOLDER, Environment, InstallError
from tests.clients.page import page, table
from tests.clients.runs import Result, run_check
from tests.clients.served import known, serving

RESULTS = FOLDER / "results"


def run(client: Client, server: Server) -> Result:
    """Install a client, if it is missing, and run its check."""
    about = (client.name, client.package, client.version, client.registry, datetime.date.today().isoformat())
    if client.needs_orchestrator and not server.orchestrator:
        return Result(*about, problem="not run: it needs more than the URL of a server")
    environment = Environment(client)
    try:
        if not environment.installed:
            print(f"{client.name}: installing", file=sys.stderr, flush=True)
            environment.install()
    except InstallError as error:
        return Result(*about, problem=f"not installed: {error}")
    print(f"{client.name}: running", file=sys.stderr, flush=True)
    uses = run_check(environment.command(), environment.programs, server, FOLDER / "logs" / f"{client.name}.log")
    return Result(*about, uses.works, uses.fails, uses.problem)


def run_all(clients: Iterable[Client], server: Server, keep: Path | None) -> list[Result]:
    """Run clients one after the other and keep their results in a folder; after Ctrl-C, return the results so far."""
    results = []
    try:
        for client in clients:
            results.append(result := run(client, server))
            if keep is not None:
                result.save(keep)
            said = "passed" if result.passed else result.problem or f"fails: {', '.join(result.fails)}"
            print(f"{client.name}: {said}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted: this is what was run until then", file=sys.stderr)
    return results


def saved() -> list[Result]:
    """Return the results of all clients that were run at their pinned versions, in order."""
    files = ((client, RESULTS / f"{client.name}.json") for client in CLIENTS)
    found = [(client, Result.load(file)) for client, file in files if file.is_file()]
    return [result for client, result in found if result.version == client.version]


def parsed(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.clients", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [client.name for client in CLIENTS]
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"default: all, which are {', '.join(names)}")
    parser.add_argument("--address", help="URL of a server to use instead of starting one, without /v1")
    parser.add_argument("--api-key", default="none", help="key for that server")
    parser.add_argument("--page", type=Path, help="file for the results of all clients run so far")
    args = parser.parse_args(given)
    if unknown := sorted(set(args.clients) - set(names)):
        parser.error(f"no such client: {', '.join(unknown)}; there are {', '.join(names)}")
    if args.page is not None and args.address is not None:
        parser.error("--page is about the server that is started: leave out --address")
    args.clients = [client for client in CLIENTS if client.name in args.clients or not args.clients]
    return args


def main(given: Sequence[str]) -> None:
    args = parsed(given)
    os.environ.setdefault("SPECDEC_CACHE_DIR", str(FOLDER / "cache"))
    try:
        started = serving(FOLDER / "models") if args.address is None else nullcontext(known(args.address, args.api_key))
        with started as server:
            results = run_all(args.clients, server, RESULTS if args.address is None else None)
    except (LocalError, OSError, ValueError) as error:
        sys.exit(f"clients: {error}")
    print("\n".join(table(results)))
    if args.page is not None:
        args.page.write_text(page(saved()), encoding="utf-8")
    expected = {client.name: client.refused for client in args.clients}
    fine = all(result.problem is None and result.fails.keys() == expected[result.name] for result in results)
    sys.exit(0 if fine and len(results) == len(args.clients) else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
