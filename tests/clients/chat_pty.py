#!/usr/bin/env python3
"""`starling chat` on a pseudo-terminal: typed-ahead input, several lines, history, commands, Ctrl-C.

    python3 tests/clients/chat_pty.py target/release/starling
"""

import os
import pathlib
import pty
import re
import select
import signal
import sys
import tempfile
import time

command = sys.argv[1]
LIMIT = 120.0
ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]")


class Chat:
    """A chat whose terminal is the other end of `fd`."""

    def __init__(self, home, *options):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ.update(XDG_STATE_HOME=str(home), TERM="xterm", COLUMNS="100")
            os.environ.pop("STARLING_MODEL", None)
            os.execv(command, [command, "chat", "--temp", "0", "-n", "12", *options])
        self.seen = b""

    def send(self, text):
        os.write(self.fd, text if isinstance(text, bytes) else text.encode())

    def until(self, pattern, what):
        """Reads until the pattern, and forgets what was before it."""
        end = time.monotonic() + LIMIT
        while True:
            plain = ESCAPES.sub(b"", self.seen)
            found = re.search(pattern.encode(), plain, re.S)
            if found:
                self.seen = plain[found.end() :]
                return found
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.fd], [], [], left)[0]:
                sys.exit(f"{what}: no {pattern!r} in {plain!r}")
            try:
                self.seen += os.read(self.fd, 4096)
            except OSError:
                sys.exit(f"{what}: the chat ended: {plain!r}")

    def end(self):
        self.send("/exit\r")
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                assert os.waitstatus_to_exitcode(status) == 0, status
                return
            if select.select([self.fd], [], [], 0.05)[0]:
                try:
                    os.read(self.fd, 4096)
                except OSError:
                    pass
        os.kill(self.pid, signal.SIGKILL)
        sys.exit("the chat does not end")


with tempfile.TemporaryDirectory() as home:
    home = pathlib.Path(home)
    saved = home / "saved.json"

    chat = Chat(home)
    chat.send("typed before the model has loaded\r/tokens\r")
    chat.until(r"lists the commands", "greeting")
    chat.until(r"tokens, 2 messages", "typed ahead")

    chat.until(r"> ", "prompt")
    # the prompt after the command: keys that arrive before it are lines of the terminal's own editing, without Alt-Enter
    chat.send("/clear\r")
    chat.until(r"/clear\s*\n.*> ", "the next prompt")
    chat.send(b"first line\x1b\rsecond line\r")
    chat.until(r"second line", "Alt-Enter")
    chat.send('"""\rthird\rfourth"""\r')
    chat.send("fifth \\\rsixth\r")
    chat.send(f"/save {saved}\r")
    chat.until(r"6 messages written", "/save")
    text = saved.read_text()
    for part in ["first line\\nsecond line", "third\\nfourth", "fifth \\nsixth"]:
        assert part in text, (part, text)

    chat.send(f"/clear\r/load {saved}\r/tokens\r")
    chat.until(r"6 messages read", "/load")
    chat.until(r"tokens, 6 messages", "/tokens")
    chat.send("/regen\r/stats\rHello\r")
    chat.until(r"tok/s, first after", "/stats")
    chat.send("/help\r")
    for part in ["/regen", "/edit", "Alt-Enter", "Ctrl-R"]:
        chat.until(re.escape(part), "/help")
    chat.send("/model nope.gguf\r")
    chat.until(r"no such file.*> ", "/model")
    chat.send(b"\x03")
    chat.until(r"Ctrl-D or /exit", "Ctrl-C at the prompt")
    chat.end()

    # the history of the first chat: one step up is its last line
    chat = Chat(home)
    chat.until(r"lists the commands.*> ", "second chat")
    chat.send(b"\x10\x10")
    chat.until(r"/model nope.gguf", "history")
    chat.send(b"\x15")
    chat.end()
    history = home / "starling/chat_history"
    assert history.exists() and history.stat().st_mode & 0o077 == 0, oct(history.stat().st_mode)

    other = home / "other"
    chat = Chat(other, "--no-history")
    chat.until(r"lists the commands", "third chat")
    chat.send("Hi\r/tokens\r")
    chat.until(r"tokens, 2 messages", "third chat")
    chat.end()
    assert not other.exists(), "--no-history writes no file"

print("the chat on a terminal: ok")
