#!/usr/bin/env python3
"""Runs every ```sh block of README.md, each as a script of its own in the repository; fails if one does."""

import pathlib
import re
import subprocess
import sys
import time

root = pathlib.Path(__file__).resolve().parents[2]
blocks = re.findall(r"^```sh\n(.*?)^```$", (root / "README.md").read_text(), re.M | re.S)
if not blocks:
    sys.exit("README.md has no commands")
failed = 0
for block in blocks:
    start = time.monotonic()
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=root,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    ok = done.returncode == 0
    print(f"{'ok' if ok else 'FAILED'} ({time.monotonic() - start:.1f} s): {block.strip()}")
    if not ok:
        failed += 1
        print(done.stdout.decode(errors="replace"))
print(f"{len(blocks) - failed} of {len(blocks)} blocks of README.md ran")
sys.exit(failed > 0)
