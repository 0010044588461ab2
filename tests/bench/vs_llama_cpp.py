#!/usr/bin/env python3
"""Prefill and decode speed of Starling and llama.cpp: same file, same threads, interleaved runs, medians.

    pip install llama-cpp-python        # llama.cpp, built for this machine
    cargo build --release
    cargo run --release --example make-model -- smollm2-135m Q8_0 target/135m-q8_0.gguf
    tests/bench/vs_llama_cpp.py target/release/starling target/135m-q8_0.gguf [MORE.gguf ...]

For each file and number of threads: prefill of 512 tokens; decode of 64 tokens after 128; with --long, decode of 32
tokens after 4,000. llama.cpp runs through its C API with an f16 KV cache, as Starling does. Prints a Markdown table.
"""
import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time


def llama_cpp(path, threads, n, depth, prefill):
    """Tokens per second of one test in llama.cpp, with the fastest of its default settings; runs in its own process."""
    import llama_cpp.llama_cpp as lib

    quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
    lib.llama_log_set(quiet, None)
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx = depth + n + 64
    params.n_batch, params.n_ubatch = max(2048, n), 512
    params.n_threads = params.n_threads_batch = threads
    context = lib.llama_init_from_model(model, params)
    memory = lib.llama_get_memory(context)
    n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    tokens = [(i * 7919 + 13) % n_vocab for i in range(depth + n)]

    def decode(ids):
        array = (lib.llama_token * len(ids))(*ids)  # must outlive the batch
        if code := lib.llama_decode(context, lib.llama_batch_get_one(array, len(ids))):
            raise RuntimeError(f"llama_decode: {code}")

    seconds = []
    for _ in range(2):  # the first warms up
        lib.llama_memory_clear(memory, True)
        for i in range(0, depth, 512):
            decode(tokens[i:min(i + 512, depth)])
        lib.llama_synchronize(context)
        start = time.perf_counter()
        for piece in [tokens[depth:]] if prefill else [[t] for t in tokens[depth:]]:
            decode(piece)
        lib.llama_synchronize(context)
        seconds.append(time.perf_counter() - start)
    return n / seconds[-1]


def starling(binary, path, threads, n, depth, prefill):
    test = ["-p", str(n), "-n", "0"] if prefill else ["-p", "0", "-n", str(n)]
    command = [binary, "-m", path, "-t", str(threads), "bench", *test, "-d", str(depth), "-r", "1", "-o", "json"]
    return json.loads(subprocess.check_output(command))[0]["tokens_per_second"]


def peer(path, threads, n, depth, prefill):
    command = [sys.executable, __file__, "--peer", path, str(threads), str(n), str(depth), str(int(prefill))]
    return float(subprocess.check_output(command, stderr=subprocess.DEVNULL))


def main():
    if sys.argv[1:2] == ["--peer"]:
        path, *numbers = sys.argv[2:]
        print(llama_cpp(path, *map(int, numbers)))
        return
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("starling")
    p.add_argument("models", nargs="+")
    p.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    p.add_argument("--turns", type=int, default=5)
    p.add_argument("--long", action="store_true", help="also decode after 4,000 tokens")
    a = p.parse_args()
    tests = [("prefill 512", 512, 0, True), ("decode 64 after 128", 64, 128, False)]
    if a.long:
        tests.append(("decode 32 after 4000", 32, 4000, False))
    print("| model | threads | test | Starling tok/s | llama.cpp tok/s | ratio |\n|---|---|---|---|---|---|", flush=True)
    for path in a.models:
        for threads in a.threads:
            for name, n, depth, prefill in tests:
                ours, theirs = [], []
                for _ in range(a.turns):
                    ours.append(starling(a.starling, path, threads, n, depth, prefill))
                    theirs.append(peer(path, threads, n, depth, prefill))
                x, y = statistics.median(ours), statistics.median(theirs)
                model = path.rsplit("/", 1)[-1]
                print(f"| {model} | {threads} | {name} | {x:.1f} | {y:.1f} | {x / y:.2f} |", flush=True)


if __name__ == "__main__":
    main()
