#!/usr/bin/env python3
"""Writes fixtures/tensors: what the GGUF file of a published model contains, metadata and names and shapes of tensors.

  make_tensor_lists.py LLAMA_CPP [WORD]

The names and shapes in the model's checkpoint (tensor_lists/models.py) go through llama.cpp's converter, from its source in the
folder LLAMA_CPP (also in the source package of llama-cpp-python: vendor/llama.cpp), which renames, splits and merges them.
Neither weights nor torch are needed: tensor_lists/shapes.py stands in for it. With WORD, only models whose name has it.
Needs NumPy.
"""
import json
import math
import pathlib
import re
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE / "tensor_lists"), sys.argv[1], sys.argv[1] + "/gguf-py"]

import shapes  # noqa: E402  installs itself as torch
import models  # noqa: E402
from conversion import base, load_all_models  # noqa: E402

OUT = HERE.parents[1] / "fixtures/tensors"


def converted(config, checkpoint):
    """The architecture, metadata and tensors that the converter writes."""
    tensors = {name: (lambda shape=shape: shapes.Tensor(*shape)) for name, shape in checkpoint.items()}
    model_class = base.ModelBase._model_classes[base.ModelType.TEXT][config["architectures"][0]]

    def index(self, remote_hf_model_id=None):
        kept = map(self.filter_tensors, tensors.items())
        return dict(item for item in kept if item is not None)

    base.ModelBase.index_tensors = index
    # what a converter looks up beside config.json
    folder = pathlib.Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {f"t{i}": i for i in range(config.get("text_config", config)["vocab_size"])}
    tokenizer = {"model": {"type": "WordPiece", "vocab": vocabulary}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    model = model_class(folder, base.gguf.LlamaFileType.MOSTLY_F16, folder / "model.gguf", hparams=json.loads(json.dumps(config)))
    model.get_vocab_base_pre = lambda *_: "default"
    out = {}
    extra = list(model.generate_extra_tensors())
    for name, data in extra + [(name, make()) for name, make in model.model_tensors.items()]:
        block = next((int(part) for part in name.split(".") if part.isdecimal()), None)
        for new, data in model.modify_tensors(data, name, block):
            out[new] = list(reversed(data.shape))
    for name, tensor in model.gguf_writer.tensors[0].items() if model.gguf_writer.tensors else []:
        out[name] = list(reversed(tensor.shape))
    model.set_gguf_parameters()
    arch = base.gguf.MODEL_ARCH_NAMES[model.model_arch]
    kept = [(key, v) for part in model.gguf_writer.kv_data for key, v in part.items() if key.startswith((arch + ".", "diffusion.", "xielu."))]
    metadata = []
    for key, v in kept:
        kind = v.type.name + (f"/{v.sub_type.name if v.sub_type else array_type(v.value)}" if v.type.name == "ARRAY" else "")
        value = v.value.tolist() if hasattr(v.value, "tolist") else v.value
        if isinstance(value, list):
            # JSON has no infinities
            value = [str(x) if isinstance(x, float) and math.isinf(x) else x for x in value]
        metadata.append([key, kind, value])
    return arch, metadata, out


def array_type(values):
    return {bool: "BOOL", int: "INT32", float: "FLOAT32", str: "STRING"}[type(values[0])]


def ranges(numbers):
    """`0-2,4`"""
    parts = []
    for n in sorted(numbers):
        if parts and parts[-1][1] == n - 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def grouped(tensors):
    """Tensors of the same name and shape in several layers as one line: `blk.{0-2,4}.attn_norm.weight`."""
    lines = {}
    for name, shape in tensors.items():
        layer = re.match(r"((?:enc\.)?blk\.)(\d+)\.(.*)", name)
        key = (layer[1], layer[3], tuple(shape)) if layer else ("", name, tuple(shape))
        lines.setdefault(key, []).append(int(layer[2]) if layer else 0)
    return [[f"{p}{{{ranges(n)}}}.{part}" if p else part, list(shape)] for (p, part, shape), n in lines.items()]


def main():
    load_all_models()
    OUT.mkdir(exist_ok=True)
    for name, tensors, config in models.MODELS:
        if len(sys.argv) > 2 and sys.argv[2] not in name:
            continue
        arch, metadata, out = converted(config, tensors(config))
        lines = [json.dumps(line, separators=(",", ":")) for line in grouped(out)]
        head = json.dumps({"model": name, "arch": arch, "metadata": metadata}, separators=(",", ":"))
        text = head[:-1] + ',"tensors":[\n' + ",\n".join(lines) + "\n]}\n"
        (OUT / (name.split("/")[1].lower() + ".json")).write_text(text)
        print(f"{name}: {arch}, {len(out)} tensors")


if __name__ == "__main__":
    main()
