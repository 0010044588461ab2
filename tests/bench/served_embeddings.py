#!/usr/bin/env python3
"""Throughput of the embeddings endpoint: short texts per second, several clients, several texts per request.

    cargo build --release
    cargo run --release --example make-model -- minilm Q8_0 target/minilm-q8_0.gguf
    tests/bench/served_embeddings.py target/release/starling target/minilm-q8_0.gguf
"""
import argparse
import concurrent.futures
import http.client
import json
import statistics
import time

from vs_llama_server import free_port, server

TEXTS = [f"The bird {i} moved" for i in range(32)]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("starling")
    p.add_argument("model")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--clients", type=int, default=4)
    p.add_argument("--requests", type=int, default=60)
    p.add_argument("--turns", type=int, default=5)
    a = p.parse_args()

    port = free_port()

    def ask(_):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        body = json.dumps({"input": TEXTS, "encoding_format": "base64"})
        connection.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
        if response.status != 200 or len(answer["data"]) != len(TEXTS):
            raise RuntimeError(f"status {response.status}: {answer}")
        return answer["usage"]["prompt_tokens"]

    command = [a.starling, "serve", "--host", "127.0.0.1", "--port", str(port), "-m", a.model, "-t", str(a.threads)]
    with server(command, port), concurrent.futures.ThreadPoolExecutor(a.clients) as pool:
        tokens = ask(0)
        rates = []
        for _ in range(a.turns):
            start = time.perf_counter()
            list(pool.map(ask, range(a.requests)))
            rates.append(a.requests * len(TEXTS) / (time.perf_counter() - start))
    print(f"{statistics.median(rates):.0f} texts/s of {tokens / len(TEXTS):.1f} tokens, {len(TEXTS)} a request, "
          f"{a.clients} clients; turns from {min(rates):.0f} to {max(rates):.0f}")


if __name__ == "__main__":
    main()
