"""The OpenAI-compatible server: OpenAI's HTTP API in front of orchestrators.

It is stateless: each request becomes a call of GenerationService through this package's client, so requests survive the
death of an orchestrator. Supported fields, refusals and answers: `docs/openai-api.md`.
"""
