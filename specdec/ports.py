"""Default ports of the services.

Services and commands read them from here, so that their defaults agree.
"""

from __future__ import annotations

ORCHESTRATOR = 50050
VERIFIER = 50051
DRAFT = 50052
OPENAI = 8000
