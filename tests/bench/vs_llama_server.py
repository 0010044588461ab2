#!/usr/bin/env python3
"""Starling's server and llama-server under load: same file, same threads, same client, interleaved runs.

    cargo build --release
    cargo run --release --example make-model -- smollm2-135m Q4_0 target/135m-q4_0.gguf
    tests/bench/vs_llama_server.py target/release/starling path/to/llama-server target/135m-q4_0.gguf [MORE.gguf ...]

Tests, all or those of --tests:

streams  prompts of 128 random tokens, answers of 64, concurrency 1, 4, 16 and 32 (`starling bench serve`): output tokens
         per second, time to first token
gap      a prompt of 800 tokens arrives while 15 requests decode: longest time between two chunks of a stream until the
         new request's first token, against the time between chunks before; medians over the streams, as a token that is
         no whole character has no chunk
overhead concurrency 16: CPU time of Starling's threads other than the engine's, against the engine's
answers  --requests requests, sequentially and with concurrency 16: how many answers differ
memory   --requests short requests: resident memory and open files after a tenth of them and at the end

llama-server runs with its defaults and one slot per stream. Prints Markdown.
"""
import argparse
import concurrent.futures
import contextlib
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import threading
import time

PROMPT, ANSWER, LONG = 128, 64, 800


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def ask(port, body, on_piece=None):
    """The text of a completion; calls `on_piece` for each chunk."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    body = {"temperature": 0.0, "ignore_eos": True, "stream": on_piece is not None, **body}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"status {response.status}: {response.read().decode(errors='replace')}")
    if on_piece is None:
        return json.loads(response.read())["choices"][0]["text"]
    text = ""
    for line in response:
        if line.startswith(b"data: {"):
            piece = json.loads(line[6:])["choices"]
            if piece and piece[0].get("text"):
                text += piece[0]["text"]
                on_piece()
    return text


@contextlib.contextmanager
def server(command, port):
    """Starts a server; yields its port and process."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    break
            if process.poll() is not None:
                raise RuntimeError(f"{command[0]} ended with {process.returncode}")
            time.sleep(0.1)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait()


def prompts(n, tokens, seed=0):
    draw = random.Random(seed)
    return [[300 + draw.randrange(1000) for _ in range(tokens)] for _ in range(n)]


def streams(run, binary, _):
    for n in (1, 4, 16, 32):
        rows = {}
        for name, start in run(n):
            with start as (port, _):
                command = [binary, "bench", "serve", "--url", f"http://127.0.0.1:{port}", "-p", str(PROMPT),
                           "-n", str(ANSWER), "--concurrency", str(n), "-o", "json"]
                load = lambda requests, seed: json.loads(
                    subprocess.check_output([*command, "--requests", str(requests), "--seed", str(seed)]))
                load(n, 1)
                report = load(max(8, 3 * n), 2)
                # llama-server closes some keep-alive connections
                assert name != "starling" or report["failed"] == 0, report.get("first_error")
                first = report["time_to_first_token"]
                rows.setdefault(name, []).append(
                    (report["output_tokens_per_second"], first["p50"] / 1000, first["p99"] / 1000))
        ours, theirs = ([statistics.median(column) for column in zip(*rows[name])] for name in rows)
        first = lambda r: f"{r[1]:.2f} / {r[2]:.2f} s"
        yield (f"{n} streams", f"{ours[0]:.0f} tok/s, first token {first(ours)}",
               f"{theirs[0]:.0f} tok/s, first token {first(theirs)}",
               f"{ours[0] / theirs[0]:.2f}, first token {ours[1] / theirs[1]:.2f} / {ours[2] / theirs[2]:.2f}")


def gap(run, *_):
    row = {}
    for name, start in run(16):
        with start as (port, _):
            times = [[] for _ in range(15)]
            bodies = [{"prompt": p, "max_tokens": 256} for p in prompts(15, 16)]
            threads = [threading.Thread(target=ask, args=(port, body, lambda i=i: times[i].append(time.perf_counter())))
                       for i, body in enumerate(bodies)]
            [t.start() for t in threads]
            while min(map(len, times)) < 32:
                time.sleep(0.01)
            arrived = time.perf_counter()
            ask(port, {"prompt": prompts(1, LONG, 9)[0], "max_tokens": 1})
            done = time.perf_counter()
            [t.join() for t in threads]
            gaps = [[(a, b - a) for a, b in zip(stream, stream[1:])] for stream in times]
            usual = statistics.median(g for stream in gaps for a, g in stream if a < arrived)
            worst = statistics.median(max(g for a, g in stream if a + g >= arrived and a <= done) for stream in gaps)
            row.setdefault(name, []).append((worst * 1000, usual * 1000))
    ours, theirs = ([statistics.median(column) for column in zip(*row[name])] for name in row)
    text = lambda r: f"{r[0]:.0f} ms, median before {r[1]:.0f} ms"
    yield "longest gap", text(ours), text(theirs), f"{ours[0] / theirs[0]:.2f}"


