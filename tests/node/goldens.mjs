// The shipped modules in Node against the pinned results: `node --test tests/node/goldens.mjs`, after
// tests/build-wasm.sh. STARLING_WASM is the directory that it filled, by default target/wasm.

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { readFile } from "node:fs/promises";
import { resolve } from "node:path";
import { test } from "node:test";
import { pathToFileURL } from "node:url";

import { Package, Plain, hasRelaxedSimd, relaxedIsas } from "./starling.mjs";

const root = new URL("../../", import.meta.url);
const fixtures = new URL("fixtures/", root);
const target = process.env.CARGO_TARGET_DIR ?? "target";
const wasm = pathToFileURL(resolve(root.pathname, process.env.STARLING_WASM ?? `${target}/wasm`) + "/");

const json = async (path) => JSON.parse(await readFile(new URL(path, fixtures), "utf8"));
// those made of another file are for the engine's own tests
const cases = (await json("goldens/cases.json")).cases.filter((c) => !c.quantise);
const { cases: embeddings } = await json("goldens/embeddings.json");

/** Every option that a case does not give is off. */
const off = {
  repeat_penalty: 1,
  frequency_penalty: 0,
  presence_penalty: 0,
  dry: null,
  top_k: 0,
  typical_p: 1,
  top_p: 1,
  min_p: 0,
  seed: 0,
};

function sampling(options) {
  const all = { ...off, ...options };
  if (all.dry) all.dry = { last_n: 2 ** 32 - 1, ...all.dry };
  return all;
}

function run(session, request) {
  const id = session.submit(request);
  const ids = [];
  let text = "";
  for (;;) {
    for (const event of session.step().events) {
      assert.equal(event.id, id);
      text += event.text ?? "";
      if (event.type === "token") ids.push(event.token);
      if (event.type === "done") return { ids, text };
    }
  }
}

async function check(starling, isa, c, i) {
  const want = await json(`goldens/pinned/${c.name}.json`);
  const model = await readFile(new URL(c.model, fixtures));
  const piece = [65_536, 100_003, 1_000_000][i % 3];
  const options = {
    kv_type: c.kv_type,
    n_ctx: want.prompt_ids.length + c.max_tokens,
    batch_tokens: [512, 64, 7][i % 3],
    ...(isa === relaxedIsas[1] && { isa }),
  };
  const session = starling.open(model, piece, options);
  assert.equal(session.info().isa, isa);
  const prompt_ids = session.tokenize(c.prompt).ids;
  const logits_sha256 = session.logitsSha256(prompt_ids);
  const request = { prompt: c.prompt, max_tokens: c.max_tokens, sampling: sampling(c.sampling), dry_breakers: [] };
  const { ids, text } = run(session, request);
  session.close();
  assert.deepEqual({ prompt_ids, logits_sha256, ids, text }, want, c.name);
}

/** Vectors of the pinned texts, and close to those of the reference. */
async function checkEmbeddings(starling, c) {
  const want = await json(`goldens/pinned/embedding-${c.name}.json`);
  const model = await readFile(new URL(c.model, fixtures));
  const session = starling.open(model, 65_536, { n_ctx: 512 });
  const hash = createHash("sha256");
  for (const text of c.texts) hash.update(new Uint8Array(session.embed(text).buffer));
  assert.equal(hash.digest("hex"), want.vectors_sha256, c.name);
  const reference = await json(c.model.replace(/-f(16|32)\.gguf$/, ".json"));
  for (const prompt of reference.prompts) {
    const vector = session.embed(prompt.ids);
    assert.ok(prompt.embedding.every((v, i) => Math.abs(v - vector[i]) <= 5e-4), c.name);
  }
  assert.throws(() => session.embed([]), /request: /);
  assert.throws(() => session.submit({ ids: [] }), /request: /);
  session.close();
}

