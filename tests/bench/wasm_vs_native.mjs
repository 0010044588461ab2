// Tokens per second of the WebAssembly modules and the native program, one thread each, same model files, interleaved
// runs: prefill of 512 tokens, and decode of 64 tokens after 128. Prints a Markdown table of medians. Node runs the module
// of the package, wasmtime the one with plain exports.
//
//     node tests/bench/wasm_vs_native.mjs STARLING MODEL.gguf...
//
// STARLING is the native program. After tests/build-wasm.sh; CARGO_TARGET_DIR is honoured. Measures wasmtime too if
// module-bench was built: cargo build --release --manifest-path tests/wasi-run/Cargo.toml. REPEATS: number of runs, default
// 5. NATIVE_ISA: instruction set of the native program, default avx2.

import { execFileSync, spawn } from "node:child_process";
import { existsSync } from "node:fs";
import { readFile } from "node:fs/promises";
import { basename } from "node:path";
import { performance } from "node:perf_hooks";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

import { Package, hasRelaxedSimd, relaxedIsas } from "../node/starling.mjs";

const [native, ...models] = process.argv.slice(2);
const repeats = Number(process.env.REPEATS ?? 5);
const nativeIsa = process.env.NATIVE_ISA ?? "avx2";
const target = process.env.CARGO_TARGET_DIR ?? new URL("../../target", import.meta.url).pathname;
const build = (isa) => (isa === "relaxed-i16" ? "relaxed-simd" : isa);
const PREFILL = 512;
const DEPTH = 128;
const DECODE = 64;

const median = (values) => values.toSorted((a, b) => a - b)[values.length >> 1];

/** Each runtime: `measure(prefill, decode, seed)` gives tokens per second, of prefill where decode is 0. */
async function inNode(isa, model) {
  const starling = await Package.load(pathToFileURL(`${target}/wasm/web-${build(isa)}/`));
  const session = starling.open(model, 1 << 20, { n_ctx: 1024, batch_tokens: PREFILL, isa });
  const { n_vocab } = session.info();
  return {
    measure(prefill, decode, seed) {
      const ids = Array.from({ length: prefill }, (_, i) => (i * 7919 + 13 + seed * 104_729) % n_vocab);
      const sampling = { temperature: 0 };
      session.submit({ ids, max_tokens: Math.max(decode, 1), ignore_eos: true, sampling });
      const start = performance.now();
      session.step();
      const first = performance.now();
      let steps = 0;
      while (session.step().tokens !== 0) steps += 1;
      const seconds = (performance.now() - first) / 1000;
      return decode === 0 ? (prefill / (first - start)) * 1000 : steps / seconds;
    },
    close() {},
  };
}

async function inWasmtime(isa, file) {
  const child = spawn(`${target}/wasi-run/release/module-bench`, [`${target}/wasm/plain-${build(isa)}.wasm`, file, isa], {
    stdio: ["pipe", "pipe", "inherit"],
  });
  const lines = createInterface({ input: child.stdout })[Symbol.asyncIterator]();
  return {
    async measure(...numbers) {
      child.stdin.write(`${numbers.join(" ")}\n`);
      return Number((await lines.next()).value);
    },
    close: () => child.stdin.end(),
  };
}

function inNative(file) {
  return {
    measure(prefill, decode) {
      const test = decode === 0 ? ["-p", prefill, "-n", 0] : ["-p", 0, "-n", decode, "-d", prefill];
      const args = ["bench", "--model", file, "--isa", nativeIsa, "-t", 1, "-r", 1, "-o", "json", ...test];
      return JSON.parse(execFileSync(native, args.map(String), { encoding: "utf8" }))[0].tokens_per_second;
    },
    close() {},
  };
}

const relaxed = hasRelaxedSimd() && relaxedIsas.length > 1;
const hasWasmtime = existsSync(`${target}/wasi-run/release/module-bench`);
console.log(`| model | runtime | prefill ${PREFILL}, tok/s | of native | decode ${DECODE} at ${DEPTH}, tok/s | of native |`);
console.log("|---|---|---|---|---|---|");
for (const file of models) {
  const bytes = await readFile(file);
  const runtimes = { [`native ${nativeIsa}`]: inNative(file) };
  for (const isa of ["simd128", ...(relaxed ? relaxedIsas : [])]) {
    runtimes[`node ${process.version} ${isa}`] = await inNode(isa, bytes);
  }
  for (const isa of hasWasmtime ? ["simd128", "relaxed-simd", "relaxed-i16"] : []) {
    runtimes[`wasmtime ${isa}`] = await inWasmtime(isa, file);
  }
  const results = Object.fromEntries(Object.keys(runtimes).map((name) => [name, { prefill: [], decode: [] }]));
  // run 0 is the warm-up
  for (let turn = 0; turn <= repeats; turn++) {
    for (const [name, { measure }] of Object.entries(runtimes)) {
      const prefill = await measure(PREFILL, 0, 2 * turn + 1);
      const decode = await measure(DEPTH, DECODE, 2 * turn + 2);
      if (turn === 0) continue;
      results[name].prefill.push(prefill);
      results[name].decode.push(decode);
    }
  }
  Object.values(runtimes).forEach((r) => r.close());
  const [base] = Object.values(results);
  for (const [name, r] of Object.entries(results)) {
    const cells = ["prefill", "decode"].flatMap((test) => {
      const value = median(r[test]);
      return [value.toFixed(1), `${((100 * value) / median(base[test])).toFixed(0)} %`];
    });
    console.log(`| ${basename(file)} | ${name} | ${cells.join(" | ")} |`);
  }
}
