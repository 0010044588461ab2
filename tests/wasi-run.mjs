#!/usr/bin/env -S node --no-warnings --experimental-wasm-relaxed-simd
// Runs a wasm32-wasip1 program with the directory it is started in and the repository open at their own paths:
// `node wasi-run.mjs program.wasm args...`
import { readFile } from "node:fs/promises";
import { WASI } from "node:wasi";

const root = new URL("..", import.meta.url).pathname;
const wasi = new WASI({
  version: "preview1",
  args: process.argv.slice(2),
  env: { ...process.env, PWD: process.cwd() },
  preopens: { [root]: root, ".": "." },
  returnOnExit: true,
});
const module = await WebAssembly.compile(await readFile(process.argv[2]));
process.exitCode = wasi.start(await WebAssembly.instantiate(module, wasi.getImportObject()));
