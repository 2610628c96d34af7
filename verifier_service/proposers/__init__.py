"""Where candidates come from besides draft services: n-grams, lookahead windows, a draft model, and other texts."""
