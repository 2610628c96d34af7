"""specdec: speculative decoding as three gRPC services."""

__version__ = "0.1.0"
