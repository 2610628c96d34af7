"""Train the demo pair: tokenizer, then target, then a draft distilled from the target, then the target's heads.

    python -m demo.train tokenizer
    python -m demo.train target --minutes 60
    python -m demo.train draft --minutes 24
    python -m demo.train draft --minutes 29 --resume
    python -m demo.train heads --steps 1000

The stages write into `demo/target`, `demo/draft` and `demo/heads`, which hold the bundled result. The learning rate of
a model follows elapsed time, so a slower machine also completes the schedule, but at a higher loss. Matrices are
trained by Muon (Jordan et al. 2024), embeddings and norms by AdamW, and heads as by `specdec train-heads`.

The draft learns the target's distribution (Hinton et al. 2015) on equal parts of two kinds of text: the corpus, and the
target's own continuations of it, the text that a draft sees in service (on-policy distillation, Agarwal et al. 2024).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from demo import corpus
from specdec.training.medusa import MedusaPlan, MedusaTraining
from specdec.training.plan import Origin
from specdec.training.texts import Windows

HOME = Path(__file__).parent
END_OF_TEXT = "<|endoftext|>"
CHAT_TEMPLATE = """\
{% for message in messages %}
{% if message.role == "assistant" %}
{{ message.content }}

{% elif message.role in ("system", "user") %}
# {{ message.content | trim | replace("\\n", "\\n# ") }}
{% else %}
{{ raise_exception("no turn of the role " ~ message.role ~ ": there are system, user and assistant") }}
{% endif %}
{% endfor %}
"""
"""The chat template. The assistant's turns are code, all others become comments: the model was trained on no
conversations, and continues any text with Python."""

VOCABULARY = 4096
CONTEXT = 1024

SHAPES = {
    "target": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1024},
    "draft": {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 683},
}


# --- tokenizer ---------------------------------------------------------------------------------


def tokenizer_settings() -> dict[str, Any]:
    """Return the content of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def train_tokenizer() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.files(held_out=False), trainer)
    for role in SHAPES:
        folder = HOME / role
        folder.mkdir(exist_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_settings(), indent=2) + "\n")


def encoded(*, held_out: bool) -> torch.Tensor:
    """Return all texts of one side of the split as one int64 row, with an end-of-text token after each file."""
    tokenizer = Tokenizer.from_file(str(HOME / "target" / "tokenizer.json"))
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(corpus.files(held_out=held_out)):
        ids += encoding.ids
        ids.append(0)
    return torch.tensor(ids)


# --- training of target and draft ---------------------------------------------------------------


def new_model(role: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=0,
            **SHAPES[role],
        )
    )


def optimise(
    model: LlamaForCausalLM,
    minutes: float,
    loss_of_batch: Callable[[], torch.Tensor],
    evaluate: Callable[[], float],
) -> int:
    """Minimise until the time is up, and return the number of steps. The learning rate has a linear warm-up (2 %), is
    constant, then decays linearly (last half)."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.05, momentum=0.95, adjust_lr_fn="original"),
        torch.optim.AdamW(rest, lr=0.004, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    start = last_report = time.monotonic()
    step = 0
    while (progress := (time.monotonic() - start) / (60 * minutes)) < 1:
        scale = min(1.0, progress / 0.02 + 0.01, max(0.02, 2 * (1 - progress)))
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * scale
        loss = loss_of_batch()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        if time.monotonic() - last_report > 120:
            last_report = time.monotonic()
            print(f"{progress:6.1%}  step {step}  loss {loss.item():.3f}  held-out {evaluate():.3f}", flush=True)
    return step


def random_rows(ids: torch.Tensor, rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(ids) - length, (rows,), generator=generator)
    return torch.stack([ids[start : start + length] for start in starts.tolist()])


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, ids: torch.Tensor, device: str) -> float:
    """Return the loss in nats a token over the first 64 held-out windows of 512 tokens."""
    rows = ids[: 64 * 512].view(-1, 512)
    losses = []
    for batch in torch.split(rows, 8):
        batch = batch.to(device)
        with torch.autocast(device, torch.bfloat16):
            logits = model(batch).logits
        losses.append(F.cross_entropy(logits[:, :-1].float().flatten(0, 1), batch[:, 1:].flatten()))
    return torch.stack(losses).mean().item()


def save(model: LlamaForCausalLM, role: str) -> None:
    model.to("cpu", torch.bfloat16).save_pretrained(HOME / role)


# --- the stages ---------------------------------------------------------------------------------


def train_target(minutes: float, device: str, rows: int, length: int) -> None:
    train, held = encoded(held_out=False), encoded(held_out=True)
    generator = torch.Generator().manual_seed(0)
    model = new_model("target").to(device)
    print(f"target: {model.num_parameters() / 1e6:.2f}M parameters, {len(train) / 1e6:.2f}M tokens", flush=True)

    def loss_of_batch() -> torch.Tensor:
        batch = random_rows(train, rows, length + 1, generator).to(device)
        with torch.autocast(device, torch.bfloat16):
            logits = model(batch[:, :-1]).logits
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    steps = optimise(model, minutes, loss_of_batch, lambda: held_out_loss(model, held, device))
    print(f"target: {steps} steps, held-out {held_out_loss(model, held, device):.4f} nats a token")
    save(model, "target")


@torch.no_grad()
def continuations(
    target: LlamaForCausalLM, train: torch.Tensor, device: str, minutes: float, seed: int
) -> torch.Tensor:
    """Return the target's continuations of 64 tokens of corpus: rows [*, 256], half greedy, half at T = 0.8."""
    generator = torch.Generator().manual_seed(seed)
    written: list[torch.Tensor] = []
    start = time.monotonic()
    while time.monotonic() - start < 60 * minutes:
        prompts = random_rows(train, 64, 64, generator).to(device)
        written.append(
            target.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                min_new_tokens=192,
                max_new_tokens=192,
                pad_token_id=0,
                do_sample=len(written) % 2 == 1,
                temperature=0.8 if len(written) % 2 else None,
                top_k=None,
            )
        )
    rows = torch.cat(written).cpu()
    print(f"draft: {rows.numel() / 1e6:.2f}M tokens of the target's own text", flush=True)
    return rows


