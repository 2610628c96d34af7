"""What callers' connections do, and which of them are closed."""
