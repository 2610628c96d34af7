"""Loads a causal language model of transformers with our attention, and determines its layers' attention parameters and
whether it can run in a packed batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import structlog
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from specdec.engine.hf import attention_hook
from specdec.engine.hf.checkpoint import vetted
from specdec.engine.hf.linear import is_plain
from specdec.engine.hf.random_weights import RandomWeights
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import ModelDirectoryError, in_one_line, with_class
from specdec.engine.preflight.architectures import check_layers, check_rope
from specdec.engine.preflight.quantisation import check_quantisation, quantised_by
from specdec.engine.unsupported import UnsupportedModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PROBE = "specdec-probe"

log = structlog.get_logger()


class LayerAttention(NamedTuple):
    """The shape of one layer's queries, keys and values, and its attention parameters."""

    heads: int
    kv_heads: int
    width: int  # key width
    value_width: int
    scale: float
    window: int | None  # number of latest tokens that a row sees, including itself


def load(
    directory: ModelDirectory, dtype: torch.dtype, device: str, kept: torch.dtype | None = None
) -> PreTrainedModel:
    """Load a model with our attention; ModelDirectoryError or UnsupportedModelError, with the reason, if impossible. A
    quantised model keeps its own linear layers. `kept`: the weight files' dtype; if given, parameters stay in it until
    the caller converts them, while buffers have `dtype`."""
    _silence()
    config, kind = _configuration(directory, device)
    if isinstance(directory, RandomWeights):
        return _drawn(config, dtype, device, directory.seed)
    if quantised_by(directory) is None or device == "cpu":
        model = _read(directory, dtype, kind, kept).to(device)
    else:
        model = _read(
            directory, dtype, kind, device_map={"": device}
        )  # not all kinds of quantised weights can be moved
    head = model.get_output_embeddings()
    if is_quantised(model) and not is_plain(head):
        raise UnsupportedModelError(f"{directory.name}: its output head is quantised ({type(head).__name__})")
    return model


def check_tensors(directory: ModelDirectory) -> None:
    """Raise, as `load` would, if the configuration is refused, or if tensors of the model are missing or have other
    shapes than in the weight files. The model is built on the meta device: no weights are read."""
    _silence()
    _, kind = _configuration(directory, "cpu")
    _read(directory, torch.float32, kind, device_map={"": "meta"})


def _silence() -> None:
    """Keep transformers from printing: important reports are raised here as one-line errors."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def _read(
    directory: ModelDirectory, dtype: torch.dtype, kind: Any, kept: torch.dtype | None = None, **options: Any
) -> PreTrainedModel:
    directory.weights()  # names an unreadable file; refuses a named pipe, where a read would block
    with vetted(directory) as folder:
        try:
            loader = AutoModelForCausalLM if kept is None else _keeping(kind, kept)
            model, report = loader.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation=attention_hook.NAME,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below: transformers' error does not name them
                **options,
            )
        except Exception as error:  # transformers' errors have no common base
            quantised = f" (quantised by {method})" if (method := quantised_by(directory)) else ""
            why = _why(directory, error).replace(str(folder), str(directory.path))
            raise ModelDirectoryError(f"{directory.path}{quantised}: cannot be loaded: {why}") from error
    if report["missing_keys"]:  # transformers would continue with random numbers
        missing = sorted(report["missing_keys"])
        raise ModelDirectoryError(f"{directory.path}: {len(missing)} tensors are missing, such as {missing[0]}")
    if report["mismatched_keys"]:
        name, stored, expected = min(report["mismatched_keys"])
        raise ModelDirectoryError(
            f"{directory.path}: {name} has the shape {list(stored)}, must have {list(expected)} by config.json"
        )
    if report["unexpected_keys"]:  # such as biases not mentioned in config.json
        unused = sorted(report["unexpected_keys"])
        log.warning("tensors_not_used", model=directory.name, count=len(unused), one=unused[0])
    if kept is not None:
        model.__class__ = kind
    return model.eval()


def _why(directory: ModelDirectory, error: Exception) -> str:
    """Return the message of a library's error while loading. A KeyError has only the value that was looked up: name the
    configuration's field with this value, if there is one."""
    if not isinstance(error, KeyError):
        return in_one_line(error)
    for name, value in _fields(directory.whole_config):
        if error.args == (value,):
            return f"transformers does not know {error}, which config.json has as {name}"
    return with_class(error)


