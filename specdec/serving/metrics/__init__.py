"""Prometheus metrics: families and the endpoint. The metrics of a service are in its `metrics.py`."""
