"""A checkpoint of 16 bits in floats of 8 or 4 bits with scales of blocks, as compressed-tensors has it.

    python scripts/write_float_blocks.py jaxllm/demo_model out/demo-nvfp4 nvfp4-pack

Rounds to nearest, without data. Embeddings, the head and layers of inputs in no whole groups stay."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jaxllm.loading.shards import list_tensors
from jaxllm.models.codes import encoded
from jaxllm.system.output_files import NewFolder, OutputParser

GROUPS = {"float": 128, "mxfp8": 32, "mxfp4-pack": 32, "nvfp4-pack": 16}  # before "-quantized"


def arrays(weight: np.ndarray, form: str) -> dict[str, np.ndarray]:
    """What stands for a weight [out, in], by the ends of the tensors' names."""
    kind, end, top = ("fp4", "weight_packed", 6) if "pack" in form else ("e4m3", "weight", 448)
    (out, width), size, rows, found = weight.shape, GROUPS[form], 128 if form == "float" else 1, {}
    blocks = np.abs(np.pad(weight, ((0, -out % rows), (0, -width % size))))
    scales = stored = (tops := blocks.reshape(-(-out // rows), rows, -1, size).max((1, 3)).clip(1e-30)) / top
    if form.startswith("mx"):  # the largest's power of 2, from 1.75 of it the next, is the codes' largest one
        scales = 2.0 ** (np.floor(np.log2(tops / 1.75)) + 1 - np.floor(np.log2(top)))
        stored = (np.log2(scales) + 127).astype(np.uint8)
    elif form.startswith("nv"):
        found["weight_global_scale"] = whole = np.full(1, 448 * top / tops.max(), np.float32)
        scales = (stored := (scales * whole).astype(jnp.float8_e4m3fn)).astype(np.float32) / whole
    numbers = jnp.clip(weight / scales.repeat(rows, 0)[:out].repeat(size, 1)[:, :width], -top, top)
    return found | {end: np.asarray(encoded(numbers, kind)), "weight_scale": stored}


if __name__ == "__main__":
    parser = OutputParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=NewFolder("config.json", "model.safetensors"))
    parser.add_argument("format", choices=GROUPS)
    args = parser.parse_args()
    form, bits, size = f"{args.format}-quantized", 4 if "pack" in args.format else 8, GROUPS[args.format]
    shutil.copytree(args.source, args.folder, dirs_exist_ok=True)
    tensors = {name: tensor.read() for name, tensor in list_tensors(args.source).items()}
    layers = [one for one in tensors if one.endswith("_proj.weight") and tensors[one].shape[1] % size == 0]
    kept = ["lm_head", *sorted(name.removesuffix(".weight") for name in tensors.keys() - layers)]
    for name in layers:
        made = arrays(tensors.pop(name).astype(np.float32), args.format)
        tensors |= {f"{name.removesuffix('weight')}{end}": array for end, array in made.items()}
    save_file(tensors, args.folder / "model.safetensors")
    weights = {"num_bits": bits, "type": "float", "symmetric": True, "group_size": size, "strategy": "group"}
    inputs = weights | {"dynamic": True} if args.format == "float" else None
    weights |= {"strategy": "block", "block_structure": [size, size]} if inputs else {}
    group = {"format": form, "targets": ["Linear"], "weights": weights, "input_activations": inputs}
    said = {"quant_method": "compressed-tensors", "config_groups": {"a": group}, "ignore": kept}
    config = json.loads((args.source / "config.json").read_text()) | {"quantization_config": said}
    (args.folder / "config.json").write_text(json.dumps(config))
