"""A service that is killed while it starts, as by a system that is short of memory."""

import os
import signal

if __name__ == "__main__":
    os.kill(os.getpid(), signal.SIGKILL)
