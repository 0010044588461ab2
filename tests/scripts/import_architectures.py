#!/usr/bin/env python3
"""Makes fixtures/architectures from a folder of recipes (NAME.json) and outputs of llama.cpp (NAME.npz).

  import_architectures.py FOLDER [SUFFIX]

NAME.json keeps what the tests use. NAME.f32 has for each prompt the logits of its last 24 tokens; of embedding models
the hidden states of its last 24 tokens, then the mean over all tokens. With SUFFIX, a recipe of other sizes than the
one that has its name is kept as NAME-SUFFIX. Needs NumPy.
"""
import json
import pathlib
import sys

import numpy as np

ROWS = 24


def main() -> None:
    out = pathlib.Path(__file__).parents[2] / "fixtures/architectures"
    out.mkdir(exist_ok=True)
    suffix = f"-{sys.argv[2]}" if len(sys.argv) > 2 else ""
    for path in sorted(pathlib.Path(sys.argv[1]).glob("*.json")):
        recipe = json.loads(path.read_text())
        if "tensors" not in recipe:
            continue
        arrays = np.load(path.with_suffix(".npz"))
        lengths = sorted(int(name[4:]) for name in arrays.files if name.startswith("ids_"))
        reference = recipe["llama_cpp"]
        kept = {key: recipe[key] for key in ["name", "arch", "kind", "n_vocab", "seed"]}
        kept["name"] += suffix
        kept["n_embd"] = next(t["shape"][0] for t in recipe["tensors"] if t["name"] == "token_embd.weight")
        kept["gelu_f16_table"] = reference["gelu_f16_table"]
        kept["nmse_by_type"] = reference["nmse_by_type"]
        kept["prompts"] = [arrays[f"ids_{n}"].tolist() for n in lengths]
        kept["metadata"] = recipe["metadata"]
        text = json.dumps(kept, separators=(",", ":"))[:-1]
        tensors = ",\n".join(json.dumps(t, separators=(",", ":")) for t in recipe["tensors"])
        to = out / (kept["name"] + ".json")
        to.write_text(text + ',"tensors":[\n' + tensors + "\n]}\n")
        values = []
        for n in lengths:
            if recipe["kind"] == "embedding":
                values += [arrays[f"hidden_{n}"][-ROWS:], arrays[f"embedding_{n}"]]
            else:
                values.append(arrays[f"logits_{n}"][-ROWS:])
        data = np.concatenate([v.astype("<f4").ravel() for v in values])
        to.with_suffix(".f32").write_bytes(data.tobytes())


if __name__ == "__main__":
    main()
