"""What `quantization_config` says of a checkpoint's weights."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxllm.errors import UnsupportedModelError, did_you_mean, shown
from jaxllm.models.published_layouts import awq, float4, gptq, mxfp8, packed, scaled
from jaxllm.models.weight_layouts import Shape, WeightLayout

KV_SCALES = ("k_scale", "v_scale")
_OF_KV = frozenset((*KV_SCALES, "kv_scale", "k_zero_point", "v_zero_point", "q_scale"))
_OF_INPUTS = frozenset(("input_scale", "input_zero_point", "input_global_scale", "activation_scale"))
_OF_OUTPUTS = frozenset(("output_scale", "output_zero_point"))
_UPPER_BOUND = "input_scale_ub"
BESIDE = _OF_KV | _OF_INPUTS | _OF_OUTPUTS | {_UPPER_BOUND, "weight_zero_point", "weight_g_idx", "g_idx"}
"""Arrays that are there in vain unless the configuration asks for them."""
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
        unused: arrays of KV, by the ends of their names, that it asks for and that are not read here.
    """

    method: str
    layouts: tuple[tuple[str, WeightLayout], ...]
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    has_kv_scales: bool = False
    unused: frozenset[str] = frozenset()

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
            f"{hint}take a checkpoint of one of these or in 16 bits{HOW_TO_DEQUANTISE.get(str(method), '')}"
        )
    return METHODS[method](config)


HOW_TO_DEQUANTISE = {
    "bitsandbytes": ", or make one with transformers: "
    "AutoModelForCausalLM.from_pretrained(folder).dequantize().save_pretrained(other)",
    "gguf": ", or make one with transformers: "
    "AutoModelForCausalLM.from_pretrained(folder, gguf_file=name).save_pretrained(other)",
}
"""How transformers makes a checkpoint of 16 bits of one of these methods."""


def _refuse(config: Mapping[str, Any], what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"config.json: quantization_config of {config.get('quant_method')} has {what}, which is not read; "
        "take the model's checkpoint in 16 bits, or in another layout"
    )


# What configurations say


def _integer(config: Mapping[str, Any], name: str, allowed: Sequence[int]) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value not in allowed:
        raise UnsupportedModelError(
            f"config.json: quantization_config has {name}={shown(value)} ({', '.join(map(str, allowed))} are "
            "read); take a checkpoint with one of these, or in 16 bits"
        )
    return value


def _flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UnsupportedModelError(
            f"config.json: quantization_config has {name}={shown(value)}: expected true or false"
        )
    return value


def _group(config: Mapping[str, Any]) -> int | None:
    """Inputs in a group, -1 for all of them; None if nothing is said."""
    value = config.get("group_size")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
        raise UnsupportedModelError(
            f"config.json: quantization_config has group_size={shown(value)}: expected a number of inputs, "
            "or -1 for all of them"
        )
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
    if isinstance(value, str) and re.fullmatch(r"\d+x\d+", value):
        value = [int(size) for size in value.split("x")]
    if not isinstance(value, list) or [type(size) for size in value] != [int, int] or min(value) < 1:
        raise UnsupportedModelError(
            f"config.json: quantization_config has blocks of {shown(value)}: expected outputs and inputs of "
            "one, such as [128, 128]"
        )
    return tuple(value)


def _activations(what: str) -> str:
    return f"{what} are not quantised here: outputs are those of the weights alone"


def _compressed_tensors(config: Mapping[str, Any]) -> Quantisation:
    for key in ("sparsity_config", "transform_config"):
        value = config.get(key)
        if value and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            raise _refuse(config, f"{key}={shown(value, 80)}")
    groups, scheme = config.get("config_groups"), config.get("kv_cache_scheme")
    if not isinstance(groups, Mapping) or not (groups or scheme):
        raise _refuse(config, f"config_groups={shown(groups)}")
    layouts: list[tuple[str, WeightLayout]] = []
    notes: list[str] = []
    for group in groups.values():
        layout, of_group = _of_group(config, group)
        targets = _names(group, "targets")
        if not targets:
            raise _refuse(config, f"a group without targets: {shown(group, 80)}")
        layouts += [(target, layout) for target in targets]
        notes += of_group
    said = Quantisation(
        "compressed-tensors", tuple(layouts), _names(config, "ignore"), tuple(dict.fromkeys(notes))
    )
    if isinstance(scheme, Mapping) and _KV_SCHEME.items() <= scheme.items():
        return dataclasses.replace(said, has_kv_scales=True)
    return _with_kv(config, said)


def _with_kv(config: Mapping[str, Any], said: Quantisation) -> Quantisation:
    """The same, with what is said of KV in words that are not followed here, if there are any."""
    if not config.get("kv_cache_scheme"):
        return said
    note = "KV is stored in the model's dtype, not as kv_cache_scheme says"
    return dataclasses.replace(said, notes=(*said.notes, note), unused=_OF_KV)


