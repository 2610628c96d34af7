"""A service killed during start-up, as by an OOM killer."""

import os
import signal

if __name__ == "__main__":
    os.kill(os.getpid(), signal.SIGKILL)
