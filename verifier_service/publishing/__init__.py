"""Commits and statistics: all that leaves the step loop."""
