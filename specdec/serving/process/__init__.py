"""The process of a service: its server, its drain, its logs."""
