#!/usr/bin/env python3
"""Check the crates of Cargo.lock by the rules of deny.toml: licences, sources, and crates that come in several versions.

The exit code is 1 if a rule is broken, and if an exception is no longer needed.
"""

import json
import pathlib
import re
import subprocess
import sys
import tomllib

root = pathlib.Path(__file__).resolve().parents[2]
rules = tomllib.loads((root / "deny.toml").read_text())
allowed = set(rules["licenses"]["allow"])
REGISTRY = "registry+https://github.com/rust-lang/crates.io-index"
problems = []


def is_allowed(expression):
    """Whether an SPDX expression can be met with the allowed licences."""
    # an exception as `WITH LLVM-exception` only adds rights; old crates write / for OR
    expression = re.sub(r"\bWITH [\w.-]+", "", expression).replace("/", " OR ")
    words = re.findall(r"[()]|[\w.+-]+", expression)
    names = {"AND": "and", "OR": "or", "(": "(", ")": ")"}
    return eval(" ".join(names.get(word) or str(word in allowed) for word in words))


packages = {}
for target in rules["graph"]["targets"]:
    command = ["cargo", "metadata", "--format-version=1", "--locked", "--all-features", f"--filter-platform={target}"]
    found = json.loads(subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE).stdout)
    used = {node["id"] for node in found["resolve"]["nodes"]}
    packages |= {package["id"]: package for package in found["packages"] if package["id"] in used}

versions = {}
for package in packages.values():
    name, version, licence = package["name"], package["version"], package["license"]
    versions.setdefault(name, []).append(version)
    if package["source"] not in (None, REGISTRY):
        problems.append(f"{name} {version} comes from {package['source']}")
    if not licence or not is_allowed(licence):
        problems.append(f"{name} {version} has the licence {licence}, which is not in deny.toml")

skipped = [row["crate"].split("@") for row in rules["bans"]["skip"]]
for name, prefix in skipped:
    if not any(version == prefix or version.startswith(f"{prefix}.") for version in versions.get(name, [])):
        problems.append(f"deny.toml skips {name} {prefix}, which is not used")
for name, found in sorted(versions.items()):
    others = [v for v in found if not any(n == name and v.startswith(f"{prefix}.") for n, prefix in skipped)]
    if len(others) > 1:
        problems.append(f"{name} comes in several versions: {', '.join(sorted(others))}")

print("\n".join(problems))
print(f"{len(packages)} crates, {len(problems)} problems")
sys.exit(bool(problems))
