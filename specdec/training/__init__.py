"""Training of heads beside a frozen target."""
