#!/usr/bin/env python3
"""Two servers behind vllm-router (PyPI) and HAProxy. Needs the packages of requirements.txt, haproxy, and the path of the
binary.

    python3 tests/clients/router.py target/release/starling

Concurrent streamed conversations run through each router, and one server gets SIGTERM in the middle. No request may
fail, each conversation must stay on the server that has its prefix cached, and every answer must equal that of a single
server. Then a rolling update: under load, each server is replaced by a new one. Again no request may fail.
"""

import concurrent.futures
import contextlib
import http.client
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request

import openai

MODEL = "starling-tiny-q8_0"
SESSIONS, TURNS, AT_ONCE = 20, 10, 6
SYSTEM = "You write stories for children. They are short, their words are plain, and in the end all is well. " * 3
WORDS = "dog tree bird house boat ball moon fish star hill".split()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    def __init__(self, port=0):
        arguments = [sys.argv[1], "serve", "--port", str(port), "--log-level", "error", "--max-seqs", "8"]
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        self.url = self.process.stdout.readline().strip()

    def end(self):
        """Sends SIGTERM, as orchestrators do; running requests finish."""
        self.process.terminate()
        assert self.process.wait(30) == 0, "no clean end"


@contextlib.contextmanager
def running(*arguments):
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield
            assert process.poll() is None, "the router has ended"
        except BaseException:
            log.seek(0)
            print(log.read()[-6000:])
            raise
        finally:
            process.kill()
            process.wait()


def wait_for(port, path):
    deadline = time.monotonic() + 60
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        assert time.monotonic() < deadline, "the router does not start"
        time.sleep(0.1)


@contextlib.contextmanager
def vllm_router(policy, servers, ports=()):
    """`ports`: of servers that start later; `add_to_vllm_router` adds them."""
    port, metrics = free_port(), free_port()
    program = pathlib.Path(sys.executable).parent / "vllm-router"
    health = ["--health-check-endpoint", "/readyz", "--health-check-interval-secs", "1", "--health-failure-threshold", "1"]
    # retries must last longer than the detection of a stopped server
    health += ["--retry-max-retries", "10", "--cb-failure-threshold", "2", "--log-level", "warning"]
    workers = ["--worker-urls", *(server.url for server in servers), "--worker-startup-check-interval", "1"]
    # route by the prefix tree, not by the load of two small servers
    balance = ["--balance-abs-threshold", "64"] if policy == "cache_aware" else []
    address = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    with running(program, "--policy", policy, *address, *workers, *health, *balance):
        wait_for(port, "/readiness")
        yield f"http://127.0.0.1:{port}/v1"


def add_to_vllm_router(base, server):
    url = f"{base.removesuffix('/v1')}/add_worker?url={urllib.parse.quote(server.url, safe='')}"
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=30) as response:
        assert response.status == 200, response.read()


@contextlib.contextmanager
def haproxy(servers, ports=()):
    """`ports`: of servers that start later; the health check admits them."""
    port = free_port()
    addresses = [server.url.removeprefix("http://") for server in servers] + [f"127.0.0.1:{p}" for p in ports]
    lines = "\n".join(f"    server s{i} {address}" for i, address in enumerate(addresses))
    with tempfile.NamedTemporaryFile("w", suffix=".cfg") as config:
        config.write(HAPROXY.format(port=port, servers=lines))
        config.flush()
        with running("haproxy", "-db", "-f", config.name):
            wait_for(port, "/readyz")
            yield f"http://127.0.0.1:{port}/v1"


# a server in shutdown fails /readyz and refuses new requests with 503: HAProxy sends them to the other server
HAPROXY = """
defaults
    mode http
    timeout connect 2s
    timeout client 60s
    timeout server 60s
    retries 3
    retry-on conn-failure empty-response 503
    option redispatch 1
    option http-buffer-request
frontend front
    bind 127.0.0.1:{port}
    default_backend servers
backend servers
    balance hdr(X-Session-ID)
    hash-type consistent
    option httpchk GET /readyz
    http-check send hdr Host localhost
    default-server check inter 200ms fall 1 rise 1
{servers}
"""