/** Errors are thrown, name their kind, and harm nothing. */
async function checkErrors(starling) {
  const model = await readFile(new URL("starling-tiny/starling-tiny-q4_0.gguf", fixtures));
  const open = (bytes, options = {}) => starling.open(bytes, 65_536, options);
  assert.throws(() => open(new Uint8Array(1000).fill(7)), /model: /);
  for (const n of [0, 4, 100, 100_000, model.length - 1]) assert.throws(() => open(model.subarray(0, n)), /model: /);
  assert.throws(() => open(model, { isa: "avx2" }), /request: /);
  assert.throws(() => open(model, { kv_type: "f8" }), /request: .*f8/);
  assert.throws(() => open(model, { threads: 2 }), /request: .*threads/);

  const session = open(model, { n_ctx: 64 });
  assert.throws(() => session.submit({}), /request: expected exactly one of prompt, ids and chat/);
  assert.throws(() => session.submit({ ids: [] }), /request: /);
  assert.throws(() => session.submit({ ids: [2 ** 31] }), /request: /);
  assert.throws(() => session.submit({ ids: Array(65).fill(1) }), /request: /);
  assert.throws(() => session.submit({ prompt: "a", sampling: { top_p: 2 } }), /request: /);
  assert.throws(() => session.logitsSha256([]), /request: /);
  assert.throws(() => session.detokenize([2 ** 31]), /request: /);
  assert.equal(session.cancel(99), false);
  const id = session.submit({ prompt: "Once", max_tokens: 8 });
  session.step();
  assert.equal(session.cancel(id), true);
  assert.equal(session.cancel(id), false);
  const text = "Once upon a time, Zoë…";
  const { ids } = session.tokenize(text);
  assert.ok(session.detokenize(ids).endsWith(text));
  session.close();
}

/** Saved keys and values spare a later session the prompt and change no token; damaged ones are refused. */
async function checkSaved(starling) {
  const model = await readFile(new URL("starling-tiny/starling-tiny-q8_0.gguf", fixtures));
  const open = (options = {}, digest = true) => starling.open(model, 65_536, { n_ctx: 256, ...options }, digest);
  const first = open();
  const { ids } = first.tokenize("Once upon a time there was a little bird that lived in a tree by the river. ".repeat(4));
  const request = { ids, max_tokens: 12, sampling: sampling({ temperature: 0.8, seed: 3 }) };
  assert.deepEqual([...first.save(ids)], [], "nothing was processed");
  const want = run(first, request);
  const saved = first.save(ids);
  const pages = Math.floor(ids.length / 16);
  const size = saved.length / pages;
  first.close();

  const second = open();
  assert.equal(second.restore(saved), pages * 16);
  const id = second.submit(request);
  const events = [];
  while (events.at(-1)?.type !== "done") events.push(...second.step().events);
  const cached = Math.floor((ids.length - 1) / 16) * 16;
  assert.deepEqual(events[0], { type: "prefilled", id, n_prompt: ids.length, n_cached: cached });
  assert.deepEqual(events.filter((e) => e.type === "token").map((e) => e.token), want.ids);
  assert.deepEqual(second.save(ids), saved);
  second.close();

  const third = open();
  for (const at of [0, 9, 40, 200, size - 1, size + 300]) {
    const damaged = saved.slice();
    damaged[at] ^= 1;
    assert.throws(() => third.restore(damaged), at < 12 ? /request: saved cache: / : /checksum: saved cache: /, `byte ${at}`);
  }
  assert.throws(() => third.restore(saved.subarray(0, size - 1)), /request: saved cache: exported KV page: found \d+ bytes/);
  assert.throws(() => third.restore(saved.subarray(2 * size)), /request: saved cache: exported KV page: the page before/);
  assert.equal(third.restore(saved.subarray(0, size)), 16);
  third.close();
  const small = open({ n_ctx: 32 });
  assert.throws(() => small.restore(saved), /capacity: saved cache: /);
  small.close();
  const other = open({ kv_type: "f32" });
  // pages of other lengths: the first is cut elsewhere
  assert.throws(() => other.restore(saved), /checksum: saved cache: /);
  other.close();
  const anonymous = open({}, false);
  assert.throws(() => anonymous.save(ids), /request: .*digest/);
  assert.throws(() => anonymous.restore(saved), /request: .*digest/);
  anonymous.close();
}

