"""Heads with random weights: Medusa's in vLLM's layout, EAGLE-3's in EAGLE's and speculators', block drafts, and MTP
layers."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models import VOCABULARY

HIDDEN = 64
"""Hidden size of all models of `tests.models`."""

Tensors = dict[str, Tensor]


def make_heads(folder: Path, *, heads: int = 3, hidden: int = HIDDEN, vocabulary: int = VOCABULARY) -> Path:
    """Write `heads` Medusa heads of one block with output heads of their own; return the folder."""
    random = torch.Generator().manual_seed(0)
    tensors = {}
    for number in range(heads):
        tensors[f"blocks.{number}.layers.0.weight"] = torch.randn(hidden, hidden, generator=random) / hidden
        tensors[f"lm_heads.{number}.weight"] = torch.randn(vocabulary, hidden, generator=random)
    return written(folder, tensors, {"model_type": "medusa", "num_heads": heads})


@dataclass(frozen=True)
class RandomEagle3:
    """EAGLE-3 heads with random weights. Fields are those of config.json, except for the sizes of the target."""

    stream: int = HIDDEN  # width of the target's features
    vocabulary: int = VOCABULARY
    hidden: int = 40
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 12
    inner: int = 56
    outputs: int = 150
    layers: tuple[int, ...] | None = (0, 1, 1)  # None: the default ones, three
    own_embeddings: bool = True
    own_output: bool = True
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_theta": 1000.0})
    scale: float = 0.3  # of the weights of products

    def tensors(self, prefix: str = "midlayer") -> Tensors:
        """Return the tensors in EAGLE's layout, or with `layers.0` as `prefix` in speculators'. They include a
        vocabulary map if the heads do not know all tokens."""
        random = torch.Generator().manual_seed(5)

        def product(rows: int, columns: int) -> Tensor:
            return self.scale * torch.randn(rows, columns, generator=random)

        def norm(size: int) -> Tensor:
            return 1.0 + 0.2 * torch.randn(size, generator=random)

        count = 3 if self.layers is None else len(self.layers)
        hidden, queries, keys = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        found = {
            "fc.weight": product(hidden, count * self.stream),
            f"{prefix}.input_layernorm.weight": norm(hidden),
            f"{prefix}.hidden_norm.weight": norm(hidden),
            f"{prefix}.self_attn.q_proj.weight": product(queries, 2 * hidden),
            f"{prefix}.self_attn.k_proj.weight": product(keys, 2 * hidden),
            f"{prefix}.self_attn.v_proj.weight": product(keys, 2 * hidden),
            f"{prefix}.self_attn.o_proj.weight": product(hidden, queries),
            f"{prefix}.post_attention_layernorm.weight": norm(hidden),
            f"{prefix}.mlp.gate_proj.weight": product(self.inner, hidden),
            f"{prefix}.mlp.up_proj.weight": product(self.inner, hidden),
            f"{prefix}.mlp.down_proj.weight": product(hidden, self.inner),
            "norm.weight": norm(hidden),
        }
        if self.norm_before_fc:
            found["input_norm.weight"] = norm(count * self.stream)
        if self.fc_norm:
            found |= {f"fc_norm.{number}.weight": norm(self.stream) for number in range(count)}
        if self.own_embeddings:
            found["embed_tokens.weight"] = torch.randn(self.vocabulary, hidden, generator=random)
        if self.own_output:
            found["lm_head.weight"] = torch.randn(self.outputs, hidden, generator=random)
        if self.outputs < self.vocabulary:
            ids = torch.randperm(self.vocabulary, generator=random)[: self.outputs].sort().values
            found["d2t"] = ids - torch.arange(self.outputs)
            found["t2d"] = torch.zeros(self.vocabulary, dtype=torch.bool).index_fill(0, ids, True)
        return found

    @property
    def layer(self) -> dict[str, Any]:
        """The fields of a Llama model of one layer."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 512,
            **self.rope,
        }

    def eagle(self) -> dict[str, Any]:
        """Return the configuration in EAGLE's layout."""
        ids = {} if self.layers is None else {"eagle_aux_hidden_state_layer_ids": list(self.layers)}
        found = self.layer | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": self.outputs}
        found |= {"target_hidden_size": self.stream, "eagle_config": {"use_aux_hidden_state": True, **ids}}
        return found | dict.fromkeys(self._flags, True)

    def speculators(self) -> dict[str, Any]:
        """Return the configuration in speculators' layout."""
        found: dict[str, Any] = {
            "speculators_model_type": "eagle3",
            "speculators_version": "0.4.0",
            "architectures": ["Eagle3Speculator"],
            "transformer_layer_config": self.layer | {"model_type": "llama"},
            "draft_vocab_size": self.outputs,
            "target_hidden_size": self.stream,
            "norm_before_residual": False,
            "norm_before_fc": False,
            "fc_norm": False,
            "norm_output": False,
        }
        if self.layers is not None:
            found["eagle_aux_hidden_state_layer_ids"] = list(self.layers)
        return found | dict.fromkeys(self._flags, True)

    @property
    def _flags(self) -> list[str]:
        names = "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"
        return [name for name in names if getattr(self, name)]


