"""Which candidates the target accepts."""
