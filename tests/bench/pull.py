#!/usr/bin/env python3
"""Measures `starling pull` against curl: a file of 1 GiB from a server on this machine.

    tests/bench/pull.py target/release/starling [--mib 1024] [--runs 3]

Prints as JSON the MiB per second of both, best of the runs in turn, and their ratio. `starling pull` also computes SHA-256.
"""

import argparse
import http.server
import json
import os
import subprocess
import tempfile
import threading
import time


def serve(path, size):
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            start, end, status = 0, size, 200
            if "range" in self.headers:
                first, last = self.headers["range"].removeprefix("bytes=").split("-")
                start, end, status = int(first), min(int(last) + 1, size) if last else size, 206
            self.send_response(status)
            self.send_header("content-length", str(end - start))
            self.send_header("etag", '"1"')
            if status == 206:
                self.send_header("content-range", f"bytes {start}-{end - 1}/{size}")
            self.end_headers()
            with open(path, "rb") as file:
                at = start
                while at < end:
                    at += os.sendfile(self.connection.fileno(), file.fileno(), at, min(end - at, 1 << 24))

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/large.gguf"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    size = args.mib << 20
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/large.gguf"
        with open(path, "wb") as file:
            file.write(b"GGUF")
            block = os.urandom(1 << 20)
            for _ in range(args.mib):
                file.write(block)
            file.truncate(size)
        url = serve(path, size)
        seconds = {"curl": [], "starling": []}
        for _ in range(args.runs):
            for name in seconds:
                environment = {**os.environ, "STARLING_HOME": f"{directory}/store"}
                command = ["curl", "-s", "-o", f"{directory}/curl.out", url]
                if name == "starling":
                    command = [args.command, "pull", "--force", url]
                start = time.monotonic()
                subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                seconds[name].append(time.monotonic() - start)
                subprocess.run(["rm", "-rf", f"{directory}/curl.out", f"{directory}/store"], check=True)
    report = {name: round(args.mib / min(times), 1) for name, times in seconds.items()}
    print(json.dumps({**report, "ratio": round(report["starling"] / report["curl"], 2)}))


if __name__ == "__main__":
    main()
