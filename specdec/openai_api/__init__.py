"""The OpenAI-compatible server: OpenAI's HTTP API in front of orchestrators.

It holds no model and no text: each request becomes a call of GenerationService by this package's own client, and so
survives an orchestrator that dies. What it takes, refuses and answers: `docs/openai-api.md`.
"""
