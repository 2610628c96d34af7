"""The OpenAI-compatible server: OpenAI's and Anthropic's HTTP APIs in front of orchestrators.

Each request becomes a call of GenerationService through specdec.client, so requests survive the death of an
orchestrator. Supported fields, refusals and answers: `docs/openai-api.md`.
"""