def _of_group(config: Mapping[str, Any], group: Any) -> tuple[WeightLayout, list[str]]:
    """The layout of a group of compressed-tensors, and what of it is not done here."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise _refuse(config, f"a group without weights: {shown(group, 80)}")
    layout = _compressed_layout(config, weights, group.get("format") or config.get("format"))
    notes = []
    if group.get("output_activations"):
        notes.append(_activations("outputs of layers"))
        layout = layout.leaving(*_OF_OUTPUTS)
    if inputs := group.get("input_activations"):
        if not isinstance(inputs, Mapping):
            raise _refuse(config, f"input_activations={shown(inputs, 80)}")
        rounds = _rounds(inputs, weights)
        layout = layout.rounding(rounds, is_symmetric=_flag(inputs, "symmetric", True))
        if not rounds:
            notes.append(_activations("inputs of layers"))
            layout = layout if inputs.get("dynamic") is True else layout.leaving(*_OF_INPUTS)
    is_symmetric = _flag(weights, "symmetric", True)
    return (layout.without if is_symmetric else layout.requiring)("weight_zero_point"), notes


def _rounds(inputs: Mapping[str, Any], weights: Mapping[str, Any]) -> str:
    """How compressed-tensors' `input_activations` are rounded; "" if that is not done here."""
    kind, strategy = inputs.get("type", "int"), inputs.get("strategy")
    if inputs.get("num_bits") != 8 or kind not in ("int", "float"):
        return ""
    is_symmetric, is_dynamic = _flag(inputs, "symmetric", True), inputs.get("dynamic", False)
    if is_dynamic is True and is_symmetric and strategy == "token":
        is_plain = weights.get("num_bits") == 8 and weights.get("strategy") in ("channel", "tensor", None)
        is_plain &= _flag(weights, "symmetric", True) and weights.get("type", "int") == "int"
        return "fp8" if kind == "float" else "int8" if is_plain else ""
    if is_dynamic is True and is_symmetric and kind == "float" and strategy == "group":
        return "fp8_128" if inputs.get("group_size") == 128 else ""
    if is_dynamic is False and strategy in ("tensor", None) and (is_symmetric or kind == "int"):
        return "int8_static" if kind == "int" else "fp8_static"
    return ""


_BY_GROUPS = {"mxfp4-pack-quantized": (4, 32), "nvfp4-pack-quantized": (4, 16), "mxfp8-quantized": (8, 32)}
"""Bits, and inputs in a group, of what has no other."""


def _compressed_layout(config: Mapping[str, Any], weights: Mapping[str, Any], form: Any) -> WeightLayout:
    kind, strategy, size = weights.get("type", "int"), weights.get("strategy"), _group(weights)
    known = (None, "tensor", "channel", "group", "block", "tensor_group")
    if kind not in ("int", "float") or strategy not in known:
        raise _refuse(config, f"weights of type {shown(kind)} and strategy {shown(strategy)}")
    group = None if size == -1 or strategy not in ("group", None) else size
    if form == "pack-quantized" and kind == "int":
        layout = packed(_integer(weights, "num_bits", (2, 4, 8)), group)
        return (layout.requiring if _is_ordered(config, weights) else layout.without)("weight_g_idx")
    if _is_ordered(config, weights):
        raise _refuse(config, f"the format {shown(form)} and actorder={shown(weights['actorder'])}")
    if form in ("int-quantized", "float-quantized", "naive-quantized"):
        block = _block(weights.get("block_structure")) if strategy == "block" else ()
        _integer(weights, "num_bits", (8,))
        return scaled(form, block=block, group=group, is_float=kind == "float", strategy=strategy)
    if isinstance(form, str) and form in _BY_GROUPS and kind == "float":
        bits, inputs = _BY_GROUPS[form]
        _integer({"num_bits": bits, **weights}, "num_bits", (bits,))
        _integer({**weights, "group_size": size or inputs}, "group_size", (inputs,))
        if bits == 8:
            return mxfp8()
        return float4(form, inputs, ("weight_global_scale",) if form.startswith("nv") else ())
    raise _refuse(config, f"the format {shown(form)} of type {shown(weights.get('type'))}")


def _is_ordered(config: Mapping[str, Any], weights: Mapping[str, Any]) -> bool:
    """Whether groups are of inputs in an order of their own, which is stored beside them."""
    order = weights.get("actorder")
    if order not in (None, False, True, "group", "dynamic", "weight", "static"):
        raise _refuse(config, f"actorder={shown(order)}")
    return order in (True, "group", "dynamic")


