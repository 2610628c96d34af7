"""A service that does nothing: it is ready immediately at port 1 of `--host`, or fails in the phase named by
`--fails-in`. Like a service, it ends with its parent only if it was told to."""

from __future__ import annotations

import signal
import sys

if __name__ == "__main__":
    if "--fails-in" in sys.argv:
        phase = sys.argv[sys.argv.index("--fails-in") + 1]
        print(f"starting imports\nstarting {phase}\nstarting quantising, 0.10 of 0.20 GB", flush=True)
        print("draft: no space", file=sys.stderr)
        sys.exit(1)
    host = sys.argv[sys.argv.index("--host") + 1] if "--host" in sys.argv else "127.0.0.1"
    print(f"ready {host}:1", flush=True)
    if "--stop-with-stdin" in sys.argv:
        sys.stdin.read()
    else:
        signal.pause()