@dataclass(frozen=True)
class RandomBlock:
    """A block draft with random weights. Fields are those of config.json, except for the sizes of the target. `layers`:
    the target's layers that the features enter."""

    stream: int = HIDDEN  # width of the target's features
    vocabulary: int = VOCABULARY
    hidden: int = HIDDEN
    own_layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 12
    inner: int = 56
    outputs: int = VOCABULARY
    layers: tuple[int, ...] = (1, 1)
    rows: int = 5
    mask: int = 7
    from_anchor: bool = False
    rank: int = 0
    markov: str = "vanilla"
    confidence: bool = False
    reads_markov: bool = False
    own_embeddings: bool = False
    own_output: bool = False
    scale: float = 0.3  # of the weights of products

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors, except for the vocabulary map."""
        hidden, queries, keys = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        found: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, len(self.layers) * self.stream),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        for number in range(self.own_layers):
            prefix = f"layers.{number}"
            found |= {
                f"{prefix}.input_layernorm.weight": (hidden,),
                f"{prefix}.self_attn.q_proj.weight": (queries, hidden),
                f"{prefix}.self_attn.k_proj.weight": (keys, hidden),
                f"{prefix}.self_attn.v_proj.weight": (keys, hidden),
                f"{prefix}.self_attn.o_proj.weight": (hidden, queries),
                f"{prefix}.self_attn.q_norm.weight": (self.head_dim,),
                f"{prefix}.self_attn.k_norm.weight": (self.head_dim,),
                f"{prefix}.post_attention_layernorm.weight": (hidden,),
                f"{prefix}.mlp.gate_proj.weight": (self.inner, hidden),
                f"{prefix}.mlp.up_proj.weight": (self.inner, hidden),
                f"{prefix}.mlp.down_proj.weight": (hidden, self.inner),
            }
        if self.own_embeddings:
            found["embed_tokens.weight"] = (self.vocabulary, hidden)
        if self.own_output:
            found["lm_head.weight"] = (self.outputs, hidden)
        if self.rank:
            head, rank = "markov_head", self.rank
            found |= {
                f"{head}.markov_w1.weight": (self.vocabulary, rank),
                f"{head}.markov_w2.weight": (self.outputs, rank),
            }
            if self.markov == "gated":
                found |= {f"{head}.gate_proj.weight": (rank, hidden + rank), f"{head}.gate_proj.bias": (rank,)}
            if self.markov == "rnn":
                joint = 3 * rank, 2 * rank + hidden
                found |= {f"{head}.joint_proj.weight": joint, f"{head}.joint_proj.bias": (3 * rank,)}
        if self.confidence:
            inputs = hidden + self.rank if self.reads_markov else hidden
            found |= {"confidence_head.proj.weight": (1, inputs), "confidence_head.proj.bias": (1,)}
        return found

    def tensors(self) -> Tensors:
        """Return the tensors, including a vocabulary map if the draft does not know all tokens."""
        random = torch.Generator().manual_seed(6)
        found = {}
        for name, shape in self.shapes.items():
            numbers = torch.randn(shape, generator=random)
            found[name] = 1.0 + 0.2 * numbers if name.endswith("norm.weight") else self.scale * numbers
        if self.outputs < self.vocabulary:
            ids = torch.randperm(self.vocabulary, generator=random)[: self.outputs].sort().values
            found["d2t"] = ids - torch.arange(self.outputs)
        return found

    @property
    def layer(self) -> dict[str, Any]:
        """The fields of a Qwen3 model."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": self.own_layers,
            "layer_types": ["full_attention"] * self.own_layers,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000.0,
            "attention_bias": False,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 512,
        }

    @property
    def _dspark(self) -> dict[str, Any]:
        found: dict[str, Any] = {"markov_rank": self.rank, "enable_confidence_head": self.confidence}
        if self.rank:
            found["markov_head_type"] = self.markov
        if self.confidence:
            found["confidence_head_with_markov"] = self.reads_markov
        return found

    def z_lab(self) -> dict[str, Any]:
        """Return the configuration in z-lab's layout of DFlash."""
        own = {"mask_token_id": self.mask, "target_layer_ids": [layer - 1 for layer in self.layers]}
        return self.layer | {"architectures": ["DFlashDraftModel"], "block_size": self.rows, "dflash_config": own}

    def deepspec(self) -> dict[str, Any]:
        """Return the configuration in DeepSpec's layout."""
        own = {"mask_token_id": self.mask, "target_layer_ids": [layer - 1 for layer in self.layers]}
        own |= {"block_size": self.rows, "num_anchors": 512}
        return self.layer | {"architectures": ["Qwen3DSparkModel"]} | own | self._dspark

    def speculators(self) -> dict[str, Any]:
        """Return the configuration in speculators' layout."""
        return {
            "speculators_model_type": "dspark" if self.from_anchor else "dflash",
            "speculators_config": {"proposal_methods": [{"speculative_tokens": self.rows - (not self.from_anchor)}]},
            "transformer_layer_config": self.layer | {"model_type": "qwen3"},
            "draft_vocab_size": self.outputs,
            "target_hidden_size": self.stream,
            "block_size": self.rows,
            "mask_token_id": self.mask,
            "aux_hidden_state_layer_ids": list(self.layers),
        } | self._dspark


