"""The code that serves gRPC, shared by the three services."""
