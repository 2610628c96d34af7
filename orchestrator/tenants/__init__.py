"""Tenants: who may ask, by which API keys, and how much."""
