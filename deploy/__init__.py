"""Monitoring of the services: rules and an example configuration for Prometheus, a dashboard for Grafana."""
