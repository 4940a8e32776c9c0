"""What `quantization_config` says of a checkpoint's weights."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxllm.errors import UnsupportedModelError, did_you_mean, shown
from jaxllm.models.weight_layouts import Shape, WeightLayout, awq, float4, gptq, mxfp8, packed, scaled

OF_ACTIVATIONS = (
    *("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point"),
    *(
        "input_scale_ub",
        "activation_scale",
        "kv_scale",
        "k_scale",
        "v_scale",
        "k_zero_point",
        "v_zero_point",
        "q_scale",
    ),
)
"""Arrays of a layer beside its weight: of activations and of KV, which are not quantised here."""


KV_SCALES = ("k_scale", "v_scale")
_KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@dataclasses.dataclass(frozen=True)
class Quantisation:
    """What a `quantization_config` says.

    Args:
        method: its `quant_method`.
        layouts: patterns of modules, and the layout of those that match; the first that does counts.
        ignored: patterns of modules that are not quantised.
        notes: what of it is not done here.
        has_kv_scales: whether keys and values are e4m3 with a scale for each layer, `k_scale` and `v_scale`.
    """

    method: str
    layouts: tuple[tuple[str, WeightLayout], ...]
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    has_kv_scales: bool = False

    def layout_of(self, module: str) -> WeightLayout | None:
        """The layout of a module's weight; None if it is not quantised."""
        if any(_matches(pattern, module) for pattern in self.ignored):
            return None
        named = (layout for pattern, layout in self.layouts if _matches(pattern, module))
        every = (layout for pattern, layout in self.layouts if pattern.lower() == _EVERY)
        return next(named, None) or next(every, None)

    @property
    def arrays(self) -> frozenset[str]:
        """Ends of the names of all arrays that stand for weights."""
        return frozenset(name for _, layout in self.layouts for name in layout.arrays)


_EVERY = "linear"


_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
"""What engines call the layer that a layer is a part of."""


def _matches(pattern: str, module: str) -> bool:
    """Whether a pattern is that of a module, or names the fused layer that it is a part of."""
    prefix, dot, name = module.rpartition(".")
    fused = _FUSED.get(name)
    is_fused = fused is not None and fused in pattern and _is_of(pattern, f"{prefix}{dot}{fused}")
    return is_fused or _is_of(pattern, module)


