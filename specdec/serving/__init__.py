"""The gRPC serving code shared by the three services."""