def conversation(client, session, turns):
    """Runs a conversation; returns its answers, prompt tokens and cached prompt tokens."""
    messages, answers, prompt, cached = [{"role": "system", "content": SYSTEM}], [], 0, 0
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{WORDS[session % 10]} {WORDS[turn]} {session}"})
        stream = client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=8, seed=1000 * session + turn, stream=True,
            stream_options={"include_usage": True}, extra_headers={"X-Session-ID": f"session-{session}"},
        )
        text, finished = "", False
        for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finished |= choice.finish_reason is not None
            if chunk.usage:
                prompt += chunk.usage.prompt_tokens
                cached += chunk.usage.prompt_tokens_details.cached_tokens
        assert finished, f"session {session}, turn {turn}: the stream is cut"
        answers.append(text)
        messages.append({"role": "assistant", "content": text})
        PASSED.release()
    return answers, prompt, cached


PASSED = threading.Semaphore(0)


def client(base):
    return openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=60)


def through(name, router, expected):
    global PASSED
    PASSED = threading.Semaphore(0)
    servers = [Server(), Server()]
    try:
        with router(servers) as base, concurrent.futures.ThreadPoolExecutor(AT_ONCE) as threads:
            jobs = [threads.submit(conversation, client(base), session, TURNS) for session in range(SESSIONS)]
            for _ in range(SESSIONS * TURNS // 2):
                while not PASSED.acquire(timeout=1):
                    for job in jobs:
                        if job.done():
                            job.result()
            servers[0].end()
            results = [job.result() for job in jobs]
        servers[1].end()
    finally:
        for server in servers:
            server.process.kill()
    for session, (answers, _, _) in enumerate(results):
        assert answers == expected[session], f"{name}: session {session} has other answers than alone"
    rate = sum(cached for _, _, cached in results) / sum(prompt for _, prompt, _ in results)
    print(f"{name}: {SESSIONS * TURNS} answers, one server ended, {rate:.0%} of prompt tokens were cached", flush=True)
    assert rate > 0.8, "conversations did not stay where they were"


def rolling_update(name, router, add, expected):
    """Replaces both servers under load: a new one starts and is added, then an old one gets SIGTERM."""
    servers, ports, over = [Server(), Server()], [free_port(), free_port()], threading.Event()

    def load(base, first):
        n, one = 0, client(base)
        while not over.is_set():
            for session in range(first, SESSIONS, AT_ONCE):
                answers, _, _ = conversation(one, session, TURNS)
                assert answers == expected[session], f"{name}: session {session} has other answers than alone"
                n += len(answers)
        return n

    try:
        with router(servers, ports) as base, concurrent.futures.ThreadPoolExecutor(AT_ONCE) as threads:
            jobs = [threads.submit(load, base, first) for first in range(AT_ONCE)]
            try:
                for old, port in zip(servers[:2], ports):
                    time.sleep(1)
                    servers.append(Server(port))
                    add(base, servers[-1])
                    old.end()
                    assert not any(job.done() for job in jobs), f"{name}: a request failed"
                time.sleep(1)
            finally:
                over.set()
            n = sum(job.result() for job in jobs)
        for server in servers[2:]:
            server.end()
    finally:
        for server in servers:
            server.process.kill()
    print(f"{name}: {n} answers, both servers replaced, none failed", flush=True)


def main():
    alone = Server()
    one = client(alone.url + "/v1")
    expected = [conversation(one, session, TURNS)[0] for session in range(SESSIONS)]
    alone.end()
    through("haproxy", haproxy, expected)
    for policy in "consistent_hash", "cache_aware":
        through(f"vllm-router {policy}", lambda servers: vllm_router(policy, servers), expected)
    # ten health checks
    rolling_update("haproxy", haproxy, lambda base, server: time.sleep(2), expected)
    for policy in "consistent_hash", "cache_aware":
        router = lambda servers, ports: vllm_router(policy, servers, ports)
        rolling_update(f"vllm-router {policy}", router, add_to_vllm_router, expected)


main()
