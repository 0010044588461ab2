#!/usr/bin/env python3
"""Measures whether a slow model starves a fast one in the same server: each alone, then both under load at once.

    tests/bench/fairness.py target/release/starling SLOW.gguf FAST.gguf [--streams 4]

Prints as JSON the tokens per second and the gaps between tokens. With equal shares, each model has about half of its speed
alone.
"""

import argparse
import json
import threading
import time

from swap import Server, during, streams, summary


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("slow")
    parser.add_argument("fast")
    parser.add_argument("--streams", type=int, default=4)
    args = parser.parse_args()
    report = {}
    with Server(args.command, [("slow", args.slow), ("fast", args.fast)], "--kv-memory", "128MiB") as server:
        for name in ("slow", "fast"):
            during(server, name, args.streams, lambda: time.sleep(2))
            report[f"{name}_alone"] = summary(*during(server, name, args.streams, lambda: time.sleep(10)))
        until = threading.Event()
        threads, gaps, failures = streams(server, "slow", args.streams, until)
        start = time.monotonic()
        report["fast_beside_slow"] = summary(*during(server, "fast", args.streams, lambda: time.sleep(10)))
        until.set()
        for thread in threads:
            thread.join()
        report["slow_beside_fast"] = summary(gaps, failures, time.monotonic() - start)
        for name in ("slow", "fast"):
            alone, beside = report[f"{name}_alone"], report[[k for k in report if k.startswith(f"{name}_beside")][0]]
            report[f"{name}_share"] = round(beside["tokens_per_second"] / alone["tokens_per_second"], 2)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
