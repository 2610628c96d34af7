"""OpenAI's Responses API: requests of items, answers of items and typed events, and stored responses."""