def train_draft(minutes: float, device: str, rows: int, length: int, resume: bool) -> None:
    train, held = encoded(held_out=False), encoded(held_out=True)
    seed = 3 if resume else 2
    generator = torch.Generator().manual_seed(seed)
    target = LlamaForCausalLM.from_pretrained(HOME / "target", dtype=torch.bfloat16).to(device).eval()
    own = continuations(target, train, device, minutes * 0.2, seed)
    if resume:
        model = LlamaForCausalLM.from_pretrained(HOME / "draft", dtype=torch.float32).to(device).train()
    else:
        model = new_model("draft").to(device)
    print(f"draft: {model.num_parameters() / 1e6:.2f}M parameters", flush=True)

    def batches() -> Iterator[torch.Tensor]:
        while True:
            yield random_rows(train, rows, length, generator)
            yield own[torch.randint(len(own), (rows * length // own.shape[1],), generator=generator)]

    stream = batches()

    def loss_of_batch() -> torch.Tensor:
        batch = next(stream).to(device)
        with torch.no_grad():
            p_logits = target(batch).logits.float().flatten(0, 1)
        with torch.autocast(device, torch.bfloat16):
            q_logits = model(batch).logits.float().flatten(0, 1)
        # KL(p || q) up to a constant, plus half the cross-entropy of the target's argmax: greedy acceptance depends on
        # the argmax, sampled acceptance on the whole distribution.
        wanted = p_logits.softmax(-1)
        wanted.scatter_add_(1, p_logits.argmax(-1, keepdim=True), torch.full_like(wanted[:, :1], 0.5))
        return F.cross_entropy(q_logits, wanted)

    steps = optimise(model, minutes * 0.8, loss_of_batch, lambda: held_out_loss(model, held, device))
    print(f"draft: {steps} steps, held-out {held_out_loss(model, held, device):.4f} nats a token")
    save(model, "draft")


def train_heads(steps: int, device: str) -> None:
    model = LlamaForCausalLM.from_pretrained(HOME / "target", dtype=torch.bfloat16).to(device)
    plan = MedusaPlan(heads=4, steps=steps)
    # This training is never resumed, so text and target are never compared with earlier ones.
    origin = Origin("demo-target", text="", own_tokens=0, target_fingerprint="")
    training = MedusaTraining(model, Windows(encoded(held_out=False), plan.length), plan, origin)
    while not training.over:
        loss = training.step()
        if training.done % 100 == 0:
            print(f"heads: step {training.done} of {steps}, {loss:.3f} nats a token at the first head", flush=True)
    training.save(HOME / "heads")
    print(f"heads: {training.accuracies()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["tokenizer", "target", "draft", "heads"])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=8, help="sequences per step")
    parser.add_argument("--length", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=1000, help="of heads")
    parser.add_argument("--resume", action="store_true", help="continue to train the existing draft")
    args = parser.parse_args()
    match args.stage:
        case "tokenizer":
            train_tokenizer()
        case "target":
            train_target(args.minutes, args.device, args.rows, args.length)
        case "draft":
            train_draft(args.minutes, args.device, args.rows, args.length, args.resume)
        case "heads":
            train_heads(args.steps, args.device)


if __name__ == "__main__":
    main()
