"""Metrics for Prometheus: how they are made, and the endpoint. Each service's `metrics.py` says which it has."""
