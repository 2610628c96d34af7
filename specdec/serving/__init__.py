"""The plumbing that the three services share, written once."""