def make_block(folder: Path, draft: RandomBlock | None = None) -> Path:
    """Write a block draft, a DSpark in DeepSpec's layout if its first row guesses, else a DFlash in z-lab's; return the
    folder."""
    draft = draft or RandomBlock()
    return written(folder, draft.tensors(), draft.deepspec() if draft.from_anchor else draft.z_lab())


def make_eagle3(folder: Path, heads: RandomEagle3 | None = None) -> Path:
    """Write EAGLE-3 heads in EAGLE's layout; return the folder."""
    heads = heads or RandomEagle3()
    return written(folder, heads.tensors(), heads.eagle())


def make_mtp(folder: Path, target: Path, *, layout: str = "model", seed: int = 5) -> Path:
    """Write an MTP layer with random weights, in a folder with the target's configuration; return the folder. `layout`:
    "model" for names that begin with `model.layers.{N}.`, "mtp" for names that begin with `mtp.`."""
    config = json.loads((target / "config.json").read_text())
    count, width = config["num_hidden_layers"], config["hidden_size"]
    whole = mtp_model(target, seed)
    random = torch.Generator().manual_seed(seed)
    shared = "shared_head.norm" if layout == "model" else "norm"
    inner = "" if layout == "model" else "layers.0."
    names = (
        ("eh_proj", "hnorm", "enorm") if layout == "model" else ("fc", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    )
    begin = f"model.layers.{count}." if layout == "model" else "mtp."
    with tempfile.TemporaryDirectory() as name:
        whole.save_pretrained(name)
        stored = load_file(Path(name) / "model.safetensors")
    last = f"model.layers.{count}."
    tensors = {begin + inner + key.removeprefix(last): own for key, own in stored.items() if key.startswith(last)}
    product, *norms = (f"{begin}{name}.weight" for name in (*names, shared))
    tensors[product] = torch.randn(width, 2 * width, generator=random) / width**0.5
    tensors |= {norm: 0.5 + torch.rand(width, generator=random) for norm in norms}
    return written(folder, tensors, config | {"num_nextn_predict_layers": 1})


def mtp_model(target: Path, seed: int = 5) -> Any:
    """Return a model of a target's architecture with random weights and one more layer: the last is the MTP layer."""
    config = AutoConfig.from_pretrained(target)
    config.num_hidden_layers += 1
    for name in ("layer_types", "mlp_layer_types"):
        if getattr(config, name, None) is not None:
            of_mtp = getattr(config, f"mtp_{name}", None) or getattr(config, name)
            setattr(config, name, [*getattr(config, name), of_mtp[-1]])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def written(folder: Path, tensors: Tensors, config: Any = None, *, name: str = "model.safetensors") -> Path:
    """Write tensors in a file of this name, and a config.json; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if name.endswith(".safetensors"):
        save_file(tensors, folder / name)
    else:
        torch.save(tensors, folder / name)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder
