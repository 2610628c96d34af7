"""All three services as processes of this machine, for `specdec up`, the demo and benchmarks."""

from specdec.local.child import LocalError
from specdec.local.stack import DEMO, PROGRAMS, Stack

__all__ = ["DEMO", "PROGRAMS", "LocalError", "Stack"]
