"""Deployment: container images, the Helm chart, and monitoring with Prometheus and Grafana."""
