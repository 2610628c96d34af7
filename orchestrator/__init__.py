"""The orchestrator: runs every request, holds the committed text, and moves candidates from draft to verifier."""
