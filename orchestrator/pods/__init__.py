"""Verifiers and drafts: the known pods, which of them may be asked, and which is asked next."""
