"""The numbers of a verifier that were fitted, and why they are what they are."""