def _is_of(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return pattern == module or module.endswith("." + pattern)


KEYS = ("quantization_config", "compression_config")
"""Of a config.json that says how weights lie; the second is that of older llm-compressor."""


def quantisation_of(values: Mapping[str, Any]) -> Any:
    """What a config.json says of how its weights lie, if it says anything."""
    return next((values[key] for key in KEYS if values.get(key)), None)


def read_quantisation(config: Any) -> Quantisation:
    """What the `quantization_config` of a config.json says.

    Raises:
        UnsupportedModelError: it is not supported; the message says what is, and what to do.
    """
    if not isinstance(config, Mapping):
        raise UnsupportedModelError(f"config.json: quantization_config={shown(config)} must be an object")
    if isinstance(inner := config.get("quantization_config"), Mapping):  # as older llm-compressor has it
        config = {**config, **inner}
    method = config.get("quant_method")
    if method == "compressed_tensors":
        method = "compressed-tensors"
    if not isinstance(method, str) or method not in METHODS:
        hint = did_you_mean(method, METHODS) if isinstance(method, str) else ""
        raise UnsupportedModelError(
            f"config.json: weights are quantised by {shown(method)}, and {', '.join(METHODS)} are read; "
            f"{hint}take a checkpoint of one of these or in 16 bits, or make one where transformers can: "
            "AutoModelForCausalLM.from_pretrained(folder).dequantize().save_pretrained(other)"
        )
    return METHODS[method](config)


def _refuse(config: Mapping[str, Any], what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"config.json: quantization_config of {config.get('quant_method')} has {what}, which is not read; "
        "take the model's checkpoint in 16 bits, or in another layout"
    )


# What configurations say


def _integer(config: Mapping[str, Any], name: str, allowed: Sequence[int]) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or (allowed and value not in allowed):
        choices = f" ({', '.join(map(str, allowed))} are read)" if allowed else ""
        raise UnsupportedModelError(f"config.json: quantization_config has {name}={shown(value)}{choices}")
    return value


def _names(config: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    found: list[str] = []
    for key in keys:
        value = config.get(key) or []
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise UnsupportedModelError(
                f"config.json: quantization_config has {key}={shown(value)}: expected names"
            )
        found += value
    for name in found:
        try:
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
        except re.error as error:
            raise UnsupportedModelError(
                f"config.json: quantization_config has {name!r}, which is no regular expression ({error})"
            ) from error
    return tuple(found)


def _block(value: Any) -> Shape:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(n, int) and n > 0 for n in value):
        raise UnsupportedModelError(f"config.json: quantization_config has blocks of {shown(value)}")
    return tuple(value)


def _activations(what: str) -> str:
    return f"{what} are not quantised here: outputs are those of the weights alone"


def _compressed_tensors(config: Mapping[str, Any]) -> Quantisation:
    for key in ("sparsity_config", "transform_config"):
        value = config.get(key)
        if isinstance(value, Mapping) and value and value.get("format", "") != "dense":
            raise _refuse(config, f"{key}={shown(dict(value), 80)}")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _refuse(config, f"config_groups={shown(groups)}")
    layouts: list[tuple[str, WeightLayout]] = []
    notes: list[str] = []
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise _refuse(config, f"a group without weights: {shown(group, 80)}")
        layout = _compressed_layout(config, weights, group.get("format") or config.get("format"))
        if inputs := group.get("input_activations"):
            rounds = _rounds(inputs, weights) if isinstance(inputs, Mapping) else ""
            layout = layout.rounding(
                rounds, is_symmetric=bool(inputs.get("symmetric", True)) if rounds else True
            )
            notes += [] if rounds else [_activations("inputs of layers")]
        if not weights.get("symmetric", True):
            layout = layout.requiring("weight_zero_point")
        layouts += [(target, layout) for target in _names(group, "targets") or (_EVERY,)]
    scheme = config.get("kv_cache_scheme")
    has_kv_scales = isinstance(scheme, Mapping) and _KV_SCHEME.items() <= scheme.items()
    if scheme and not has_kv_scales:
        notes.append("KV is stored in the model's dtype, not as kv_cache_scheme says")
    return Quantisation(
        "compressed-tensors",
        tuple(layouts),
        _names(config, "ignore"),
        tuple(dict.fromkeys(notes)),
        has_kv_scales=has_kv_scales,
    )


def _rounds(inputs: Mapping[str, Any], weights: Mapping[str, Any]) -> str:
    """How compressed-tensors' `input_activations` are rounded; "" if that is not done here."""
    kind, strategy = inputs.get("type", "int"), inputs.get("strategy")
    if inputs.get("num_bits") != 8 or kind not in ("int", "float"):
        return ""
    is_symmetric, is_dynamic = inputs.get("symmetric", True), inputs.get("dynamic", False)
    if is_dynamic is True and is_symmetric and strategy == "token":
        is_plain = weights.get("num_bits") == 8 and weights.get("strategy") in ("channel", "tensor", None)
        is_plain &= bool(weights.get("symmetric", True)) and weights.get("type", "int") == "int"
        return "fp8" if kind == "float" else "int8" if is_plain else ""
    if is_dynamic is True and is_symmetric and kind == "float" and strategy == "group":
        return "fp8_128" if inputs.get("group_size") == 128 else ""
    if is_dynamic is False and strategy in ("tensor", None):
        return "int8_static" if kind == "int" else "fp8_static"
    return ""


def _compressed_layout(config: Mapping[str, Any], weights: Mapping[str, Any], form: Any) -> WeightLayout:
    group = weights.get("group_size")
    group = (
        group if isinstance(group, int) and group > 0 and weights.get("strategy") in ("group", None) else None
    )
    if form == "pack-quantized" and weights.get("type", "int") == "int":
        return packed(_integer(weights, "num_bits", (2, 4, 8)), group)
    if form in ("int-quantized", "float-quantized", "naive-quantized"):
        block = _block(weights.get("block_structure")) if weights.get("strategy") == "block" else ()
        _integer(weights, "num_bits", (8,))
        return scaled(str(form), block=block, group=group)
    if form == "mxfp4-pack-quantized":
        return float4(form, 32, ())
    if form == "nvfp4-pack-quantized":
        return float4(form, 16, ("weight_global_scale",))
    if form == "mxfp8-quantized":
        return mxfp8()
    raise _refuse(config, f"the format {shown(form)} of type {shown(weights.get('type'))}")


def _fp8(config: Mapping[str, Any]) -> Quantisation:
    block = _block(config.get("weight_block_size"))
    notes = (_activations("inputs of layers"),) if config.get("activation_scheme") else ()
    ignored = _names(config, "modules_to_not_convert", "ignored_layers")
    layout = scaled("fp8", alias="weight_scale_inv", block=block)
    return Quantisation("fp8", ((_EVERY, layout),), ignored, notes)


def _of_gptq(config: Mapping[str, Any]) -> Quantisation:
    forms = {config.get(key) for key in ("checkpoint_format", "format")} - {None} or {"gptq"}
    form = forms.pop()
    if forms or form not in ("gptq", "gptq_v2"):
        raise _refuse(config, " and ".join(f"format {shown(one)}" for one in (form, *forms)))
    if not isinstance(config.get("sym", False), bool):
        raise _refuse(config, f"sym={shown(config['sym'])}")
    if config.get("dynamic"):
        raise _refuse(config, f"dynamic={shown(config['dynamic'], 80)} (other bits for some layers)")
    layout = gptq(
        _integer(config, "bits", (2, 4, 8)),
        _integer(config, "group_size", ()),
        is_second=form == "gptq_v2",
        is_symmetric=config.get("sym", False),
    )
    layout = layout.requiring("g_idx") if config.get("desc_act") else layout
    return Quantisation("gptq", ((_EVERY, layout),), _names(config, "modules_to_not_convert"))


def _of_awq(config: Mapping[str, Any]) -> Quantisation:
    for name, other in (("bits", "w_bit"), ("group_size", "q_group_size")):  # as AutoAWQ writes them itself
        if other in config and config.get(name, config[other]) != config[other]:
            raise _refuse(config, f"{name}={shown(config[name])} and {other}={shown(config[other])}")
        config = {name: config.get(other), **config}
    _integer(config, "bits", (4,))
    forms = {str(config.get(key) or "gemm").lower() for key in ("version", "format", "checkpoint_format")}
    if forms != {"gemm"} or not config.get("zero_point", True):
        raise _refuse(
            config, f"version={', '.join(sorted(forms))} and zero_point={shown(config.get('zero_point'))}"
        )
    layout = awq(_integer(config, "group_size", ()))
    return Quantisation("awq", ((_EVERY, layout),), _names(config, "modules_to_not_convert"))


def _torchao(config: Mapping[str, Any]) -> Quantisation:
    types = config.get("quant_type")
    default = types.get("default") if isinstance(types, Mapping) else None
    kind = default.get("_type") if isinstance(default, Mapping) else None
    if kind not in _TORCHAO or set(types or ()) != {"default"}:
        raise _refuse(config, f"quant_type={shown(types, 80)} (of torchao, {', '.join(_TORCHAO)} are read)")
    layout = scaled(kind, "_weight_qdata", "_weight_scale", "_weight_zero_point")
    layout = layout.rounding(_TORCHAO[kind])
    return Quantisation("torchao", ((_EVERY, layout),), _names(config, "modules_to_not_convert"))


_TORCHAO = {
    "Float8WeightOnlyConfig": "",
    "Int8WeightOnlyConfig": "",
    "Int8DynamicActivationInt8WeightConfig": "int8",
    "Float8DynamicActivationFloat8WeightConfig": "fp8",
}
"""Kinds, and how they round activations (`linear_weights.ROUNDS`)."""
METHODS: Mapping[str, Callable[[Mapping[str, Any]], Quantisation]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "gptq": _of_gptq,
    "awq": _of_awq,
    "torchao": _torchao,
}
"""What reads a `quantization_config`, by its `quant_method`."""
