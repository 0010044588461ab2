#!/usr/bin/env python3
"""Measures what each API adds to the time to the first byte of a streamed answer.

    tests/bench/first_byte.py target/release/starling [--requests 300] [--model MODEL.gguf]

The same greedy answer is asked for through every API, in turns, over one connection; the server keeps it after the first time
(--response-cache), so that nothing is computed. Prints a Markdown table: median milliseconds from the request to the first
byte of the body, and the difference to /v1/generate, which has no layer.
"""

import argparse
import http.client
import json
import statistics
import subprocess
import time

PROMPT = "What is the capital of France?"
MESSAGES = [{"role": "user", "content": PROMPT}]
GREEDY = {"temperature": 0, "max_tokens": 16, "stream": True}


def apis(model):
    return {
        "/v1/generate": {"messages": MESSAGES, **GREEDY},
        "/v1/chat/completions": {"messages": MESSAGES, **GREEDY},
        "/v1/responses": {"model": model, "input": PROMPT, "temperature": 0, "max_output_tokens": 16, "stream": True, "store": False},
        "/v1/messages": {"model": model, "messages": MESSAGES, **GREEDY},
        "/api/chat": {"model": model, "messages": MESSAGES, "options": {"temperature": 0, "num_predict": 16}},
    }


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("starling")
    p.add_argument("--requests", type=int, default=300)
    p.add_argument("--model")
    args = p.parse_args()
    command = [args.starling, "serve", "--port", "0", "--log-level", "warn", "--response-cache", "64MiB"]
    command += ["-m", args.model] if args.model else []
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        connection = http.client.HTTPConnection(server.stdout.readline().strip().removeprefix("http://"))
        connection.request("GET", "/v1/models")
        model = json.load(connection.getresponse())["data"][0]["id"]
        times = {path: [] for path in apis(model)}
        for turn in range(args.requests + 20):
            for path, body in apis(model).items():
                data, start = json.dumps(body), time.perf_counter()
                connection.request("POST", path, data, {"content-type": "application/json"})
                response = connection.getresponse()
                first = response.read(1)
                took = (time.perf_counter() - start) * 1000
                text = first + response.read()
                if response.status != 200:
                    raise SystemExit(f"{path}: {response.status} {text.decode()}")
                if turn >= 20:  # the first ones compute and warm up
                    times[path].append(took)
    finally:
        server.kill()
    base = statistics.median(times["/v1/generate"])
    print("| API | first byte, ms | added, ms |\n|---|---|---|")
    for path, all in times.items():
        median = statistics.median(all)
        print(f"| {path} | {median:.3f} | {median - base:+.3f} |")


if __name__ == "__main__":
    main()
