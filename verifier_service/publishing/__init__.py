"""What the step loop tells the outside: commits and statistics."""
