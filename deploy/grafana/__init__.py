"""The dashboard for Grafana: `dashboard.py` writes the file that the chart installs."""
