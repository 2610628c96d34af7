"""gRPC's own client for the health checks that Kubernetes and load balancers use."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.clients.checks.uses import equal, server, use

SERVER = server()
SERVICE = "specdec.v2.GenerationService"
SERVING = health_pb2.HealthCheckResponse.SERVING


@use("check")
def check() -> None:
    with grpc.insecure_channel(SERVER.orchestrator) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE):
            equal(stub.Check(health_pb2.HealthCheckRequest(service=service)).status, SERVING)


@use("watch")
def watch() -> None:
    with grpc.insecure_channel(SERVER.orchestrator) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        first = next(iter(stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=10)))
        equal(first.status, SERVING)
