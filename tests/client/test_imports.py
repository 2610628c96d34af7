"""The client needs only grpcio and protobuf."""

from __future__ import annotations

import subprocess
import sys

import specdec.client

LIST_WHAT_IS_LOADED = """
import sys
before = set(sys.modules)
import specdec.client
names = set(sys.modules) - before
print(*sorted({name.split(".")[0] for name in names} - set(sys.stdlib_module_names)))
print(*sorted(name for name in names if name.startswith(("specdec.", "google.rpc", "grpc_status"))))
"""


def test_loads_nothing_but_grpc_and_protobuf() -> None:
    run = subprocess.run([sys.executable, "-c", LIST_WHAT_IS_LOADED], capture_output=True, text=True, check=True)
    packages, modules = (set(line.split()) for line in run.stdout.splitlines())
    # grpcio imports Cython's runtime and typing_extensions, and tries to import its optional companions.
    foreign = {name for name in packages if not name.startswith(("_cython", "cython"))}
    assert foreign <= {"specdec", "grpc", "google", "typing_extensions", "grpc_health", "grpc_reflection", "grpc_tools"}
    # The client itself needs no other parts of specdec.
    assert all(name.startswith(("specdec.client", "specdec.wire", "specdec.v2")) for name in modules)


def test_public_names_are_frozen() -> None:
    assert set(specdec.client.__all__) == {
        "AccessDenied", "AsyncClient", "AsyncStream", "Cancelled", "Chunk", "Client", "Completion",
        "DeadlineExceeded", "Finish", "GenerateOptions", "InvalidRequest", "Logprobs", "Message", "Model",
        "NotFound", "Overloaded", "Piece", "PromptChanged", "PromptToken", "ReasoningPosition", "Rejected", "Resolved",
        "Result", "SchemaCheck", "ServerError", "SpecdecError", "Speculation", "SpeculationDecisions",
        "SpeculationLimits", "Stream", "Tokenized", "Unavailable", "Unimplemented", "build_request",
    }  # fmt: skip
