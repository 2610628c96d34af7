"""Anthropic's Messages API: requests of blocks, answers of blocks and typed events, token counts."""
