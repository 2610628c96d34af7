"""A decoder of the Llama kind on the CPU, in few operators.

Each of transformers' layers is about forty small operators, which for the few rows of a decoding step take as long as
the matrix products. Here a layer is four products and five compiled loops. It uses the model's own weights; the model's
linear layers are parts of the joined products here (`hf/linear.py`: `Part`). Models of any other kind keep their own
layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.engine.cpu.arithmetic import Array, array_of
from specdec.engine.cpu.attention import EVERYTHING, RaggedAttention
from specdec.engine.cpu.layers import PRODUCTS, Buffers, Shares, StepRows, Weights, compiled, interpreted
from specdec.engine.cpu.openmp import evenly
from specdec.engine.cpu.packed_gemm import PackedGemm, TiledInputs
from specdec.engine.hf.batch_invariance import TiledLinear
from specdec.engine.hf.pretrained import LayerAttention

FIRST_POSITIONS = 1024
"""Positions whose cosines and sines are computed at once, beyond twice the last position that is needed."""

SHARED_FROM = 1 << 13
"""Numbers from which sharing a pass over them among threads pays: about ten microseconds' work."""


@dataclass(frozen=True)
class _Workspace:
    """Memory for steps of one number of rows. All layers have the same shapes, and use the same memory one after the
    other."""

    normal: Tensor  # [t, hidden]
    inputs: list[Tensor]  # the products' inputs, one for each kind
    buffers: Buffers  # the same memory as arrays
    tiled: TiledInputs | None  # the inputs for prepacked GEMMs in compiled code, if they are used


