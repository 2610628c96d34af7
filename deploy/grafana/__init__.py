"""The dashboard for Grafana, `specdec.json`, and `dashboard.py`, which writes it."""
