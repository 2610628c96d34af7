"""Commits: what leaves the step loop, and when."""
