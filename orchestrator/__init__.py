"""The orchestrator: runs every request, holds the committed text, brings draft and verifier together."""
