"""Check a service's health from inside its own container: exit status 0 if it serves, else 1 and a line on stderr.

    python probe.py 127.0.0.1:50051                  a gRPC service
    python probe.py http://127.0.0.1:8000/health     OpenAI's HTTP API

Kubernetes has its own probes; Docker and Compose need a command.
"""

from __future__ import annotations

import sys
import urllib.request

SECONDS = 5.0


def status(address: str) -> str:
    """Return the health status of the service at an address, such as SERVING; OSError or grpc.RpcError if it does not
    answer. Proxies set in the environment are not used."""
    if address.startswith("http://"):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(address, timeout=SECONDS) as answer:
            return "SERVING" if answer.status == 200 else f"status {answer.status}"
    import grpc  # takes a quarter of a second
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def main(address: str) -> None:
    try:
        found = status(address)
    except Exception as error:  # errors of gRPC, HTTP and the system have no common base
        sys.exit(f"{address}: {' '.join(str(error).split())}")
    if found != "SERVING":
        sys.exit(f"{address}: {found}")


if __name__ == "__main__":
    main(*sys.argv[1:])
