#!/usr/bin/env python3
"""Starling's tokenizer against Hugging Face tokenizers: equality of ids, and speed with one thread each.

    pip install tokenizers==0.23.3
    tests/bench/tokenizer_vs_hf.py --train 'docs/**/*.md' --text prose.txt [--same multilingual.txt ...]

Trains a byte-level BPE of GPT-2's size on the files of --train (cached in --work), writes it as a GGUF, and encodes
--text with both. Texts of --same and random strings are compared but not timed.
"""

import argparse
import glob
import os
import pathlib
import random
import struct
import subprocess
import sys
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"
import tokenizers  # noqa: E402
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers  # noqa: E402

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
SPLITS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "llama-bpe": pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]),
}
DOCUMENT = 4000


def train(files: list[str], pre: str, size: int) -> tokenizers.Tokenizer:
    tok = tokenizers.Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    tok.pre_tokenizer = SPLITS[pre]
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    texts = (pathlib.Path(f).read_text("utf-8", "replace") for f in files)
    tok.train_from_iterator(texts, trainer)
    return tok


def gguf_string(s: str) -> bytes:
    data = s.encode()
    return struct.pack("<Q", len(data)) + data


def gguf_value(value) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_string(value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(gguf_string, value))
    return struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)


def write_gguf(path: pathlib.Path, tok: tokenizers.Tokenizer, pre: str) -> None:
    import json

    model = json.loads(tok.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    metadata = {
        "general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.merges": merges,
    }
    body = b"".join(gguf_string(k) + gguf_value(v) for k, v in metadata.items())
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, len(metadata)) + body)


def documents(text: str) -> list[str]:
    """Splits a text at line ends into documents of about DOCUMENT bytes."""
    out, size = [[]], 0
    for line in text.splitlines(keepends=True):
        out[-1].append(line)
        size += len(line.encode())
        if size >= DOCUMENT:
            out.append([])
            size = 0
    return ["".join(lines) for lines in out if lines]


def random_text(rng: random.Random, n: int) -> str:
    kinds = [
        lambda: chr(rng.randrange(32, 127)), lambda: " " * rng.randrange(1, 9), lambda: rng.choice("\n\r\t\u00a0\u3000"),
        lambda: chr(rng.randrange(0xA0, 0x530)), lambda: chr(rng.randrange(0x900, 0xE80)),
        lambda: chr(rng.randrange(0x3000, 0xD7A4)), lambda: chr(rng.randrange(0x1F300, 0x1FA00)),
        lambda: chr(rng.choice([rng.randrange(0, 0xD800), rng.randrange(0xE000, 0x110000)])),
        lambda: rng.choice(["'s", "'LL", "'ſ", "don't", "12345", "٣٤٥", "the ", " of", "e\u0301"]),
    ]
    return "".join(rng.choice(kinds)() * rng.choice([1, 1, 1, 3]) for _ in range(n))


def main() -> None:
    args = argparse.ArgumentParser()
    args.add_argument("--train", nargs="+", default=[], help="training texts: files or globs")
    args.add_argument("--text", required=True)
    args.add_argument("--same", nargs="*", default=[])
    args.add_argument("--pre", choices=SPLITS, default="gpt-2")
    args.add_argument("--vocab", type=int, default=50257)
    args.add_argument("--work", type=pathlib.Path, default=pathlib.Path("/tmp/tokenizer_vs_hf"))
    args.add_argument("--bench", default="target/release/examples/tokenize_bench", help="path of the example tokenize_bench")
    args = args.parse_args()

    args.work.mkdir(parents=True, exist_ok=True)
    stem = args.work / f"{args.pre}-{args.vocab}"
    if not stem.with_suffix(".json").exists():
        files = sorted(f for pattern in args.train for f in glob.glob(pattern, recursive=True) if os.path.isfile(f))
        train(files, args.pre, args.vocab).save(str(stem.with_suffix(".json")))
    tok = tokenizers.Tokenizer.from_file(str(stem.with_suffix(".json")))
    write_gguf(stem.with_suffix(".gguf"), tok, args.pre)

    def ours(text: str) -> tuple[str, list[int]]:
        source, ids = args.work / "text", args.work / "ids"
        source.write_bytes(text.encode())
        run = subprocess.run([args.bench, stem.with_suffix(".gguf"), source, ids], check=True, capture_output=True)
        return run.stdout.decode().strip(), [int(line) for line in ids.read_text().split()]

    rng = random.Random(1)
    texts = {f: pathlib.Path(f).read_bytes().decode("utf-8", "replace") for f in [args.text, *args.same]}
    texts["random strings"] = "\n".join(random_text(rng, 60) for _ in range(20000))
    texts["long words"] = " ".join("".join(rng.choices("aeinorst", k=n)) for n in (10, 47, 48, 49, 50, 1000, 100000))
    texts["one letter"] = "a" * 100000
    for name, text in texts.items():
        report, ids = ours(text)
        expected = tok.encode(text, add_special_tokens=False).ids
        if ids != expected:
            at = next((i for i, (a, b) in enumerate(zip(ids, expected)) if a != b), min(len(ids), len(expected)))
            before = tok.decode(expected[max(0, at - 5):at + 5])
            sys.exit(f"{name}: token {at} differs: {ids[at:at + 5]} not {expected[at:at + 5]}, in {before!r}")
        print(f"same ids: {name}: {len(ids)} tokens, {len(text.encode())} bytes, vocabulary of {tok.get_vocab_size()}")

    text = texts[args.text]
    docs = documents(text)
    speeds = []
    for what, run in [("whole", lambda: tok.encode(text, add_special_tokens=False)),
                      ("documents", lambda: [tok.encode(d, add_special_tokens=False) for d in docs])]:
        best = 1e9
        for _ in range(3):
            started = time.perf_counter()
            run()
            best = min(best, time.perf_counter() - started)
        speeds.append(len(text.encode()) / 1e6 / best)
        print(f"HF tokenizers {tokenizers.__version__}, {what}: {speeds[-1]:.2f} MB/s")
    report, _ = ours(text)
    print(f"starling: {report}")
    whole, in_documents = (float(part.split()[0]) for part in report.split(";")[:2])
    print(f"ratio: whole {whole / speeds[0]:.1f}, documents {in_documents / speeds[1]:.1f}, "
          f"our documents to their best {in_documents / max(speeds):.1f}")


main()
