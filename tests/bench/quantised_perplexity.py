#!/usr/bin/env python3
"""Perplexity of files of `starling quantize` and of llama.cpp's quantiser, both measured by llama.cpp.

    pip install llama-cpp-python numpy
    cargo build --release
    tests/bench/quantised_perplexity.py target/release/starling [--model MODEL-f16.gguf] [TYPE ...]

The text is held-out stories like the training data of the bundled model, or the file of --text. Fails if a file is more
than 1 % worse than llama.cpp's of the same type. Prints a Markdown table.
"""
import argparse
import ctypes
import math
import os
import random
import subprocess
import sys
import tempfile

import llama_cpp.llama_cpp as lib
import numpy as np

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
TINY = os.path.join(ROOT, "fixtures", "starling-tiny")
FTYPES = {
    "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13,
    "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18, "IQ3_S": 26, "IQ3_M": 27, "IQ4_NL": 25,
    "IQ4_XS": 30, "TQ1_0": 36, "TQ2_0": 37,
}
DEFAULT = ["Q8_0", "Q6_K", "Q5_K_M", "Q5_0", "Q5_1", "Q4_K_M", "Q4_0", "Q4_1", "IQ4_NL", "IQ4_XS", "Q3_K_M", "IQ3_S", "Q2_K"]


def stories(n):
    sys.path.insert(0, os.path.join(TINY, "train"))
    from stories import story

    rng = random.Random(20_240_229)
    return "\n\n".join(story(rng).text for _ in range(n))


def tokens(model, text):
    vocab, raw = lib.llama_model_get_vocab(model), text.encode()
    ids = (lib.llama_token * (len(raw) + 2))()
    n = lib.llama_tokenize(vocab, raw, len(raw), ids, len(ids), True, False)
    return list(ids[:n])


def perplexity(path, text, n_ctx, n_chunks, threads):
    """Perplexity over the second half of each window of the text."""
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    if not model:
        sys.exit(f"llama.cpp does not load {path}")
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = n_ctx
    params.n_threads = params.n_threads_batch = threads
    context = lib.llama_init_from_model(model, params)
    n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    ids, total, count = tokens(model, text), 0.0, 0
    batch = lib.llama_batch_init(n_ctx, 0, 1)
    for start in range(0, min(len(ids) - n_ctx, n_chunks * n_ctx), n_ctx):
        chunk = ids[:1] + ids[start + 1:start + n_ctx]
        batch.n_tokens = n_ctx
        for i, token in enumerate(chunk):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, i, 1, 0, 1
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        if lib.llama_decode(context, batch):
            sys.exit(f"llama.cpp does not run {path}")
        logits = np.ctypeslib.as_array(lib.llama_get_logits(context), (n_ctx, n_vocab)).astype(np.float64)
        for i in range(n_ctx // 2, n_ctx - 1):
            row = logits[i] - logits[i].max()
            total -= row[chunk[i + 1]] - math.log(np.exp(row).sum())
            count += 1
    lib.llama_batch_free(batch)
    lib.llama_free(context)
    lib.llama_model_free(model)
    return math.exp(total / count), count


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("starling")
    ap.add_argument("types", nargs="*", default=DEFAULT, metavar="TYPE", help=", ".join(FTYPES))
    ap.add_argument("--model", default=os.path.join(TINY, "starling-tiny-f16.gguf"))
    ap.add_argument("--text")
    ap.add_argument("--ctx", type=int, default=256)
    ap.add_argument("--chunks", type=int, default=40)
    ap.add_argument("--threads", type=int, default=2)
    a = ap.parse_args()
    quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
    lib.llama_log_set(quiet, None)
    lib.llama_backend_init()
    text = open(a.text).read() if a.text else stories(120)
    measure = lambda path: perplexity(path, text, a.ctx, a.chunks, a.threads)
    whole, count = measure(a.model)
    print(f"{os.path.basename(a.model)}: perplexity {whole:.4f} over {count} tokens\n")
    print("| type | llama.cpp's file | starling's file | difference |\n|---|---:|---:|---:|")
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = os.path.join(folder, "theirs.gguf"), os.path.join(folder, "ours.gguf")
        for name in a.types:
            params = lib.llama_model_quantize_default_params()
            params.ftype, params.nthread = FTYPES[name], a.threads
            if lib.llama_model_quantize(a.model.encode(), theirs.encode(), ctypes.byref(params)):
                sys.exit(f"llama.cpp does not write {name}")
            subprocess.run([a.starling, "quantize", a.model, ours, name], check=True, stderr=subprocess.DEVNULL)
            x, y = measure(theirs)[0], measure(ours)[0]
            worst = max(worst, y / x - 1)
            print(f"| {name} | {x:.4f} | {y:.4f} | {100 * (y / x - 1):+.3f} % |", flush=True)
    if worst > 0.01:
        sys.exit(f"a file is {100 * worst:.2f} % worse than llama.cpp's")


main()
