"""Classification of py-spy samples."""

from __future__ import annotations

from bench.serving.overhead import shares

THREAD = "thread (1): step-loop;Worker._run (worker.py:70);"
TURN = THREAD + "EngineWorker.turn (engine_worker.py:59);"
STEP = TURN + "StepLoop._plan_and_run (step_loop.py:214);StepLoop._complete (step_loop.py:240);"
VERIFIED = STEP + "verify_step (verified_step.py:34);"
FORWARD = VERIFIED + "HostPass.logits (engine.py:60);TorchEngine.forward (torch_engine.py:134);"
LOOP = "thread (2): MainThread;BaseEventLoop.run_forever (events.py:607);BaseEventLoop._run_once (events.py:1906);"


def test_every_sample_has_its_place() -> None:
    found = shares(
        "\n".join(
            [
                FORWARD + "Decoder.__call__ (decoder.py:106) 50",
                FORWARD + "Decoder.__call__ (decoder.py:121);Float32Head.forward (linear.py:56) 9",
                FORWARD + "Decoder.__call__ (decoder.py:100);sequence.<locals>.layers (layers.py:90) 3",
                FORWARD + "RaggedAttention.__init__ (attention.py:55) 2",
                VERIFIED + "verify_trees (tree_verification.py:20);choose (step_logits.py:39) 7",
                TURN + "StepLoop.step (step_loop.py:157) 1",
                TURN + "StepLoop.step (step_loop.py:150);AdaptiveSpeculation.propose (adaptive_speculation.py:60) 2",
                THREAD + "Worker._receive (worker.py:88) 20",
                LOOP + "EpollSelector.select (selectors.py:468) 90",
                LOOP + "Handle._run (events.py:80) 10",
                "thread (3): poller;Thread.run (threading.py:982) 100",
            ]
        )
    )
    assert found.forward == {"layers": 53, "output head": 9, "preparation": 2}
    assert found.rest == {"verify_trees": 7, "StepLoop.step itself": 1, "AdaptiveSpeculation.propose": 2}
    assert (found.waiting, found.event_loop) == (20, 10)
