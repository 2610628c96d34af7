"""What a step costs, and which candidates are worth it."""
