#!/usr/bin/env python3
"""Embedding throughput of Starling, llama.cpp and ONNX Runtime: BERT models, same weights, interleaved runs, medians.

    pip install llama-cpp-python onnxruntime onnx gguf numpy
    cargo build --release
    cargo run --release --example make-model -- minilm Q8_0 target/minilm-q8_0.gguf
    tests/bench/embeddings.py target/release/starling target/minilm-q8_0.gguf [MORE.gguf ...]

For each file: batches of 1, 32 and 256 texts of 32 and 256 tokens, mean pooling, 2 threads. llama.cpp runs through its C
API, a batch in one call if it fits 2048 tokens; ONNX Runtime runs a graph of the same weights in fp32 with all
optimisations. Compares the vectors of one text first. Prints a Markdown table of texts per second.
"""
import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time

import numpy as np

BATCH_TOKENS = 2048


def token(i, n_vocab):
    return (i * 7919 + 13) % n_vocab


def texts_of(texts, tokens, n_vocab):
    return [[token(t * tokens + i, n_vocab) for i in range(tokens)] for t in range(texts)]


def timed(run, batches, turns):
    """Median seconds of all batches, after a warm-up run."""
    seconds = []
    for _ in range(turns + 1):
        start = time.perf_counter()
        for batch in batches:
            run(batch)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def batches_of(texts, tokens):
    n = max(1, BATCH_TOKENS // tokens)
    return [texts[i:i + n] for i in range(0, len(texts), n)]


class LlamaCpp:
    def __init__(self, path, threads):
        import llama_cpp.llama_cpp as lib

        self.lib = lib
        self.quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
        lib.llama_log_set(self.quiet, None)
        lib.llama_backend_init()
        params = lib.llama_model_default_params()
        # with repacked weights llama.cpp executes AMX instructions that the CPU reports but the system disallows
        params.use_extra_bufts = False
        self.model = lib.llama_model_load_from_file(path.encode(), params)
        params = lib.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_seq_max = 64
        params.n_threads = params.n_threads_batch = threads
        params.embeddings, params.pooling_type = True, 1
        self.context = lib.llama_init_from_model(self.model, params)
        self.width = lib.llama_model_n_embd(self.model)
        self.batch = lib.llama_batch_init(BATCH_TOKENS, 0, 1)

    def run(self, texts):
        lib, b = self.lib, self.batch
        n = 0
        for seq, ids in enumerate(texts):
            for pos, id in enumerate(ids):
                b.token[n], b.pos[n], b.n_seq_id[n], b.logits[n] = id, pos, 1, 1
                b.seq_id[n][0] = seq
                n += 1
        b.n_tokens = n
        if code := lib.llama_encode(self.context, b):
            raise RuntimeError(f"llama_encode: {code}")
        lib.llama_synchronize(self.context)
        row = lambda seq: np.ctypeslib.as_array(lib.llama_get_embeddings_seq(self.context, seq), (self.width,)).copy()
        return np.stack([row(seq) for seq in range(len(texts))])


class Onnx:
    """ONNX graph of the file's dequantised weights: post-norm layers, GELU by erf."""

    def __init__(self, path, threads):
        import gguf
        import onnx
        import onnxruntime
        from onnx import TensorProto, helper, numpy_helper

        reader = gguf.GGUFReader(path)
        number = lambda key: reader.get_field(f"bert.{key}").contents()
        layers, width, heads = number("block_count"), number("embedding_length"), number("attention.head_count")
        eps = number("attention.layer_norm_epsilon")
        weights = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader.tensors}
        nodes, constants = [], []

        def constant(name, value):
            constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
            return name

        def node(op, *inputs, **attributes):
            out = f"n{len(nodes)}"
            nodes.append(helper.make_node(op, list(inputs), [out], **attributes))
            return out

        def weight(name, transpose=False):
            return constant(name, weights[name].T if transpose else weights[name])

        def linear(name, x):
            return node("Add", node("MatMul", x, weight(f"{name}.weight", True)), weight(f"{name}.bias"))

        def norm(name, x):
            return node("LayerNormalization", x, weight(f"{name}.weight"), weight(f"{name}.bias"), axis=-1, epsilon=eps)

        x = node("Gather", weight("token_embd.weight"), "ids")
        x = node("Add", x, constant("type", weights["token_types.weight"][0]))
        x = node("Add", x, node("Gather", weight("position_embd.weight"), "positions"))
        x = norm("token_embd_norm", x)
        split, merge = constant("split", np.array([0, 0, heads, -1])), constant("merge", np.array([0, 0, -1]))
        scale = constant("scale", np.float32((width // heads) ** -0.5))
        half, one, root = (constant(n, np.float32(v)) for n, v in [("half", 0.5), ("one", 1), ("root", 2**0.5)])
        for i in range(layers):
            part = lambda name, perm: node("Transpose", node("Reshape", linear(f"blk.{i}.{name}", x), split), perm=perm)
            q, k, v = part("attn_q", [0, 2, 1, 3]), part("attn_k", [0, 2, 3, 1]), part("attn_v", [0, 2, 1, 3])
            p = node("Softmax", node("Mul", node("MatMul", q, k), scale), axis=-1)
            o = node("Reshape", node("Transpose", node("MatMul", p, v), perm=[0, 2, 1, 3]), merge)
            x = norm(f"blk.{i}.attn_output_norm", node("Add", linear(f"blk.{i}.attn_output", o), x))
            h = linear(f"blk.{i}.ffn_up", x)
            h = node("Mul", node("Mul", h, node("Add", node("Erf", node("Div", h, root)), one)), half)
            x = norm(f"blk.{i}.layer_output_norm", node("Add", linear(f"blk.{i}.ffn_down", h), x))
        nodes.append(helper.make_node("ReduceMean", [x, constant("tokens", np.array([1]))], ["mean"], keepdims=0))
        value = helper.make_tensor_value_info
        graph = helper.make_graph(
            nodes, "bert",
            [value("ids", TensorProto.INT64, ["n", "t"]), value("positions", TensorProto.INT64, ["t"])],
            [value("mean", TensorProto.FLOAT, ["n", width])], constants,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        self.session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def run(self, texts):
        ids = np.array(texts, np.int64)
        return self.session.run(["mean"], {"ids": ids, "positions": np.arange(ids.shape[1], dtype=np.int64)})[0]


PEERS = {"llama.cpp": LlamaCpp, "onnxruntime": Onnx}


def peer(name, path, threads, texts, tokens, n_vocab, turns):
    """Texts per second of one test, and one vector; runs in its own process."""
    p = PEERS[name](path, threads)
    all = texts_of(texts, tokens, n_vocab)
    seconds = timed(p.run, batches_of(all, tokens), turns)
    v = p.run(all[:1])[0]
    return {"rate": texts / seconds, "vector": (v / np.linalg.norm(v)).tolist()}


def starling(binary, path, threads, texts, tokens, turns):
    command = [binary, "-m", path, "-t", str(threads), "bench", "-p", "0", "-n", "0",
               "-e", f"{texts}x{tokens}", "-r", str(turns), "-o", "json"]
    return texts * 1.0 / statistics.median(json.loads(subprocess.check_output(command))[0]["seconds"])


def main():
    if sys.argv[1:2] == ["--peer"]:
        name, path, *numbers = sys.argv[2:]
        print(json.dumps(peer(name, path, *map(int, numbers))))
        return
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("starling")
    p.add_argument("models", nargs="+")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--turns", type=int, default=3, help="rounds; each runs all three programs once")
    p.add_argument("--runs", type=int, default=3, help="runs per round; their median is the result")
    p.add_argument("--texts", type=int, nargs="+", default=[1, 32, 256])
    p.add_argument("--tokens", type=int, nargs="+", default=[32, 256])
    p.add_argument("--vocab", type=int, default=30_522)
    a = p.parse_args()

    def of_peer(name, path, texts, tokens):
        numbers = [a.threads, texts, tokens, a.vocab, a.runs]
        command = [sys.executable, __file__, "--peer", name, path, *map(str, numbers)]
        return json.loads(subprocess.check_output(command, stderr=subprocess.DEVNULL))

    print(f"{a.threads} threads; texts per second, medians of {a.turns} rounds\n")
    print("| model | texts x tokens | Starling | llama.cpp | ONNX Runtime fp32 | / llama.cpp | / ONNX |")
    print("|---|---|---|---|---|---|---|")
    for path in a.models:
        ids = ",".join(str(token(i, a.vocab)) for i in range(32))
        vector = json.loads(subprocess.check_output([a.starling, "embed", "-m", path, "--ids", ids]))[0]["embedding"]
        for name in PEERS:
            cosine = float(np.dot(vector, of_peer(name, path, 1, 32)["vector"]))
            print(f"<!-- {path}: cosine with {name} {cosine:.6f} -->", flush=True)
            if cosine < 0.99:
                sys.exit(f"{path}: the vectors of {name} differ: cosine {cosine}")
        for tokens in a.tokens:
            for texts in a.texts:
                rates = {"starling": [], **{name: [] for name in PEERS}}
                for _ in range(a.turns):
                    rates["starling"].append(starling(a.starling, path, a.threads, texts, tokens, a.runs))
                    for name in PEERS:
                        rates[name].append(of_peer(name, path, texts, tokens)["rate"])
                s, l, o = (statistics.median(r) for r in rates.values())
                name = path.rsplit("/", 1)[-1]
                print(f"| {name} | {texts} x {tokens} | {s:.1f} | {l:.1f} | {o:.1f} | {s / l:.2f} | {s / o:.2f} |",
                      flush=True)


if __name__ == "__main__":
    main()
