#!/usr/bin/env python3
"""Measures a server while a model is replaced, another is loaded, and workers are added.

    tests/bench/swap.py target/release/starling OLD.gguf NEW.gguf [--streams 16] [--swaps 10]

Prints as JSON: the usual and the longest time between two tokens of a stream, before and during the swaps; failed requests;
resident memory before and after; the longest time between tokens while a second model loads; tokens per second of one and
of two workers; memory of a worker.
"""

import argparse
import http.client
import json
import subprocess
import tempfile
import threading
import time
from urllib.parse import urlparse


class Server:
    def __init__(self, command, models, *more):
        self.keys = tempfile.NamedTemporaryFile("w", suffix=".keys")
        self.keys.write("key bench\n")
        self.keys.flush()
        args = [command, "serve", "--port", "0", "--log-level", "error", "--admin-key-file", self.keys.name, *more]
        for name, path in models:
            args += ["-m", f"{name}={path}"]
        self.process = subprocess.Popen(args, stdout=subprocess.PIPE, text=True)
        self.address = urlparse(self.process.stdout.readline().strip()).netloc

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    def request(self, method, path, body=None):
        connection = http.client.HTTPConnection(self.address, timeout=600)
        headers = {"content-type": "application/json", "authorization": "Bearer key"}
        connection.request(method, path, json.dumps(body) if body is not None else None, headers)
        return connection.getresponse()

    def admin(self, method, path, body=None):
        response = self.request(method, f"/admin/{path}", body if body is not None else {})
        value = json.loads(response.read())
        assert response.status == 200, (path, response.status, value)
        return value

    def resident(self):
        with open(f"/proc/{self.process.pid}/statm") as f:
            return int(f.read().split()[1]) * 4096

    def stream(self, model, seed, tokens):
        """Times of the tokens of a streamed completion."""
        body = {
            "model": model, "prompt": f"Write a long story. {seed}", "max_tokens": tokens, "ignore_eos": True,
            "seed": seed, "stream": True,
        }
        response = self.request("POST", "/v1/completions", body)
        if response.status != 200:
            raise RuntimeError(f"{response.status} {response.read()}")
        times = []
        for line in response:
            if line.startswith(b"data: {"):
                assert b'"error"' not in line, line
                times.append(time.monotonic())
        return times


def streams(server, model, n, until, tokens=120):
    """Runs `n` clients that stream until `until` is set. Returns the gaps between tokens, the failures, and the tokens."""
    gaps, failures = [], []

    def client(i):
        seed = i * 1000
        while not until.is_set():
            seed += 1
            try:
                times = server.stream(model, seed, tokens)
                gaps.extend(b - a for a, b in zip(times, times[1:]))
            except Exception as error:
                failures.append(str(error))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    return threads, gaps, failures


def during(server, model, n, action):
    """Gaps and failures of `n` streams while `action` runs."""
    until = threading.Event()
    threads, gaps, failures = streams(server, model, n, until)
    start = time.monotonic()
    action()
    until.set()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - start
    return gaps, failures, seconds


def summary(gaps, failures, seconds):
    gaps = sorted(gaps)
    at = lambda q: round(1000 * gaps[min(int(q * len(gaps)), len(gaps) - 1)], 1)
    return {
        "tokens_per_second": round(len(gaps) / seconds, 1), "gap_p50_ms": at(0.5), "gap_p99_ms": at(0.99),
        "gap_max_ms": at(1), "failed": len(failures), "first_failure": failures[0] if failures else None,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--swaps", type=int, default=10)
    args = parser.parse_args()
    report = {}

    def swaps(server):
        for i in range(args.swaps):
            server.admin("POST", "models/m/swap", {"source": args.new if i % 2 == 0 else args.old})
            time.sleep(1)

    with Server(args.command, [("m", args.old)], "--kv-memory", "256MiB", "--max-seqs", str(args.streams)) as server:
        during(server, "m", args.streams, lambda: time.sleep(3))
        before = server.resident()
        report["before"] = summary(*during(server, "m", args.streams, lambda: time.sleep(15)))
        report["swaps"] = summary(*during(server, "m", args.streams, lambda: swaps(server)))
        if args.swaps % 2 == 1:
            server.admin("POST", "models/m/swap", {"source": args.old})
        during(server, "m", args.streams, lambda: time.sleep(3))
        time.sleep(2)
        after = server.resident()
        report["resident_mib"] = [before >> 20, after >> 20, f"{100 * (after / before - 1):+.1f} %"]
        load = lambda: server.admin("POST", "models", {"name": "second", "source": args.new, "load": True})
        report["second_model_loads"] = summary(*during(server, "m", args.streams, load))
    for workers in (1, 2):
        more = ("--kv-memory", "128MiB", "--max-seqs", str(args.streams), "--workers", str(workers))
        with Server(args.command, [("m", args.old)], *more) as server:
            during(server, "m", args.streams, lambda: time.sleep(3))
            figures = summary(*during(server, "m", args.streams, lambda: time.sleep(15)))
            report[f"workers_{workers}"] = {**figures, "resident_mib": server.resident() >> 20}
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
