"""Default ports of the services, and the first places to look for them.

The services, `specdec up` and `specdec generate` take them from here, so that their defaults agree.
"""

from __future__ import annotations

ORCHESTRATOR = 50050
VERIFIER = 50051
DRAFT = 50052
OPENAI = 8000
