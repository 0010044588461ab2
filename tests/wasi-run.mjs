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
// Compiled here and now: tasks that `compile` leaves behind can end Node 20 with a SIGSEGV as it exits
// (nodejs/node#56236).
const module = new WebAssembly.Module(await readFile(process.argv[2]));
process.exitCode = wasi.start(new WebAssembly.Instance(module, wasi.getImportObject()));
