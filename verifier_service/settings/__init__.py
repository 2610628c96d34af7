"""What can be set without touching code: the numbers that were fitted, and why they are what they are."""
