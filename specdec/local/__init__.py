"""All three services as local processes, for `specdec up`, the demo and benchmarks."""

from specdec.local.child import LocalError
from specdec.local.models import DEMO, ModelPaths
from specdec.local.stack import PROGRAMS, Stack

__all__ = ["DEMO", "PROGRAMS", "LocalError", "ModelPaths", "Stack"]
