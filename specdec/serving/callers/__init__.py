"""Connections of callers: their certificates, their budgets, and closing them."""
