"""Measure the demo pair on held-out files, and write its model cards.

    python -m demo.measure

Acceptance is the share of positions at which the target's choice is among the draft's first one, two or three
candidates. Both choose by the COUPLED rule with the same noise. Acceptance is measured on the target's own
continuations of held-out prompts, the kind of text that a draft sees in service.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from demo.prompts import held_out
from demo.train import SHAPES, encoded, held_out_loss

HOME = Path(__file__).parent
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 64, 96, 128


@dataclass(frozen=True)
class Acceptance:
    """Acceptance at one temperature: within the draft's first 1, 2, 3 candidates, and the bound 1 - TV(p, q)."""

    temperature: float
    first: float
    second: float
    third: float
    bound: float


@torch.inference_mode()
def acceptance(target: PreTrainedModel, draft: PreTrainedModel, temperature: float) -> Acceptance:
    prompts = torch.tensor(held_out(PROMPTS, PROMPT_TOKENS))
    sampling = {"do_sample": True, "temperature": temperature, "top_k": None} if temperature else {"do_sample": False}
    torch.manual_seed(0)
    text = target.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        min_new_tokens=NEW_TOKENS,
        max_new_tokens=NEW_TOKENS,
        pad_token_id=0,
        **sampling,
    )

    def logits(model: PreTrainedModel) -> Tensor:
        rows: Tensor = model(text).logits[:, PROMPT_TOKENS - 1 : -1].float().flatten(0, 1)
        return rows

    p, q = logits(target), logits(draft)
    if temperature:
        p, q = p / temperature, q / temperature
        bound = float(torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1).mean())
        noise = -torch.log(-torch.log(torch.rand_like(p).clamp(1e-12, 1 - 1e-7)))
        p, q = p + noise, q + noise
    hits = q.topk(3).indices == p.argmax(-1, keepdim=True)
    first, second, third = (float(hits[:, :k].any(-1).float().mean()) for k in (1, 2, 3))
    return Acceptance(temperature, first, second, third, bound if temperature else first)


def table(measured: list[Acceptance]) -> str:
    lines = ["| temperature | first guess | first two | first three | bound 1 - TV |", "|---|---|---|---|---|"]
    lines += [
        f"| {a.temperature:g} | {a.first:.3f} | {a.second:.3f} | {a.third:.3f} | {a.bound:.3f} |" for a in measured
    ]
    return "\n".join(lines)


def card(role: str, parameters: int, loss: float, measured: list[Acceptance]) -> str:
    shape = SHAPES[role]
    trained = {
        "target": "Trained from scratch by `python -m demo.train target`.",
        "draft": "Distilled from the target by `python -m demo.train draft`, on the corpus and on the target's own "
        "continuations of it.",
    }[role]
    return f"""# The demo {role}

A Llama of {parameters / 1e6:.2f}M parameters ({shape["num_hidden_layers"]} layers of {shape["hidden_size"]}, \
vocabulary 4096), bfloat16. {trained} It exists to show specdec at work on a small machine, not to write programs.

**Data.** The source of Python's standard library, as an installation carries it (Python Software Foundation
License, https://docs.python.org/3/license.html), without data tables; one file in forty held out.

**Chat.** The chat template writes what is said as comments, after which the model goes on with code: it was trained on
no conversations.

**Held-out loss.** {loss:.3f} nats a token, on 64 windows of 512 tokens.

**Acceptance** of the draft's guesses on the target's own continuations of {PROMPTS} held-out prompts ({NEW_TOKENS}
tokens each); at a temperature, both choose with the same noise:

{table(measured)}

`python -m demo.measure` prints these figures and writes this card.
"""


def main() -> None:
    models = {role: AutoModelForCausalLM.from_pretrained(HOME / role, dtype=torch.float32).eval() for role in SHAPES}
    measured = [acceptance(models["target"], models["draft"], t) for t in (0.0, 0.7, 1.0)]
    held = encoded(held_out=True)
    for role, model in models.items():
        loss = held_out_loss(model, held, "cpu")
        print(f"{role}: {model.num_parameters() / 1e6:.2f}M parameters, held-out {loss:.3f} nats a token")
        (HOME / role / "README.md").write_text(card(role, model.num_parameters(), loss, measured))
    print(table(measured))


if __name__ == "__main__":
    main()