/** Memory of keys and values is taken as they are written, not for all that may be. */
async function checkMemory(starling) {
  const model = await readFile(new URL("starling-tiny/starling-tiny-q8_0.gguf", fixtures));
  const session = starling.open(model, 65_536, { n_ctx: 2048, kv_type: "f32", max_seqs: 2 });
  const before = session.memory();
  assert.equal(before.kv_committed, 0);
  const refused = () => starling.open(model, 65_536, { n_ctx: 2048, working_memory: 100_000 });
  assert.throws(refused, /memory: batches of 64 tokens take \d+ bytes of working memory, the limit is 100000/);
  const { kv_reserved } = before;
  const ids = (n) => Array.from({ length: n }, (_, i) => (i * 37) % 300);
  // no limit of the answer: all of the context may be needed
  const id = session.submit({ ids: ids(40) });
  session.step();
  const short = session.memory().kv_committed;
  assert.ok(short > 0 && short <= kv_reserved / 50, `${short} of ${kv_reserved}`);
  session.cancel(id);
  for (const seed of [1, 2]) session.submit({ ids: ids(2000).map((t) => t + seed), max_tokens: 40 });
  while (session.step().tokens > 0);
  const { kv_committed } = session.memory();
  assert.ok(kv_committed > kv_reserved * 0.9 && kv_committed <= kv_reserved, `${kv_committed} of ${kv_reserved}`);
  session.close();
}

const faces = {
  plain: (isa) => Plain.load(new URL(`plain-${isa}.wasm`, wasm)),
  web: (isa) => Package.load(new URL(`web-${isa}/`, wasm)),
};
const relaxed = hasRelaxedSimd();
const isas = { scalar: ["scalar"], simd128: ["simd128"], "relaxed-simd": relaxedIsas };

assert.ok(cases.length > 20, "cases are missing");
for (const [face, load] of Object.entries(faces)) {
  for (const [built, isa] of Object.entries(isas).flatMap(([built, isas]) => isas.map((isa) => [built, isa]))) {
    if (built === "scalar" && face !== "plain") continue; // shipped as a plain module only
    const skip = built === "relaxed-simd" && !relaxed && "this Node has no relaxed SIMD";
    test(`${face}, built for ${built}, running ${isa}`, { skip }, async () => {
      const starling = await load(built);
      for (const [i, c] of cases.entries()) await check(starling, isa, c, i);
      for (const c of embeddings) await checkEmbeddings(starling, c);
      await checkErrors(starling);
      await checkSaved(starling);
      if (built === "simd128") await checkMemory(starling);
    });
  }
}

test("a panic says what it was", async () => {
  const { exports } = await Plain.load(new URL("plain-simd128.wasm", wasm));
  const plain = new Plain(exports);
  assert.equal(plain.call("starling_panic"), "");
  exports.starling_loader(1n, 0);
  assert.throws(() => exports.starling_crash(), WebAssembly.RuntimeError);
  assert.match(plain.call("starling_panic"), /crash\.rs.*\n?.*crash on request/s);
});

test("modules import nothing they do not say", async () => {
  for (const isa of Object.keys(isas)) {
    const module = await WebAssembly.compile(await readFile(new URL(`plain-${isa}.wasm`, wasm))).catch(() => undefined);
    assert.deepEqual(module ? WebAssembly.Module.imports(module) : [], []);
  }
  const web = await WebAssembly.compile(await readFile(new URL("web-simd128/starling_bg.wasm", wasm)));
  const known = /^(__wbindgen|__wbg)_/;
  for (const { module, name } of WebAssembly.Module.imports(web)) assert.ok(module === "./starling_bg.js" && known.test(name), `${module} ${name}`);
});
