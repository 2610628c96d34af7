"""Tenants: who may call, with which API keys, and how much."""
