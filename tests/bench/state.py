#!/usr/bin/env python3
"""Measures what outlives the process: the turn of a session with and without a state directory, and answers from the cache on disk.

    tests/bench/state.py target/release/starling [--turns 300] [--answers 300] [--model MODEL.gguf]

The servers take turns, request by request. Answers must be the same. Prints JSON, times in milliseconds.
"""

import argparse
import http.client
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time


class Server:
    def __init__(self, args, *more):
        command = [args.command, "serve", "--port", "0", "--log-level", "warn", "--max-sessions", "10000", *more]
        if args.model:
            command += ["-m", args.model]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.address = self.process.stdout.readline().strip().removeprefix("http://")
        self.connection = http.client.HTTPConnection(self.address)

    def post(self, path, body):
        """Milliseconds, the response, and its headers."""
        data, start = json.dumps(body), time.perf_counter()
        self.connection.request("POST", path, data, {"content-type": "application/json"})
        response = self.connection.getresponse()
        text = response.read()
        took = (time.perf_counter() - start) * 1000
        assert response.status == 200, text
        return took, json.loads(text), response.headers

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def summary(times):
    times = sorted(times)
    at = lambda share: round(times[min(len(times) - 1, int(share * len(times)))], 3)
    return {"p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "mean": round(statistics.mean(times), 3)}


def size(path):
    files = [os.path.join(root, name) for root, _, names in os.walk(path) for name in names]
    return sum(os.stat(file).st_blocks * 512 for file in files)


def turns(args, folder):
    key = os.path.join(folder, "key")
    with open(key, "w") as file:
        file.write(os.urandom(32).hex())
    plain, sealed = os.path.join(folder, "plain"), os.path.join(folder, "sealed")
    servers = {
        "none": Server(args),
        "state-dir": Server(args, "--state-dir", plain),
        "encrypted": Server(args, "--state-dir", sealed, "--state-key-file", key),
    }
    times = {name: [] for name in servers}
    for i in range(args.turns):
        # ten turns of each conversation
        body = {"session_id": f"s{i // 10}", "messages": [{"role": "user", "content": f"Tell me of {i} dogs and a tree."}],
                "max_tokens": 16, "seed": i}
        texts = set()
        for name, server in servers.items():
            took, answer, _ = server.post("/v1/generate", body)
            times[name].append(took)
            texts.add(answer["text"])
        assert len(texts) == 1, texts
    result = {name: summary(values) for name, values in times.items()}
    for server in servers.values():
        server.kill()
    start = time.perf_counter()
    server = Server(args, "--state-dir", sealed, "--state-key-file", key)
    result["restart_ms"] = round((time.perf_counter() - start) * 1000)
    server.kill()
    return {"turn": result, "bytes_on_disk": {"plain": size(plain), "encrypted": size(sealed)}, "sessions": -(-args.turns // 10)}


def answers(args, folder):
    path = os.path.join(folder, "answers")
    body = lambda i: {"prompt": f"Once upon a time there were {i} dogs", "max_tokens": 64, "seed": 1, "ignore_eos": True}
    server = Server(args, "--response-cache-disk", path)
    computed = [server.post("/v1/completions", body(i)) for i in range(args.answers)]
    time.sleep(1)
    server.kill()
    server = Server(args, "--response-cache-disk", path, "--response-cache", "64MiB")
    time.sleep(1)
    result = {"computed": summary([took for took, _, _ in computed])}
    for level in ("disk", "memory"):
        times = []
        for i, (_, before, _) in enumerate(computed):
            took, answer, headers = server.post("/v1/completions", body(i))
            assert answer["choices"] == before["choices"] and headers["age"], i
            times.append(took)
        result[level] = summary(times)
    server.kill()
    return {"answer": result, "bytes_on_disk": size(path), "answers": args.answers}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command")
    parser.add_argument("--model")
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--answers", type=int, default=300)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({"sessions": turns(args, folder), "cache": answers(args, folder)}, indent=1))


main()