def _fp8(config: Mapping[str, Any]) -> Quantisation:
    block = _block(config.get("weight_block_size"))
    if (scheme := config.get("activation_scheme")) not in (None, "dynamic", "static"):
        raise _refuse(config, f"activation_scheme={shown(scheme)}")
    ignored = _names(config, "modules_to_not_convert", "ignored_layers")
    strategy = "channel" if config["quant_method"] == "fbgemm_fp8" else None
    layout = scaled("fp8", alias="weight_scale_inv", block=block, strategy=strategy)
    asked = _OF_INPUTS if scheme == "static" else {_UPPER_BOUND} if strategy else ()
    layout = layout.without("weight_zero_point").leaving(*asked)
    notes = (_activations("inputs of layers"),)  # of the one dynamic unless it says static, of the other so
    return _with_kv(config, Quantisation(config["quant_method"], ((_EVERY, layout),), ignored, notes))


def _stated_group(config: Mapping[str, Any]) -> int:
    if (group := _group(config)) is None:
        raise UnsupportedModelError("config.json: quantization_config says no group_size: -1 is all inputs")
    return group


def _of_gptq(config: Mapping[str, Any]) -> Quantisation:
    said = [config[key] for key in ("checkpoint_format", "format") if config.get(key) is not None]
    form = said[0] if said else "gptq"
    if form not in ("gptq", "gptq_v2") or any(one != form for one in said):
        raise _refuse(config, " and ".join(f"format {shown(one)}" for one in said))
    if config.get("dynamic"):
        raise _refuse(config, f"dynamic={shown(config['dynamic'], 80)} (other bits for some layers)")
    layout = gptq(
        _integer(config, "bits", (2, 4, 8)),
        _stated_group(config),
        is_second=form == "gptq_v2",
        is_symmetric=_flag(config, "sym", False),
    )
    if config.get("desc_act") is not None:  # where nothing is said of an order, it is the one that is there
        layout = (layout.requiring if _flag(config, "desc_act", False) else layout.without)("g_idx")
    return Quantisation("gptq", ((_EVERY, layout),), _names(config, "modules_to_not_convert"))


def _of_awq(config: Mapping[str, Any]) -> Quantisation:
    for name, other in (("bits", "w_bit"), ("group_size", "q_group_size")):  # as AutoAWQ writes them itself
        if other in config and config.get(name, config[other]) != config[other]:
            raise _refuse(config, f"{name}={shown(config[name])} and {other}={shown(config[other])}")
        config = {name: config.get(other), **config}
    _integer(config, "bits", (4,))
    forms = {str(config.get(key) or "gemm").lower() for key in ("version", "format", "checkpoint_format")}
    if forms != {"gemm"} or not _flag(config, "zero_point", True):
        raise _refuse(
            config, f"version={', '.join(sorted(forms))} and zero_point={shown(config.get('zero_point'))}"
        )
    layout = awq(_stated_group(config))
    return Quantisation("awq", ((_EVERY, layout),), _names(config, "modules_to_not_convert"))


def _torchao(config: Mapping[str, Any]) -> Quantisation:
    types = config.get("quant_type")
    default = types.get("default") if isinstance(types, Mapping) else None
    kind, data = (
        (default.get("_type"), default.get("_data")) if isinstance(default, Mapping) else (None, None)
    )
    if not isinstance(kind, str) or kind not in _TORCHAO or set(types or ()) != {"default"}:
        raise _refuse(config, f"quant_type={shown(types, 80)} (of torchao, {', '.join(_TORCHAO)} are read)")
    ends = "_weight_qdata", "_weight_scale", "_weight_zero_point"
    layout = scaled(kind, *ends, is_float=kind.startswith("Float8"))
    rounds = _TORCHAO[kind]
    notes = () if not rounds or _is_by_token(data or {}, rounds) else (_activations("inputs of layers"),)
    layout = layout.rounding("" if notes else rounds)
    return Quantisation("torchao", ((_EVERY, layout),), _names(config, "modules_to_not_convert"), notes)


def _is_by_token(data: Any, rounds: str) -> bool:
    """Whether torchao rounds activations token by token, without zero points, to eight bits."""
    if not isinstance(data, Mapping):
        return False
    mapping, grains = data.get("act_mapping_type"), data.get("granularity")
    mapping = mapping.get("_data") if isinstance(mapping, Mapping) else mapping
    of_each = grains if isinstance(grains, list) else [grains]
    kinds = [one.get("_type") if isinstance(one, Mapping) else one for one in of_each]
    by_token = ("PerRow", None) if rounds == "int8" else ("PerRow",)  # float8 is by tensor unless it says so
    is_plain = mapping in (None, "SYMMETRIC") and not data.get("reduce_range")
    return is_plain and all(kind in by_token for kind in kinds)


_TORCHAO = {
    "Float8WeightOnlyConfig": "",
    "Int8WeightOnlyConfig": "",
    "Int8DynamicActivationInt8WeightConfig": "int8",
    "Float8DynamicActivationFloat8WeightConfig": "fp8",
}
"""Kinds, and how they round activations (`codes.ROUNDS`)."""
METHODS: Mapping[str, Callable[[Mapping[str, Any]], Quantisation]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "gptq": _of_gptq,
    "awq": _of_awq,
    "torchao": _torchao,
}
"""What reads a `quantization_config`, by its `quant_method`."""
