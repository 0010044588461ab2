// web/examples in the runtimes themselves, against a pinned result: after web/build.sh, tests/build-wasm.sh and
// `npm install` here. PYTHON is a Python that has the package wasmtime.

import assert from "node:assert/strict";
import { execFile, spawn } from "node:child_process";
import { mkdir, mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join, resolve } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";

const here = fileURLToPath(new URL(".", import.meta.url));
const root = resolve(here, "../..");
const edge = join(root, "web/examples");
const bin = (name) => join(here, "node_modules/.bin", name);
const wasm = resolve(root, process.env.STARLING_WASM ?? `${process.env.CARGO_TARGET_DIR ?? "target"}/wasm`);
const { text } = JSON.parse(await readFile(join(root, "fixtures/goldens/pinned/tiny-q8_0-greedy.json"), "utf8"));

const output = async (command, ...args) =>
  (await promisify(execFile)(command, args, { cwd: edge, timeout: 120_000, maxBuffer: 64 << 20 })).stdout;
const run = async (command, ...args) => JSON.parse(await output(command, ...args));

test("node", async () => assert.equal((await run(process.execPath, "run.mjs")).text, text));
test("Deno", async () =>
  assert.equal((await run(bin("deno"), "run", "--no-lock", "--allow-read", "run.mjs")).text, text));
test("Bun", async () => assert.equal((await run(bin("bun"), "run.mjs")).text, text));

const python = process.env.PYTHON ?? "python3";
const MODEL = join(root, "fixtures/starling-tiny/starling-tiny-q8_0.gguf");

test("wasmtime from Python", async () => {
  for (const isa of ["scalar", "simd128"]) {
    const module = join(wasm, `plain-${isa}.wasm`);
    assert.deepEqual(await run(python, "-B", "wasmtime_story.py", module, MODEL), { text, isa });
  }
});

test("wasmtime from C", async () => {
  const manifest = join(here, "wasmtime-headers/Cargo.toml");
  const { packages } = await run("cargo", "metadata", "--locked", "--format-version", "1", "--manifest-path", manifest);
  const headers = join(dirname(packages.find((p) => p.name === "wasmtime-c-api-impl").manifest_path), "include");
  const find = "import pathlib, wasmtime; print(next(pathlib.Path(wasmtime.__file__).parent.glob('*/_libwasmtime.so')))";
  const library = (await output(python, "-c", find)).trim();
  const folder = await mkdtemp(join(tmpdir(), "starling-c-"));
  try {
    // a release of the C API has this file with all features on
    const features = await readFile(join(headers, "wasmtime/conf.h.in"), "utf8");
    await mkdir(join(folder, "wasmtime"));
    await writeFile(join(folder, "wasmtime/conf.h"), features.replaceAll("#cmakedefine", "#define"));
    const story = join(folder, "story");
    const warnings = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror"];
    await output("cc", ...warnings, "-I", folder, "-I", headers, "wasmtime_story.c", library, `-Wl,-rpath,${dirname(library)}`, "-o", story);
    const lines = (await output(story, join(wasm, "plain-simd128.wasm"), MODEL)).trim().split("\n");
    const events = lines.flatMap((line) => JSON.parse(line).ok.events);
    assert.equal(events.map((event) => event.text ?? "").join(""), text);
    await assert.rejects(output(story), (e) => e.code === 1 && e.stderr.includes("Usage: "));
  } finally {
    await rm(folder, { recursive: true });
  }
});

test("a chat in wasmtime is that of the package", async () => {
  const { Starling } = await import("../../web/dist/index.js");
  const model = await Starling.load(MODEL, { contextLength: 512 });
  const want = await model.chat("Who are you?", { maxTokens: 64, temperature: 0 }).result;
  model.dispose();
  const module = join(wasm, "plain-simd128-chat.wasm");
  const answer = await run(python, "-B", "wasmtime_chat.py", module, MODEL, "Who are you?");
  assert.deepEqual(answer, { text: want.text, reason: want.finishReason });
  for (const script of ["wasmtime_story.py", "wasmtime_chat.py"])
    await assert.rejects(run(python, "-B", script), (e) => e.code === 1 && e.stderr.includes(`python3 ${script} `));
});

test("a sandbox ends what takes too much", async () => {
  const limits = [
    ["MEMORY_LIMIT = 5 << 20", /RuntimeError: memory: not enough memory for the weights: .*; the module has \d+ bytes, and the host gave it no more/],
    ["FUEL = 10**7", /all fuel consumed/],
  ];
  for (const [limit, message] of limits) {
    const script = `import sys, wasmtime_story as w; w.${limit}; w.story(*sys.argv[1:])`;
    await assert.rejects(run(python, "-B", "-c", script, join(wasm, "plain-simd128.wasm"), MODEL), message);
  }
});

test("workerd", async () => {
  // a port of its own choice is written to the control file
  const service = spawn(
    bin("workerd"),
    ["serve", "workerd.capnp", "--socket-addr", "http=127.0.0.1:0", "--control-fd=3"],
    { cwd: edge, stdio: ["ignore", "inherit", "inherit", "pipe"] },
  );
  try {
    const port = await new Promise((resolve, reject) => {
      let said = "";
      service.on("exit", (code) => reject(new Error(`workerd ended with ${code}`)));
      service.stdio[3].on("data", (data) => {
        said += data;
        const found = /"port":(\d+)/.exec(said);
        if (found) resolve(found[1]);
      });
    });
    const ask = (query, options) => fetch(`http://127.0.0.1:${port}/${query}`, options);
    const get = async (query) => (await ask(query)).text();
    assert.equal(await get(""), text);
    assert.match(await get("?regex=[a-z]{3}-[0-9]{2}"), /^[a-z]{3}-[0-9]{2}$/);
    // what drove the engine for the first ends with its response
    assert.deepEqual(await Promise.all([get("?n=64"), get("?n=64")]), [text, text]);
    assert.deepEqual((await Promise.all([get("?n=4"), get("?n=400"), get("?n=64")]))[2], text);

    let start = performance.now();
    let first;
    for await (const _ of (await ask("?n=400")).body) first ??= performance.now() - start;
    const all = performance.now() - start;
    assert.ok(first < all / 2, `the first piece after ${first} ms, all after ${all}`);

    const abort = new AbortController();
    await (await ask("?n=400", { signal: abort.signal })).body.getReader().read();
    abort.abort();
    start = performance.now();
    assert.ok(text.startsWith(await get("?n=4")));
    const next = performance.now() - start;
    assert.ok(next < all / 2, `after an abort, the next answer took ${next} ms, the aborted one takes ${all}`);
  } finally {
    service.kill();
  }
});
