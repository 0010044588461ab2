#!/usr/bin/env python3
"""Run every ```sh block of README.md and host-native/docs/*.md, or of the given files.

Each block is a bash script of its own, run in the repository. A block that occurs in several files runs once. The exit
code is 1 if a block fails.
"""

import pathlib
import re
import subprocess
import sys
import time

root = pathlib.Path(__file__).resolve().parents[2]
named = [pathlib.Path(name).resolve() for name in sys.argv[1:]]
files = named or [root / "README.md", *sorted((root / "host-native/docs").glob("*.md"))]
seen = set()
failed = 0
for file in files:
    blocks = re.findall(r"^```sh\n(.*?)^```$", file.read_text(), re.M | re.S)
    if not blocks and (file in named or file.name == "README.md"):
        sys.exit(f"{file}: no ```sh block")
    for block in blocks:
        if block in seen:
            continue
        seen.add(block)
        start = time.monotonic()
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        ok = done.returncode == 0
        print(f"{file.name}: {'ok' if ok else 'FAILED'} ({time.monotonic() - start:.1f} s): {block.strip()}")
        if not ok:
            failed += 1
            print(done.stdout.decode(errors="replace"))
print(f"{len(seen) - failed} of {len(seen)} blocks ran")
sys.exit(failed > 0)