def cpu_seconds(pid):
    """CPU time of the engine's threads, and of all other threads."""
    times = {True: 0, False: 0}
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/stat") as stat:
            name, fields = stat.read().split("(", 1)[1].rsplit(")", 1)
        user, system = fields.split()[11:13]
        times[name.startswith("starling-")] += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return times[True], times[False]


def overhead(run, binary, _):
    rows = []
    for name, start in run(16):
        if name != "starling":
            continue
        with start as (port, pid):
            before = cpu_seconds(pid)
            subprocess.check_output([binary, "bench", "serve", "--url", f"http://127.0.0.1:{port}", "-p", str(PROMPT),
                                     "-n", "256", "--concurrency", "16", "--requests", "48", "-o", "json"])
            rows.append([b - a for a, b in zip(before, cpu_seconds(pid))])
    engine, other = (statistics.median(column) for column in zip(*rows))
    yield "CPU time, 16 streams", f"engine {engine:.1f} s, all else {other:.2f} s", "", f"{other / engine:.3f}"


def answers(run, _, n):
    row = {}
    for name, start in run(16, once=True):
        with start as (port, _):
            draw = random.Random(5)
            bodies = [{"prompt": p[:draw.randrange(4, 96)], "max_tokens": draw.randrange(4, 32), "seed": i,
                       "temperature": draw.choice([0.0, 0.8])} for i, p in enumerate(prompts(n, 96, 3))]
            alone = [ask(port, body) for body in bodies]
            order = list(range(n))
            draw.shuffle(order)
            with concurrent.futures.ThreadPoolExecutor(16) as pool:
                loaded = dict(zip(order, pool.map(lambda i: ask(port, bodies[i]), order)))
            row[name] = f"{sum(alone[i] != loaded[i] for i in order)} of {n} changed"
    yield "answers under load", *row.values(), ""


def resident(pid):
    with open(f"/proc/{pid}/status") as status:
        kib = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    return kib / 1024, len(os.listdir(f"/proc/{pid}/fd"))


def memory(run, _, n):
    row = {}
    for name, start in run(16, once=True):
        with start as (port, pid):
            seen, lost = [], 0
            with concurrent.futures.ThreadPoolExecutor(16) as pool:
                for first, last in ((0, n // 10), (n // 10, n)):
                    asked = [pool.submit(ask, port, {"prompt": p, "max_tokens": 4}) for p in prompts(last - first, 8, last)]
                    lost += sum(a.exception() is not None for a in asked)
                    seen.append(resident(pid))
            (m0, f0), (m1, f1) = seen
            row[name] = f"{m0:.1f} to {m1:.1f} MiB, {f0} to {f1} files, {lost} of {n} lost"
    yield "memory", *row.values(), ""


TESTS = {"streams": streams, "gap": gap, "overhead": overhead, "answers": answers, "memory": memory}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("starling")
    p.add_argument("llama_server")
    p.add_argument("models", nargs="+")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--turns", type=int, default=3)
    p.add_argument("--tests", nargs="+", choices=TESTS, default=list(TESTS))
    p.add_argument("--requests", type=int, default=10_000)
    a = p.parse_args()

    print("| model | test | Starling | llama-server | ratio |\n|---|---|---|---|---|", flush=True)
    for path in a.models:
        def run(n, once=False):
            """Runs both servers alternately; yields name and context manager of each."""
            for _ in range(1 if once else a.turns):
                for name in ("starling", "llama-server"):
                    port = free_port()
                    common = ["--host", "127.0.0.1", "--port", str(port), "-m", path, "-t", str(a.threads)]
                    if name == "starling":
                        command = [a.starling, "serve", *common, "--max-seqs", str(n), "--ctx-size", "1024"]
                    else:
                        command = [a.llama_server, *common, "-np", str(n), "-c", str(n * 1024)]
                    yield name, server(command, port)

        for test in a.tests:
            for row in TESTS[test](run, a.starling, a.requests):
                print(f"| {path.rsplit('/', 1)[-1]} | " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
