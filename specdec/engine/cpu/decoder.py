"""A decoder of the Llama kind on the CPU, with few operators.

A layer in transformers consists of about forty small operators. For the few rows of a decode step, these take as long
as the matrix products. Here a layer is four products and five compiled loops. The decoder uses the model's own weights;
the model's linear layers become parts of the joined products (`hf/linear.py`: `JoinedPart`). Models of other kinds keep
their own layers.
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
from specdec.engine.cpu.layers import PRODUCTS, Buffers, StepRows, ThreadShares, Weights, compiled, interpreted
from specdec.engine.cpu.openmp import evenly
from specdec.engine.cpu.packed_gemm import PackedGemm, Products, TiledInputs
from specdec.engine.hf.batch_invariance import TiledLinear
from specdec.engine.hf.hidden_states import Features
from specdec.engine.hf.pretrained import LayerAttention

FIRST_POSITIONS = 1024
"""Positions computed ahead: cosines and sines cover twice the last position needed, plus this many."""

SHARED_FROM = 1 << 13
"""Break-even for sharing a pass over memory among threads, in elements: about ten microseconds of work."""


@dataclass(frozen=True)
class _Workspace:
    """Memory for steps of one row count. All layers have the same shapes and use the same memory in turn."""

    residual: Tensor  # [t, hidden]
    normal: Tensor  # [t, hidden]
    inputs: list[Tensor]  # inputs of the products, one per kind
    buffers: Buffers  # the same memory as arrays
    tiled: TiledInputs | None  # inputs for prepacked GEMMs in compiled code, if used


class Decoder:
    """A decoder that runs a model's joined layers. Create a new one after replacing layers."""

    def __init__(self, model: PreTrainedModel, attends: list[LayerAttention]) -> None:
        config = model.config
        inside: Any = model.model
        self._embed = _embedding(inside.embed_tokens)
        self._rotary = inside.rotary_emb
        self._head = model.get_output_embeddings()
        self._dtype = model.dtype
        self._hidden = config.hidden_size
        self._heads = config.num_attention_heads
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

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        wanted: Tensor,
        attention: RaggedAttention,
        features: Features | None = None,
    ) -> Tensor:
        """Return the logits [n, vocabulary], float32, of the wanted rows; fill `features`, if given."""
        batch = attention.batch
        rows = len(tokens)
        self._know_angles(int(batch.positions.max()))
        assert attention.memory.whole is not None  # all layers of these models have the same shape
        keys, values = attention.memory.whole
        work = self._workspace(rows)
        work.buffers.residual[:] = 0
        products, layers = self._products(work)
        step = StepRows(
            batch.positions,
            batch.slots,
            batch.keys,
            batch.first,
            attention.pieces,
            *attention.scratch(self._width, self._width),
        )
        shares = ThreadShares(
            norms=evenly(rows, attention.threads, SHARED_FROM // self._hidden),
            heads=evenly(rows, attention.threads, SHARED_FROM // self._projected),
            gates=evenly(rows, attention.threads, SHARED_FROM // self._inner),
            attention=attention.shares_of(keys.shape[1], self._width),
        )
        update = self._embed(tokens)
        if features is None:
            layers(products, self._weights, step, keys, values, work.buffers, shares, update)
        else:
            # A run of the layers before layer i ends with layer i's first operation, the norm of the residual.
            bounds = [0, *sorted({*features.layers, len(keys)})]
            for begin, end in itertools.pairwise(bounds):
                parts = _parts(products, begin, end), _weights_of(self._weights, begin, end)
                layers(*parts, step, keys[begin:end], values[begin:end], work.buffers, shares, update)
                features.keep(end, work.residual if end < len(keys) else work.normal)
                # Adding negative zeros to the residual changes none of its bits.
                update = array_of(torch.full((rows, self._hidden), -0.0, dtype=self._dtype))
        logits: Tensor = self._head(work.normal[wanted])
        return logits

    def _products(self, work: _Workspace) -> tuple[Any, Callable[..., None]]:
        """Return the products and the function that runs the layers with them: compiled for prepacked GEMMs, else
        interpreted."""
        if self._packed is not None and work.tiled is not None:
            return self._packed.of(work.tiled, like=work.buffers.normal), compiled(self._width)
        return list(map(_product, self._linears, itertools.cycle(work.inputs))), interpreted(self._width)

    def _workspace(self, rows: int) -> _Workspace:
        """Return the workspace for this row count: the first rows of the largest buffers, grown if needed."""
        if rows > len(self._largest[0]):
            self._make_room(rows)
        found = self._workspaces.get(rows)
        if found is None:
            residual, normal, attended, gated, query = (buffer[:rows] for buffer in self._largest)
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
            found = self._workspaces[rows] = _Workspace(residual, normal, inputs, buffers, tiled)
        return found

    def _make_room(self, rows: int) -> None:
        self._workspaces.clear()
        widths = (self._hidden, self._hidden, self._heads * self._width, self._inner)
        stored = [torch.zeros(rows, width, dtype=self._dtype) for width in widths]
        # One assignment after all allocations: on a memory shortage the old set stays complete.
        self._largest = [*stored, torch.zeros(rows, self._heads, self._width)]

    def _know_angles(self, last: int) -> None:
        """Make sure that cosines and sines exist up to position `last`; compute missing ones with a margin."""
        if last < len(self._weights.cos):
            return
        positions = torch.arange(2 * last + FIRST_POSITIONS)[None]
        cos, sin = self._rotary(torch.empty(0, dtype=torch.float32), positions)
        half = cos.shape[-1] // 2  # both halves are equal
        cos, sin = (angle[0, :, :half].numpy().copy() for angle in (cos, sin))
        self._weights = self._weights._replace(cos=cos, sin=sin)


def _weights(inside: Any, attends: list[LayerAttention], epsilon: float) -> Weights:
    """Collect the weights of all layers, except the products' weights. Cosines and sines are left empty."""
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
        windows=np.asarray([attention.window or EVERYTHING for attention in attends]),
        scales=np.asarray([attention.scale for attention in attends], np.float32),
    )


def _weights_of(weights: Weights, begin: int, end: int) -> Weights:
    """Return the weights of layers begin..end-1, and the next norm: the first of layer end, or the model's last."""
    return weights._replace(
        norms=weights.norms[2 * begin : 2 * end + 1],
        head_norms=weights.head_norms[begin:end],
        windows=weights.windows[begin:end],
        scales=weights.scales[begin:end],
    )


def _parts(products: Any, begin: int, end: int) -> Any:
    """Return the products of layers begin..end-1, for compiled code or as a list of functions."""
    own = slice(PRODUCTS * begin, PRODUCTS * end)
    if isinstance(products, Products):
        return products._replace(weights=products.weights[own], biases=products.biases[own])
    return products[own]


def _linears(layer: Any) -> tuple[Any, ...]:
    """Return the linear layers of one decoder layer in order of use."""
    attention, mlp = layer.self_attn, layer.mlp
    return attention.q_proj.joined.linear, attention.o_proj, mlp.gate_proj.joined.linear, mlp.down_proj


def _embedding(embed: Any) -> Callable[[Tensor], Array]:
    """Return the function from tokens [t] to their embeddings [t, hidden] in the stored dtype. A plain table is read as
    an array, since a lookup in torch would release the GIL."""
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