def _fields(config: dict[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of a configuration, at any depth, with their places as prefixes of their names."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _fields(value, f"{place}{name}.")
        else:
            yield f"{place}{name}", value


def _keeping(kind: Any, dtype: torch.dtype) -> Any:
    """Return a subclass of a model's class whose parameters keep `dtype` when it is loaded in another dtype. It
    overrides the plan by which transformers loads some parameters in float32. Loading the whole model in `dtype` would
    round constants in its buffers."""
    return type(kind.__name__, (kind,), {"_get_dtype_plan": lambda self, _: {"*": dtype}})


def _drawn(config: PretrainedConfig, dtype: torch.dtype, device: str, seed: int) -> PreTrainedModel:
    """Create a model with random weights directly on its device."""
    on_device = [] if device == "cpu" else [torch.device(device)]
    with torch.random.fork_rng(devices=on_device), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention_hook.NAME)
    return model.eval()


def is_quantised(model: PreTrainedModel) -> bool:
    return getattr(model.config, "quantization_config", None) is not None


def _configuration(directory: ModelDirectory, device: str) -> tuple[PretrainedConfig, Any]:
    """Return transformers' configuration and class of a model. Before any weights are loaded, this raises
    ModelDirectoryError or UnsupportedModelError for a model known to be unsupported."""
    check_layers(directory)
    check_quantisation(directory, device)
    try:
        with vetted(directory) as folder:
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    except Exception as error:  # transformers' errors have no common base
        raise ModelDirectoryError(f"{directory.path}: cannot be loaded: {_why(directory, error)}") from error
    check_rope(directory, config.get_text_config().to_dict())  # transformers may rename a kind of rotary embeddings
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if layers is not None and layers < 1:
        raise ModelDirectoryError(f"{directory.path}/config.json: num_hidden_layers is {layers}, must be at least 1")
    if kind is None:
        raise UnsupportedModelError(
            f"{directory.name}: {type(config).__name__} is not the configuration of a causal language model"
        )
    if not getattr(kind, "_supports_attention_backend", False):
        raise UnsupportedModelError(
            f"{directory.name}: {kind.__name__} does not use transformers' attention interface, so it cannot run in "
            "a packed batch"
        )
    return config, kind


def shared_window(layers: Sequence[LayerAttention]) -> int | None:
    """Return the sliding window of all layers that have one; None if no layer has. Raise UnsupportedModelError if
    sizes differ: a padded batch has one mask for these layers."""
    windows = {layer.window for layer in layers if layer.window}
    if len(windows) > 1:
        raise UnsupportedModelError(
            f"its layers have sliding windows of {min(windows)} to {max(windows)} tokens; padded batches "
            "(--engine eager or onnx) support only one size"
        )
    return next(iter(windows), None)


def _has_window(model: PreTrainedModel) -> bool:
    """Return whether the configuration gives some layers a sliding window."""
    config = model.config.get_text_config()
    if getattr(config, "use_sliding_window", True) is False:
        return False
    return bool(getattr(config, "sliding_window", None))


def attention_of(model: PreTrainedModel) -> list[LayerAttention]:
    """Return the `LayerAttention` of every layer.

    Runs one token with a dummy attention that records its arguments for each layer. Raises UnsupportedModelError if a
    layer passes a tensor argument that our attention does not support, runs no attention, or is of an unsupported kind.
    """
    config = model.config.get_text_config()
    name = type(model).__name__
    found: dict[int, LayerAttention] = {}

    def look(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **asked: Any
    ) -> tuple[Tensor, None]:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        scale = asked.get("scaling") or query.shape[3] ** -0.5
        window = asked.get("sliding_window") or None
        found[layer] = LayerAttention(query.shape[1], key.shape[1], key.shape[3], value.shape[3], scale, window)
        terms = [term for term, value in asked.items() if isinstance(value, Tensor) and term != "position_ids"]
        if terms:
            raise UnsupportedModelError(
                f"{name}: its layers pass the tensor {terms[0]} to attention, which packed attention does not support"
            )
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register(PROBE, look)
    AttentionMaskInterface.register(PROBE, attention_hook.no_mask)
    zero = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        model.set_attn_implementation(PROBE)
        with torch.inference_mode():
            model(input_ids=zero, position_ids=zero, use_cache=False)
    except UnsupportedModelError:
        raise
    except Exception as error:  # an unknown architecture may raise anything
        raise UnsupportedModelError(f"{name} cannot run in a packed batch: {with_class(error)}") from error
    finally:
        model.set_attn_implementation(attention_hook.NAME)
    layers = config.num_hidden_layers
    if sorted(found) != list(range(layers)):
        raise UnsupportedModelError(
            f"{name}: {layers} layers, but attention ran in {len(found)} of them; models with state-space layers, or "
            "other layers with their own state, are not supported"
        )
    kinds = (
        getattr(config, "layer_types", None)
        or ["sliding_attention" if _has_window(model) else "full_attention"] * layers
    )
    for layer, kind in enumerate(kinds):
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(f"{name}: layer {layer} is of kind {kind}, which is not supported")
        if kind == "sliding_attention" and _has_window(model) and not found[layer].window:
            raise UnsupportedModelError(
                f"{name}: layer {layer} has a sliding window, but does not pass it to attention"
            )
    return [found[layer] for layer in range(layers)]
