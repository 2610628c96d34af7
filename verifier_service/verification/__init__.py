"""Verification: follows the target's choices down the token trees, and accepts candidates."""
