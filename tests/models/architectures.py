"""Every architecture of `transformers`, tiny and with random weights: made from its own configuration, without knowing what it is."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import sashiko
from sashiko.diagnostics.errors import SashikoError
from sashiko.graph.refusals import PERHAPS_BY_PARTS
from tests.driver.functions import left

# Rounding errors of sums in another order, relative to the largest element of a result, as in test_models.py; deep convolutional
# networks of random weights enlarge them.
TOLERANCE = 2e-4
# Of the largest element: what quantizing may cost where the simulation says that it costs less, and how many times as much where it says
# so. One rounding of an integer the other way is multiplied by the layers behind it like any other error.
INT8_ERROR, INT8_FACTOR = 0.02, 2.5
MOST_PARAMETERS = 60_000_000

_SAME: dict[int, str] = {
    64: "hidden_size d_model n_embd dim embed_dim embedding_size projection_dim moe_intermediate_size",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers num_key_value_heads "
       "num_experts_per_tok type_vocab_size eos_token_id",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_local_experts num_experts "
       "n_routed_experts",
    128: "intermediate_size ffn_dim d_ff hidden_dim encoder_ffn_dim decoder_ffn_dim max_position_embeddings n_positions",
    16: "d_kv head_dim rotary_dim kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim attention_window",
    1: "n_group topk_group first_k_dense_replace bos_token_id decoder_start_token_id",
    0: "num_nextn_predict_layers pad_token_id",
    300: "vocab_size", 32: "q_lora_rank image_size", 8: "patch_size sliding_window",
}
_SIZES = {key: size for size, keys in _SAME.items() for key in keys.split()}
_KEPT_NONE = ("num_key_value_heads", "q_lora_rank", "head_dim")  # None means that there are none, or as many as of another kind
_INNER = ("text_config", "vision_config", "audio_config", "encoder", "decoder", "backbone_config", "qformer_config")
_WORDS, _LENGTH = 290, 24


@dataclass(frozen=True)
class Outcome:
    """status: right, wrong, refused (with a way out), error or skipped (nothing to compare with). left: operations that PyTorch runs."""

    name: str
    status: str
    detail: str = ""
    left: tuple[str, ...] = ()


def names() -> list[str]:
    return sorted(CONFIG_MAPPING_NAMES)


def check(name: str) -> Outcome:
    """Compiles one architecture in fp32, and quantized, and compares with eager and with the simulation."""
    torch.manual_seed(0)
    try:
        model, first, second = _made(name)
        expected = [_tensors(model(**inputs)) for inputs in (first, second)]
        if _error(_tensors(model(**first)), expected[0]) > TOLERANCE:
            raise ValueError("it draws random numbers")
    except Exception as error:  # these are configurations that nobody wrote for this architecture
        return Outcome(name, "skipped", _line(error))
    try:
        return _compared(name, model, (first, second), expected)
    except SashikoError as error:
        known = error.hint and error.hint != PERHAPS_BY_PARTS
        return Outcome(name, "refused" if known else "error", _line(error))
    except Exception as error:
        return Outcome(name, "error", _line(error))


def _compared(name: str, model: nn.Module, inputs: tuple[dict[str, Any], ...], expected: list[list[torch.Tensor]]) -> Outcome:
    compiled = sashiko.compile(model, inputs[0])
    remain = tuple(dict.fromkeys(left(compiled)))
    errors = [_error(_tensors(compiled(**given)), wanted) for given, wanted in zip(inputs, expected, strict=True)]
    if not max(errors) <= TOLERANCE:
        return Outcome(name, "wrong", f"fp32: relative error {max(errors):.1e}", remain)
    quantized = sashiko.quantize(model, inputs, progress=False)
    # Whole numbers, such as the experts that are chosen, differ or do not; what follows from them is in the floats.
    wanted = _floats(expected[0])
    simulated = _error(_floats(_tensors(quantized(**inputs[0]))), wanted)
    real = _error(_floats(_tensors(sashiko.compile(quantized, inputs[0])(**inputs[0]))), wanted)
    if not real <= max(INT8_FACTOR * simulated, INT8_ERROR):
        return Outcome(name, "wrong", f"int8: relative error {real:.1e}, simulated {simulated:.1e}", remain)
    return Outcome(name, "right", "", remain)


def _made(name: str) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    """The model and two calls of the same sizes. Raises whatever the architecture does with such a configuration."""
    config = _shrunk(CONFIG_MAPPING[name]())
    for inner in _INNER:
        if isinstance(part := getattr(config, inner, None), PretrainedConfig):
            _shrunk(part)
    with torch.device("meta"):
        size = sum(p.numel() for p in _built(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size} parameters, though small")
    model = _built(config).eval().float()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # no biases of 0, no gains of 1
            parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    return model, *(dict(_inputs(model, config)) for _ in range(2))  # type: ignore[return-value]


def _built(config: PretrainedConfig) -> nn.Module:
    try:
        return AutoModel.from_config(config)  # type: ignore[no-any-return]
    except ValueError:
        return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


def _shrunk(config: PretrainedConfig) -> PretrainedConfig:
    wanted: dict[str, Any] = {key: size for key, size in _SIZES.items() if _is_size(key, getattr(config, key, False))}
    if kinds := getattr(config, "layer_types", None):  # one layer of each of two kinds
        wanted["layer_types"] = (list(dict.fromkeys(kinds)) * 2)[:2]
    if hasattr(config, "use_cache"):
        wanted["use_cache"] = False
    for key, value in wanted.items():
        with suppress(AttributeError):  # it follows from other sizes
            setattr(config, key, value)
    return config


def _is_size(key: str, there: object) -> bool:
    return key not in _KEPT_NONE if there is None else isinstance(there, int) and not isinstance(there, bool)


def _inputs(model: nn.Module, config: PretrainedConfig) -> Iterator[tuple[str, Any]]:
    taken = inspect.signature(model.forward).parameters
    if "input_ids" in taken:
        yield "input_ids", torch.randint(3, _WORDS, (2, _LENGTH))
        if "attention_mask" in taken:
            yield "attention_mask", (torch.arange(_LENGTH) < torch.tensor([[_LENGTH], [_LENGTH * 2 // 3]])).long()
    if "decoder_input_ids" in taken:
        yield "decoder_input_ids", torch.randint(3, _WORDS, (2, _LENGTH // 2))
    if "pixel_values" in taken:
        size = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", 32)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        yield "pixel_values", torch.randn(2, getattr(config, "num_channels", None) or 3, height, width)
    if "input_values" in taken:
        yield "input_values", torch.randn(2, 4000)
    if "input_features" in taken and "input_ids" not in taken:
        yield "input_features", torch.randn(2, getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 1500))
    if "use_cache" in taken:
        yield "use_cache", False


def _tensors(result: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(result.to_tuple() if hasattr(result, "to_tuple") else result)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _floats(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor.is_floating_point()]


def _error(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest difference, relative to the largest element of its tensor; infinite where it is no matter of rounding."""
    worst = 0.0 if len(got) == len(expected) else float("inf")
    for mine, theirs in zip(got, expected, strict=False):
        finite = theirs.isfinite()
        if mine.shape != theirs.shape or not torch.equal(mine.isfinite(), finite):
            return float("inf")
        if not theirs.is_floating_point():
            worst = worst if torch.equal(mine, theirs) else float("inf")
        elif finite.any():
            worst = max(worst, float((mine - theirs)[finite].abs().max() / theirs[finite].abs().max().clamp_min(1e-9)))
    return worst


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
