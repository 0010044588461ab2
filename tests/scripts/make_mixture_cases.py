#!/usr/bin/env python3
"""Write fixtures/quantised/mixtures.json: the tensor types that llama.cpp chooses for small models, by mixture.

    pip install llama-cpp-python==0.3.36 gguf numpy
    python3 tests/scripts/make_mixture_cases.py > fixtures/quantised/mixtures.json

For each model and mixture, with and without an importance matrix: the types of each kind of tensor in layer order,
run-length encoded (`Q4_K*14`); null where llama.cpp refuses.
"""

import ctypes
import json
import os
import re
import sys
import tempfile

import llama_cpp
import numpy as np
from gguf import GGUFWriter

K, LAYERS = 256, 16
MODELS = {
    "shared": {"heads": 8, "kv_heads": 2, "experts": 0, "tied": False},
    "tied": {"heads": 4, "kv_heads": 4, "experts": 0, "tied": True},
    "experts": {"heads": 8, "kv_heads": 4, "experts": 8, "tied": False},
}
MIXES = {
    "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13,
    "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18, "IQ2_XXS": 19, "IQ2_XS": 20, "Q2_K_S": 21,
    "IQ3_XS": 22, "IQ3_XXS": 23, "IQ1_S": 24, "IQ4_NL": 25, "IQ3_S": 26, "IQ3_M": 27, "IQ2_S": 28, "IQ2_M": 29,
    "IQ4_XS": 30, "IQ1_M": 31, "TQ1_0": 36, "TQ2_0": 37, "MXFP4_MOE": 38, "Q1_0": 40, "Q2_0": 41,
}


def tensors(m):
    kv = K // m["heads"] * m["kv_heads"]
    yield "token_embd.weight", (32, K)
    yield "output_norm.weight", (K,)
    if not m["tied"]:
        yield "output.weight", (32, K)
    for i in range(LAYERS):
        for part, shape in [("attn_norm", (K,)), ("ffn_norm", (K,)), ("attn_q", (K, K)), ("attn_k", (kv, K)),
                            ("attn_v", (kv, K)), ("attn_output", (K, K))]:
            yield f"blk.{i}.{part}.weight", shape
        if m["experts"]:
            yield f"blk.{i}.ffn_gate_inp.weight", (m["experts"], K)
        for part in ["ffn_gate", "ffn_up", "ffn_down"]:
            if m["experts"]:
                yield f"blk.{i}.{part}_exps.weight", (m["experts"], K, K)
            else:
                yield f"blk.{i}.{part}.weight", (K, K)


def write(m, path):
    w = GGUFWriter(path, "llama")
    w.add_block_count(LAYERS)
    w.add_context_length(64)
    w.add_embedding_length(K)
    w.add_feed_forward_length(K)
    w.add_head_count(m["heads"])
    w.add_head_count_kv(m["kv_heads"])
    w.add_layer_norm_rms_eps(1e-5)
    w.add_vocab_size(32)
    if m["experts"]:
        w.add_expert_count(m["experts"])
        w.add_expert_used_count(2)
    rng = np.random.default_rng(1)
    for name, shape in tensors(m):
        w.add_tensor(name, rng.standard_normal(shape, dtype=np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def importance(m):
    keep, entries = [], []
    for name, shape in tensors(m):
        if len(shape) > 1:
            data = np.ones(shape[-1] * (shape[0] if len(shape) == 3 else 1), dtype=np.float32)
            keep.append(data)
            entries.append(llama_cpp.llama_model_imatrix_data(name.encode(), data.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), data.size))
    return keep, (llama_cpp.llama_model_imatrix_data * (len(entries) + 1))(*entries, llama_cpp.llama_model_imatrix_data(None, None, 0))


def runs(types):
    out = []
    for t in types:
        if out and out[-1][0] == t:
            out[-1][1] += 1
        else:
            out.append([t, 1])
    return " ".join(f"{t}*{n}" for t, n in out)


def quantised(log, source, ftype, entries):
    """The output of a dry run: for each tensor a line with its name, and one with its new type."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.dry_run = ftype, 1, True
    if entries is not None:
        params.imatrix = ctypes.cast(entries, type(params.imatrix))
    log.clear()
    if llama_cpp.llama_model_quantize(source.encode(), b"", ctypes.byref(params)):
        sys.exit("".join(log))
    text = "".join(log)
    if "will require an imatrix" in text:
        return None
    kinds = {}
    for name, new in re.findall(r"\] +(\S+) +- \[[^\]]*\], type = +f32, size = +[\d.]+ MiB(?: -> +[\d.]+ MiB \((\w+)\))?", text):
        if "norm" not in name:
            kind = name.split(".", 2)[2] if name.startswith("blk.") else name
            layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
            kinds.setdefault(kind, []).append((layer, (new or "f32").upper()))
    return {kind: runs(t for _, t in sorted(types)) for kind, types in kinds.items()}


def main():
    log = []
    keep_log = llama_cpp.llama_log_callback(lambda _, text, __: log.append(text.decode()))
    llama_cpp.llama_log_set(keep_log, ctypes.c_void_p(0))
    out = {}
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "in.gguf")
        for name, m in MODELS.items():
            write(m, source)
            keep, entries = importance(m)
            out[name] = {**m, "layers": LAYERS, "mixes": {
                mix: {"plain": quantised(log, source, ftype, None),
                      "guided": quantised(log, source, ftype, entries)}
                for mix, ftype in MIXES.items()
            }}
            del keep
    json.dump(out, sys.stdout, indent=1)
    print()


main()
