"""Measure the processor time of a draft service per tree node, with a model that costs nothing.

    python -m bench draft-steps [--vocabulary 128256 --sessions 8,64 --temperatures 0,0.8 --rows 64 --rounds 20]

The draft loop is stepped in one thread, on a device that takes no time and sends shortlists as a GPU does. Messages are
made and parsed, but go nowhere. In each round every session commits three tokens guessed by its draft, and the loop
runs until nothing is left to expand. At a temperature above 0, top-p is 0.95.
"""

from __future__ import annotations

import gc
import json
import time
from statistics import median

from bench.arguments import numbers, parser_of, whole_numbers
from bench.systems.simulated_gpu import SimulatedGpu
from draft_service.draft_loop import DraftLoop
from draft_service.language_model import LanguageModelDrafter
from draft_service.servicer import DraftLimits, DraftServicer
from draft_service.session import DrafterSession
from specdec.serving.timeline import Timeline
from specdec.v2 import draft_pb2, model_pb2
from testing.mailbox import Handed

PROMPT_TOKENS = 512
COMMITTED_TOKENS = 3  # per round and session
POLICY = draft_pb2.DraftPolicy(max_nodes=16, max_depth=6, max_branches=3, min_path_probability=0.05)
WIDTH = 4
"""Maximum nodes of a session in a pass."""


class DraftedSessions:
    """Sessions at a draft service with a synchronously stepped loop."""

    def __init__(self, vocabulary: int, sessions: int, temperature: float, rows: int, rounds: int) -> None:
        tokens = COMMITTED_TOKENS * (rounds + 1) + POLICY.max_depth
        context = PROMPT_TOKENS + tokens
        self.nodes = 0  # computed so far
        self._engine = SimulatedGpu(vocabulary, sessions * (context + DraftLimits().max_nodes) + 1, self._count)
        self._loop = DraftLoop(LanguageModelDrafter(self._engine, rows=rows, rows_per_session=WIDTH))
        identity = model_pb2.ModelIdentity(vocabulary_size=vocabulary, context_tokens=context)
        self._servicer = DraftServicer(self._loop, identity, DraftLimits(max_sessions=sessions))
        self._sessions = [self._opened(seed, temperature, tokens) for seed in range(sessions)]
        self._settle()

    def round(self) -> None:
        """Commit guessed tokens to every text, and expand all nodes that the policy allows."""
        for session in self._sessions:
            tree = session.tree
            tokens = [node.token for _, (_, node) in zip(range(COMMITTED_TOKENS), tree.best_chain(), strict=False)]
            committed = model_pb2.Committed(base=tree.base, tokens=tokens)
            self._servicer.act(session, draft_pb2.DraftRequest(committed=committed), time.monotonic())
        self._settle()

    def _opened(self, seed: int, temperature: float, tokens: int) -> DrafterSession:
        sampling = model_pb2.Sampling(temperature=temperature, seed=seed)
        if temperature:
            sampling.top_p = 0.95
        prompt = [2 + (seed + token) % 1000 for token in range(PROMPT_TOKENS)]
        opening = draft_pb2.DraftOpen(prompt_tokens=prompt, sampling=sampling, max_tokens=tokens, policy=POLICY)
        session = self._servicer.parse(draft_pb2.DraftRequest(open=opening), None)
        self._servicer.attach(session, Handed(_drop, _fail), Timeline())
        return session

    def _settle(self) -> None:
        while self._loop.turn() is not None:
            pass

    def _count(self, rows: int) -> float:
        self.nodes += rows
        return 0.0


def measured(vocabulary: int, sessions: int, temperature: float, rows: int, rounds: int) -> dict[str, float]:
    """Return microseconds of processor time per node, and nodes per round."""
    drafted = DraftedSessions(vocabulary, sessions, temperature, rows, rounds)
    micros: list[float] = []
    before = drafted.nodes
    for _ in range(rounds):
        nodes, begin = drafted.nodes, time.thread_time()
        drafted.round()
        micros.append(1e6 * (time.thread_time() - begin) / (drafted.nodes - nodes))
    return {"us_a_node": round(median(micros), 1), "nodes_a_round": round((drafted.nodes - before) / rounds, 1)}


def _drop(_: object) -> None:
    pass


def _fail(error: Exception) -> None:
    raise error


def main(given: list[str]) -> None:
    parser = parser_of("draft-steps", __doc__)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--sessions", type=whole_numbers, default=[8, 64])
    parser.add_argument("--temperatures", type=numbers, default=[0.0, 0.8])
    parser.add_argument("--rows", type=int, default=64, help="maximum nodes of all sessions in a pass")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args(given)
    if options.rounds < 1:
        parser.error(f"--rounds: is {options.rounds}, must be at least 1")
    gc.freeze()  # as a service does
    for sessions in options.sessions:
        for temperature in options.temperatures:
            found = measured(options.vocabulary, sessions, temperature, options.rows, options.rounds)
            print(json.dumps({"sessions": sessions, "temperature": temperature} | found), flush=True)
