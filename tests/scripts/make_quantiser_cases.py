#!/usr/bin/env python3
"""Write fixtures/quantised/rows.json: digests of rows as ggml quantises them, with and without an importance matrix.

    pip install llama-cpp-python==0.3.36 numpy
    python3 tests/scripts/make_quantiser_cases.py > fixtures/quantised/rows.json

The test generates the same input (`engine/compute/src/quant/tests.rs`), so only digests are stored: for each type and
row the first 16 hex digits of the SHA-256 of its bytes.
"""

import ctypes
import glob
import hashlib
import json
import os
import sys

import llama_cpp
import numpy as np

K = 512
ROWS = 24
TYPES = {
    "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14,
    "IQ2_XXS": 16, "IQ2_XS": 17, "IQ3_XXS": 18, "IQ1_S": 19, "IQ4_NL": 20, "IQ3_S": 21, "IQ2_S": 22, "IQ4_XS": 23,
    "IQ1_M": 29, "TQ1_0": 34, "TQ2_0": 35, "MXFP4": 39, "NVFP4": 40, "Q1_0": 41, "Q2_0": 42,
}
# ggml refuses these types without an importance matrix
NEED = {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S"}
MASK = (1 << 64) - 1


class Random:
    """SplitMix64."""

    def __init__(self, seed):
        self.state = seed

    def next(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)


def row(random, i):
    """A row of values exact in f32: integers of at most 18 bits times a power of two; some rows are sparse or have outliers."""
    x = []
    for j in range(K):
        z = random.next()
        v = (z & 0xFFFF) + (z >> 16 & 0xFFFF) + (z >> 32 & 0xFFFF) + (z >> 48) - 131070
        e = -17 + (i % 5 - 2) * 3
        if i % 8 == 3 and z % 16:
            v = 0
        if i % 8 == 4 and z % 64 == 0:
            e += 5
        if i % 8 == 5:
            v = abs(v)
        if i % 8 == 6 and j % 256 < 128:
            v = 0
        if i % 8 == 7:
            v = v >> 15 << 15
        x.append(v * 2.0**e)
    return x


def main():
    random = Random(1)
    x = np.array([row(random, i) for i in range(ROWS)], dtype=np.float32)
    w = np.array([(random.next() & 0xFFFF) * 2.0**-12 for _ in range(K)], dtype=np.float32)
    w[::37] = 0
    lib = glob.glob(os.path.join(os.path.dirname(llama_cpp.__file__), "lib", "libggml-base.so"))[0]
    chunk = ctypes.CDLL(lib).ggml_quantize_chunk
    chunk.restype = ctypes.c_size_t
    chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]

    def digests(number, weights):
        buffer = ctypes.create_string_buffer(K * 4)
        out = []
        for r in x:
            r = np.ascontiguousarray(r)
            n = chunk(number, r.ctypes.data, buffer, 0, 1, K, weights)
            out.append(hashlib.sha256(buffer.raw[:n]).hexdigest()[:16])
        return out

    types = {}
    for name, number in TYPES.items():
        types[name] = {"weighted": digests(number, w.ctypes.data)}
        if name not in NEED:
            types[name]["plain"] = digests(number, None)
    print(f"llama-cpp-python {llama_cpp.__version__}", file=sys.stderr)
    json.dump({"k": K, "rows": ROWS, "types": types}, sys.stdout, indent=1)
    print()


main()
