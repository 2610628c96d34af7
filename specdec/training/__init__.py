"""Training of drafts and heads beside a frozen target."""
