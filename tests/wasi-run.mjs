#!/usr/bin/env -S node --no-warnings --experimental-wasm-relaxed-simd --no-incremental-marking
// Runs a wasm32-wasip1 program with the directory it is started in and the repository open at their own paths:
// `node wasi-run.mjs program.wasm args...`
//
// Garbage is collected all at once: where an incremental marking, which the size of a program's memory begins, ends inside of
// a loop in WebAssembly, Node 20 crashes in the frames of JavaScript that the program returns to, three times in four.
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
const { instance } = await WebAssembly.instantiate(await readFile(process.argv[2]), wasi.getImportObject());
process.exitCode = wasi.start(instance);
