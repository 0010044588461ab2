#!/usr/bin/env python3
"""Runs a wasm32-wasip1 program in wasmtime, with the directory it is started in and the repository open at their own
paths:

    pip install wasmtime
    tests/wasi-run.py program.wasm args...
"""
import sys
from pathlib import Path

from wasmtime import Config, Engine, ExitTrap, Linker, Module, Store, WasiConfig


def main():
    config = Config()
    config.wasm_relaxed_simd = True
    engine = Engine(config)
    wasi = WasiConfig()
    wasi.argv = sys.argv[1:]
    wasi.inherit_env()
    wasi.inherit_stdout()
    wasi.inherit_stderr()
    repository = str(Path(__file__).resolve().parent.parent)
    for host, guest in [(repository, repository), (".", ".")]:
        wasi.preopen_dir(host, guest)
    store = Store(engine)
    store.set_wasi(wasi)
    linker = Linker(engine)
    linker.define_wasi()
    instance = linker.instantiate(store, Module.from_file(engine, sys.argv[1]))
    try:
        instance.exports(store)["_start"](store)
    except ExitTrap as exit_:
        sys.exit(exit_.code)


if __name__ == "__main__":
    main()
