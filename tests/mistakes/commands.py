"""Wrong commands and their error messages: the table of docs/when-something-is-wrong.md."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from specdec.exit_status import ExitStatus

CANNOT, USAGE, REFUSED = ExitStatus.FAILED, ExitStatus.USAGE, ExitStatus.REFUSED
UNREACHABLE, TRY_AGAIN = ExitStatus.UNREACHABLE, ExitStatus.TRY_AGAIN

TAKEN = "50099"
"""In the table, a port used by another program; the test replaces it by a free port."""


@dataclass(frozen=True)
class Mistake:
    """A wrong command, run in the folder of `folder.py`."""

    command: str
    status: ExitStatus
    says: str
    """Part of the last line on stderr, which names what to change."""

    @property
    def words(self) -> list[str]:
        """The arguments of `specdec`."""
        return shlex.split(self.command)[1:]


FORMS = "an address is HOST:PORT, [IPV6]:PORT, dns:NAME:PORT"

MISTAKES = (
    Mistake("specdec generat 'def main('", USAGE, "No such command 'generat'. Did you mean 'generate'?"),
    Mistake("specdec generate", USAGE, "give either PROMPT or --prompt-file"),
    Mistake("specdec generate 'def' --temprature 1", USAGE, "No such option: --temprature"),
    Mistake(
        "specdec generate 'def' --max-tokens 0", USAGE, "'--max-tokens': Input should be greater than or equal to 1"
    ),
    Mistake("specdec generate 'def' --top-k -1", USAGE, "--top-k: is -1, must be a whole number from 0 to 4294967295"),
    Mistake(
        "specdec generate 'def' --max-tokens 5000000000",
        USAGE,
        "--max-tokens: is 5000000000, must be a whole number from 0 to 4294967295",
    ),
    Mistake("specdec generate 'def' --alpha 0.5", USAGE, "--alpha: needs --rule contrastive"),
    Mistake("specdec generate 'def' --typical-delta 0.5", USAGE, "--typical-delta: needs --rule typical"),
    Mistake("specdec generate 'def' --seed -1", USAGE, "'--seed': Input should be greater than or equal to 0"),
    Mistake(
        "specdec generate 'def' --speculation maybe", USAGE, "'--speculation': 'maybe' is not one of 'auto', 'off'"
    ),
    Mistake("specdec generate 'def' --timeout nan", USAGE, "'--timeout': Input should be less than or equal to 86400"),
    Mistake("specdec generate 'def' --address 127.0.0.1", USAGE, f"'127.0.0.1': the port is missing; {FORMS}"),
    Mistake("specdec generate 'def' --address http://a:1", USAGE, f"the scheme http: is not supported; {FORMS}"),
    Mistake("specdec generate 'def' --address 127.0.0.1:9", UNREACHABLE, "no server answers: 127.0.0.1:9"),
    Mistake("specdec generate --prompt-file prompt.jsonl", USAGE, "prompt.jsonl: No such file or directory"),
    Mistake("specdec generate --prompt-file no-json.jsonl", USAGE, "no-json.jsonl:2: is not JSON"),
    Mistake("specdec generate --prompt-file typo.jsonl", USAGE, "typo.jsonl:1: `temprature` cannot be set on a line"),
    Mistake("specdec generate --prompt-file prompts.jsonl --resume", USAGE, "--resume needs --out"),
    Mistake("specdec tokenize 'def' --address 127.0.0.1:9", UNREACHABLE, "no server answers: 127.0.0.1:9"),
    Mistake("specdec stats 127.0.0.1:9", UNREACHABLE, "127.0.0.1:9: no gRPC server answers"),
    Mistake("specdec evaluate target draft-1 --prompts prompts.jsonl", USAGE, "draft-1: no such directory"),
    Mistake(
        "specdec evaluate target foreign --prompts prompts.jsonl", USAGE, "the tokenizers of target and foreign differ"
    ),
    Mistake("specdec export target-1 exported", USAGE, "target-1: no such directory"),
    Mistake(
        "specdec export target notes",
        USAGE,
        "notes: is not replaced, because it contains something other than an exported model",
    ),
    Mistake(
        "specdec export onnx/target onnx", USAGE, "onnx: is not replaced, because it contains the source, onnx/target"
    ),
    Mistake(
        "specdec import-gguf converted/a.gguf converted",
        USAGE,
        "converted: is not replaced, because it contains the source, converted/a.gguf",
    ),
    Mistake("specdec train-heads target notes --text notes", USAGE, "notes: is not empty; write elsewhere"),
    Mistake(
        "specdec train-heads target new --text notes --kind eagle3 --layers 2", USAGE, "--layers: is for --kind medusa"
    ),
    Mistake("specdec train-heads target new --text none.txt", USAGE, "none.txt: cannot be read: No such file"),
    Mistake("specdec train-heads target new --text notes --ttt-steps 3", USAGE, "--ttt-steps: is for --kind eagle3"),
    Mistake(
        "specdec train-heads target new --text notes --block 5", USAGE, "--block: is for --kind dspark, not medusa"
    ),
    Mistake("specdec train-heads target new", USAGE, "--text: give the text to train on, or continue with --resume"),
    Mistake("specdec forget acme --draft 127.0.0.1:9", UNREACHABLE, "it may still keep the texts"),
    Mistake("specdec draft --model draft --learn-tokens 9", USAGE, "--learn-key-file: is needed with --learn-tokens"),
    Mistake(
        "specdec train-draft target foreign new --text notes", USAGE, "the tokenizers of target and foreign differ"
    ),
    Mistake(
        "specdec train-draft target draft begun --text notes",
        USAGE,
        "begun: has an unfinished training; continue with --resume, or write elsewhere",
    ),
    Mistake(
        "specdec train-draft target draft new --text a --replay-share 0.5", USAGE, "--replay-share: needs --replay"
    ),
    Mistake(
        "specdec train-draft target draft new --traffic h:1 --resume",
        USAGE,
        "--resume: cannot be combined with --traffic",
    ),
    Mistake("specdec train-draft target draft new --text a --served-labels", USAGE, "--served-labels: needs --traffic"),
    Mistake("specdec verifier", USAGE, "Missing option '--model'."),
    Mistake("specdec verifier --model target-1", CANNOT, "target-1: no such directory"),
    Mistake("specdec verifier --model big.gguf", CANNOT, "big.gguf: is not a GGUF file: it begins with b'vers'"),
    Mistake("specdec verifier --model dangling", CANNOT, "dangling: a link to gone, which does not exist"),
    Mistake("specdec verifier --model owner/big", CANNOT, "owner/big: no such directory; models are not downloaded"),
    Mistake("specdec verifier --model empty", CANNOT, "empty: no config.json"),
    Mistake(
        "specdec verifier --model half-a-config", CANNOT, "half-a-config/config.json: not JSON: Expecting property"
    ),
    Mistake("specdec verifier --model no-tokenizer", CANNOT, "no-tokenizer: no tokenizer.json"),
    Mistake("specdec verifier --model no-weights", CANNOT, "no-weights: no weights (*.safetensors or model.onnx)"),
    Mistake("specdec verifier --model cut-weights", CANNOT, "must have 413024 by its header: copy it again"),
    Mistake(
        "specdec verifier --model no-safetensors", CANNOT, "its header is truncated, or it is not a safetensors file"
    ),
    Mistake("specdec verifier --model mamba", CANNOT, "mamba: architecture mamba is not supported"),
    Mistake("specdec verifier --model magic", CANNOT, "magic: quantised by magic, which transformers does not support"),
    Mistake(
        "specdec verifier --model short",
        CANNOT,
        "max_position_embeddings is 8, must be an integer from 64 to 1073741824",
    ),
    Mistake("specdec verifier --model target --device cuda:9", CANNOT, "device cuda:9: "),
    Mistake("specdec verifier --model target --compile", CANNOT, "--compile is for --engine vllm, not for torch"),
    Mistake("specdec verifier --model target --device gpu", CANNOT, "device gpu: cpu, cuda and cuda:N are supported"),
    Mistake("specdec verifier --model target --dtype float16", CANNOT, "dtype float16: is for GPUs; on the CPU"),
    Mistake(
        "specdec verifier --model target --dtype int8", USAGE, "'int8' is not one of 'auto', 'float32', 'bfloat16'"
    ),
    Mistake(
        "specdec verifier --model target --threads 0", USAGE, "'--threads': Input should be greater than or equal to 1"
    ),
    Mistake("specdec verifier --model target --kv-tokens 9", USAGE, "'--kv-tokens': Input should be greater than or"),
    Mistake("specdec verifier --model target --kv-tokens 1000000000000", CANNOT, "free: use fewer --kv-tokens"),
    Mistake(
        "specdec verifier --model target --port 70000", USAGE, "'--port': Input should be less than or equal to 65535"
    ),
    Mistake(f"specdec verifier --model target --port {TAKEN}", CANNOT, f"another program listens on 127.0.0.1:{TAKEN}"),
    Mistake("specdec verifier --model target --host 203.0.113.7", CANNOT, "--host 203.0.113.7: cannot listen there"),
    Mistake(
        "specdec verifier --model target --draft-model foreign", CANNOT, "the tokenizers of target and foreign differ"
    ),
    Mistake("specdec verifier --model target --heads draft", CANNOT, "draft: has no heads: no tensors such as"),
    Mistake("specdec verifier --model target --speculation heads", USAGE, "--speculation: heads needs --heads"),
    Mistake(
        "specdec verifier --model target --engine vllm --speculation lookahead",
        USAGE,
        "--speculation: needs lookahead windows, which vLLM's engine lacks",
    ),
    Mistake(
        "specdec verifier --model target --jacobi 500",
        USAGE,
        "--jacobi: is 500, must be at most 129 (--max-window-rows 128)",
    ),
    Mistake(
        "specdec draft --model draft --expansion 4,17",
        USAGE,
        "--expansion: is 4,17: at depth 2 it is 17, must be 1 to 16",
    ),
    Mistake("specdec draft --model target --heads draft", USAGE, "--heads: needs --engine torch, not onnx"),
    Mistake(
        "specdec draft --model target --heads draft --engine torch", CANNOT, "draft: has no heads: no tensors such as"
    ),
    Mistake(
        "specdec verifier --model target --features draft --heads draft",
        USAGE,
        "--features: cannot be combined with --heads: draft services run the heads",
    ),
    Mistake("specdec verifier --config none.yaml", USAGE, "'--config' none.yaml: No such file or directory"),
    Mistake(
        "specdec verifier --config typo.yaml",
        USAGE,
        "kv-token is not an option of this service (did you mean kv-tokens?)",
    ),
    Mistake("specdec verifier --config few.yaml", USAGE, "'kv-tokens in few.yaml': Input should be greater than or"),
    Mistake("specdec verifier --model target --tls-key key.pem", CANNOT, "--tls-key is given, --tls-cert is missing"),
    Mistake(
        "specdec verifier --model target --tls-cert none.pem --tls-key key.pem",
        CANNOT,
        "--tls-cert none.pem: No such file or directory",
    ),
    Mistake("specdec generate 'def' --tls-cert me.pem", USAGE, "'--tls-cert': needs TLS: give --tls-ca or --tls too"),
    Mistake("specdec draft --model draft-1", CANNOT, "draft-1: no such directory"),
    Mistake("specdec draft --model draft --dtype bfloat16", CANNOT, "dtype bfloat16: the ONNX engine supports float32"),
    Mistake("specdec draft --model draft --device cuda:9", CANNOT, "device cuda:9: "),
    Mistake(
        "specdec orchestrator --model target",
        USAGE,
        "'--verifier': is missing; for several models give --models FILE instead",
    ),
    Mistake(
        "specdec orchestrator --models models.yaml --model target",
        USAGE,
        "'--model': must not be given with --models, whose file sets it",
    ),
    Mistake(
        "specdec orchestrator --model target --verifier a:1 --served-model-name b@c",
        USAGE,
        "'--served-model-name': must be a name of 1 to 256 printable characters without @",
    ),
    Mistake("specdec orchestrator --models none.yaml", CANNOT, "--models none.yaml: No such file or directory"),
    Mistake(
        "specdec orchestrator --models models.yaml",
        CANNOT,
        "--models models.yaml: models.'big': revisions.a: share: is missing, must be given where a model has several",
    ),
    Mistake("specdec orchestrator --model target --verifier big", USAGE, f"'big': the port is missing; {FORMS}"),
    Mistake("specdec orchestrator --model target --verifier http://big:1", USAGE, "the scheme http: is not supported"),
    Mistake(
        "specdec orchestrator --model target --verifier big:1 --peer-tls-name big",
        USAGE,
        "'--peer-tls-name': needs TLS: give --peer-tls-ca too",
    ),
    Mistake("specdec orchestrator --model target-1 --verifier big:1", CANNOT, "target-1: no such directory"),
    Mistake("specdec orchestrator --model no-tokenizer --verifier big:1", CANNOT, "no-tokenizer: no tokenizer.json"),
    Mistake(
        "specdec orchestrator --model bad-template --verifier big:1 --workers 2",
        CANNOT,
        "bad-template/chat_template.jinja: the chat template cannot be compiled",
    ),
    Mistake("specdec up --target target --chat-template none.jinja", CANNOT, "none.jinja: no such file"),
    Mistake("specdec up --target bad-template", CANNOT, "chat_template.jinja: the chat template cannot be compiled"),
    Mistake("specdec up --target too-cold", CANNOT, "too-cold/generation_config.json: temperature is -1, must be"),
    Mistake("specdec up --target target-1", CANNOT, "target-1: no such directory"),
    Mistake(f"specdec up --target target --port {TAKEN}", CANNOT, f"another program listens on 127.0.0.1:{TAKEN}"),
    Mistake(
        "specdec up --target target --orchestrator-tenants none.yaml",
        CANNOT,
        "--orchestrator-tenants none.yaml: No such file or directory",
    ),
    Mistake("specdec up --target target --verifier-step-rows 3", USAGE, "'--verifier-step-rows': Input should be"),
    Mistake(
        "specdec up --target target --draft draft --draft-heads draft",
        USAGE,
        "--draft: cannot be combined with --draft-heads (SPECDEC_DRAFT_HEADS), which replaces it",
    ),
    Mistake("specdec up --target target --worker 2", USAGE, "No such option: --worker"),
    Mistake(
        "specdec up --target target --tenants tenants.yaml",
        USAGE,
        "--tenants: there is no such option; --orchestrator-tenants",
    ),
    Mistake(
        "specdec serve target --max-num-seqs=64",
        USAGE,
        "--max-num-seqs: there is no such option; --verifier-max-sessions",
    ),
)
"""Commands that fail in any environment."""

ASKED = (
    Mistake("specdec generate ''", REFUSED, "text: is empty, must hold at least 1 character"),
    Mistake("specdec generate 'def' --temperature -1", REFUSED, "--temperature: is -1, must be a finite number"),
    Mistake("specdec generate 'def' --top-p 0", REFUSED, "--top-p: is 0, must be in (0, 1]"),
    Mistake("specdec generate 'def' --min-p 2", REFUSED, "--min-p: is 2, must be in [0, 1]"),
    Mistake("specdec generate 'def' --stop ''", REFUSED, "--stop[0]: has 0 characters, must have 1 to 256"),
    Mistake("specdec generate 'def' --lookahead 500 5 5", REFUSED, "adds 2008 tokens to a step, must add at most 128"),
    Mistake(
        "specdec generate 'def' --jacobi 500",
        REFUSED,
        "--jacobi: is (500, 2, 1), adds 499 tokens to a step, must add at most 128",
    ),
    Mistake(
        "specdec generate 'def' --max-branches 100000",
        REFUSED,
        "--max-branches: is 100000, must be at most 16",
    ),
    Mistake("specdec generate 'def' --rule contrastive --alpha 2", REFUSED, "--alpha: is 2, must be in (0, 1]"),
    Mistake(
        "specdec generate 'def' --rule typical --typical-epsilon 2",
        REFUSED,
        "--typical-epsilon: is 2, must be in (0, 1]",
    ),
    Mistake("specdec generate 'def' --rule contrastive", UNREACHABLE, "needs a draft: there is no draft service"),
    Mistake("specdec generate 'def' --timeout 0.001", TRY_AGAIN, "the timeout has passed"),
)
"""Commands that fail at a server whose target runs without a draft."""
