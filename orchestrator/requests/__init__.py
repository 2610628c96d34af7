"""The requests: parsed, validated, and turned into samples with tokens."""
