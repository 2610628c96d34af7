"""gRPC's own client of server reflection."""

from __future__ import annotations

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.clients.checks.uses import equal, server, use

SERVER = server()
SERVICE = "specdec.v2.GenerationService"


@use("services and methods by reflection")
def services() -> None:
    with grpc.insecure_channel(SERVER.orchestrator) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        equal(SERVICE in database.get_services(), True)
        found = DescriptorPool(database).FindServiceByName(SERVICE)
        equal("Generate" in found.methods_by_name, True)
