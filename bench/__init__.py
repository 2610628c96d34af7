"""Measurements. Every figure is a ratio of arms that ran side by side in one run."""