class Decoder:
    """A decoder that runs a model's joined layers. When layers have been replaced, a new one must be made."""

    def __init__(self, model: PreTrainedModel, attends: list[LayerAttention]) -> None:
        config = model.config
        inside: Any = model.model
        self._embed = _embedding(inside.embed_tokens)
        self._rotary = inside.rotary_emb
        self._head = model.get_output_embeddings()
        self._dtype = model.dtype
        self._hidden = config.hidden_size
        # The heads of this process only: a model may be cut into parts.
        self._heads = attends[0].kv_heads * (config.num_attention_heads // config.num_key_value_heads)
        self._width = attends[0].width
        self._projected = (self._heads + 2 * attends[0].kv_heads) * self._width
        gate_proj = inside.layers[0].mlp.gate_proj
        self._inner = gate_proj.outputs.stop - gate_proj.outputs.start
        self._weights = _weights(inside, attends, config.rms_norm_eps)
        self._linears = [linear for layer in inside.layers for linear in _linears(layer)]
        untiled = [linear.linear if isinstance(linear, TiledLinear) else linear for linear in self._linears]
        self._packed = PackedGemm.fitting(untiled, PRODUCTS)
        self._workspaces: dict[int, _Workspace] = {}
        self._make_room(1)

    def __call__(self, tokens: Tensor, positions: Tensor, wanted: Tensor, attention: RaggedAttention) -> Tensor:
        """Return the logits [n, vocabulary], float32, of the wanted rows."""
        batch = attention.batch
        rows = len(tokens)
        self._know_angles(int(batch.positions.max()))
        assert attention.memory.whole is not None  # the layers of these models are alike
        keys, values = attention.memory.whole
        work = self._workspace(rows)
        work.buffers.residual[:] = 0
        products, layers = self._products(work)
        layers(
            products,
            self._weights,
            StepRows(
                batch.positions,
                batch.slots,
                batch.keys,
                batch.first,
                attention.pieces,
                *attention.scratch(self._width, self._width),
            ),
            keys,
            values,
            work.buffers,
            Shares(
                norms=evenly(rows, attention.threads, SHARED_FROM // self._hidden),
                heads=evenly(rows, attention.threads, SHARED_FROM // self._projected),
                gates=evenly(rows, attention.threads, SHARED_FROM // self._inner),
                attention=attention.shares_of(keys.shape[1], self._width),
            ),
            self._embed(tokens),
        )
        logits: Tensor = self._head(work.normal[wanted])
        return logits

    def _products(self, work: _Workspace) -> tuple[Any, Callable[..., None]]:
        """Return the products and the function that runs the layers with them: compiled for prepacked GEMMs, else
        interpreted."""
        if self._packed is not None and work.tiled is not None:
            return self._packed.of(work.tiled, like=work.buffers.normal), compiled(self._width)
        return list(map(_product, self._linears, itertools.cycle(work.inputs))), interpreted(self._width)

    def _workspace(self, rows: int) -> _Workspace:
        """Return the workspace for this number of rows: the first rows of the largest buffers, which grow if needed."""
        if rows > len(self._largest[0]):
            self._make_room(rows)
        found = self._workspaces.get(rows)
        if found is None:
            residual, normal, attended, gated, query = (each[:rows] for each in self._largest)
            inputs = [normal, attended, normal, gated]
            buffers = Buffers(
                array_of(residual),
                array_of(normal),
                query.numpy(),
                array_of(attended).reshape(query.shape),
                array_of(gated),
            )
            tiles = [_tiles(linear, rows) for linear in self._linears[:PRODUCTS]]
            tiled = None if self._packed is None else TiledInputs(inputs, tiles)
            found = self._workspaces[rows] = _Workspace(normal, inputs, buffers, tiled)
        return found

    def _make_room(self, rows: int) -> None:
        self._workspaces.clear()
        widths = (self._hidden, self._hidden, self._heads * self._width, self._inner)
        stored = [torch.zeros(rows, width, dtype=self._dtype) for width in widths]
        self._largest = [*stored, torch.zeros(rows, self._heads, self._width)]  # all of them, or memory was short

    def _know_angles(self, last: int) -> None:
        """Compute the cosines and sines of all positions up to `last`, and beyond, unless they are there."""
        if last < len(self._weights.cos):
            return
        positions = torch.arange(2 * last + FIRST_POSITIONS)[None]
        cos, sin = self._rotary(torch.empty(0, dtype=torch.float32), positions)
        half = cos.shape[-1] // 2  # the other half is the same
        cos, sin = (angle[0, :, :half].numpy().copy() for angle in (cos, sin))
        self._weights = self._weights._replace(cos=cos, sin=sin)


def _weights(inside: Any, attends: list[LayerAttention], epsilon: float) -> Weights:
    """Collect the weights of all layers, except those of products; cosines and sines are left empty."""
    around = [norm for layer in inside.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    norms = np.stack([_weight(norm) for norm in (*around, inside.norm)])
    of_heads = [
        [_weight(getattr(layer.self_attn, name)) for name in ("q_norm", "k_norm") if hasattr(layer.self_attn, name)]
        for layer in inside.layers
    ]
    return Weights(
        norms=norms,
        head_norms=np.asarray(of_heads, norms.dtype).reshape(len(attends), -1, attends[0].width),
        epsilon=np.float32(epsilon),
        cos=np.empty((0, 0), np.float32),
        sin=np.empty((0, 0), np.float32),
        windows=np.asarray([each.window or EVERYTHING for each in attends]),
        scales=np.asarray([each.scale for each in attends], np.float32),
    )


def _linears(layer: Any) -> tuple[Any, ...]:
    """Return the linear layers of one decoder layer, in the order in which they are used."""
    attention, mlp = layer.self_attn, layer.mlp
    return attention.q_proj.joined.linear, attention.o_proj, mlp.gate_proj.joined.linear, mlp.down_proj


def _embedding(embed: Any) -> Callable[[Tensor], Array]:
    """Return the function from tokens [t] to their embeddings [t, hidden], as stored. A plain table is read as an
    array, since torch would release the interpreter's lock for it."""
    if type(embed) is torch.nn.Embedding and type(embed.weight) is torch.nn.Parameter and not embed._forward_hooks:
        table = array_of(embed.weight.detach())
        return lambda tokens: table[tokens.numpy()]
    return lambda tokens: array_of(embed(tokens))


def _tiles(linear: Any, rows: int) -> list[int]:
    return linear.tiles(rows) if isinstance(linear, TiledLinear) else [rows]


def _product(linear: Any, x: Tensor) -> Callable[[], Array]:
    return lambda: array_of(linear.forward(x))


def _weight(norm: Any) -> Array:
    return array_of(norm.weight.detach())
