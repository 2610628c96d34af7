"""Verifiers and drafts: which are there, which may be asked, and which is asked next."""
