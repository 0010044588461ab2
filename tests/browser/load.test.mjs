// Loading and running in a page: downloads, cache, faults, memory, and that the page stays responsive.

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { readFile } from "node:fs/promises";
import { after, before, beforeEach, test } from "node:test";

import { split } from "../node/split.mjs";
import { TINY, blank, damageCache, open } from "./browser.mjs";
import { serve } from "./server.mjs";

const bytes = await readFile(new URL(`../..${TINY}`, import.meta.url));
/** A smaller model. */
const REFERENCE = "/fixtures/reference/gemma-mqa-f16.gguf";
const sha256 = createHash("sha256").update(bytes).digest("hex");

let b;
let page;
before(async () => {
  b = await open();
  page = await blank(b);
  await page.evaluate(() => {
    /** Loads, writes 8 tokens, disposes; what happened, or the error. */
    globalThis.attempt = async (source, options = {}) => {
      const progress = [];
      try {
        const model = await Starling.load(source, { onProgress: (p) => progress.push(p), ...options });
        const { text } = await model.generate("Once upon a time", { maxTokens: 8, temperature: 0 }).result;
        model.dispose();
        return { text, progress, from: progress.at(-1).from };
      } catch (e) {
        return { error: e.name, code: e.code, message: e.message, cause: e.cause?.name, progress };
      }
    };
  });
});
after(() => b.close());
beforeEach(async () => {
  await page.evaluate(() => Starling.cache.clear());
  b.server.requests.length = 0;
});

const attempt = (source, options) => page.evaluate(([s, o]) => attempt(s, o), [source, options]);
const cache = () => page.evaluate(() => Starling.cache.list());
const gets = () => b.server.requests.filter((r) => r.includes(".gguf"));
let expected;

test("progress tells bytes, rate and what remains", async () => {
  const r = await attempt(`${TINY}?slow=5`);
  expected = r.text;
  assert.ok(r.text.length > 10, JSON.stringify(r));
  const { progress } = r;
  assert.ok(progress.length > 2);
  for (const [i, p] of progress.entries()) {
    assert.equal(p.total, bytes.length);
    assert.ok(p.rate > 0 && p.remaining >= 0);
    assert.ok(i === 0 || p.loaded >= progress[i - 1].loaded);
  }
  assert.deepEqual([progress.at(-1).loaded, progress.at(-1).remaining], [bytes.length, 0]);
});

test("every kind of source loads", async () => {
  const texts = await page.evaluate(async (url) => {
    const blob = await (await fetch(url)).blob();
    const buffer = await blob.arrayBuffer();
    const sources = [
      [new URL(url, location.href)],
      [blob],
      [new File([blob], "model.gguf")],
      [buffer],
      [new Uint8Array(buffer)],
      [new Uint8Array(await new Blob(["before", blob, "after"]).arrayBuffer(), 6, blob.size)],
      [blob.stream(), { size: blob.size }],
      [blob.stream()],
      [[url]],
    ];
    const all = [];
    for (const [source, options] of sources) all.push((await attempt(source, options)).text);
    all.push((await attempt(blob.stream(), { size: blob.size, worker: false })).text);
    return all;
  }, TINY);
  assert.deepEqual(
    texts,
    texts.map(() => expected),
  );
});

test("a file whose length nobody says has progress, a tag, and is resumed like any other", async () => {
  // asked by range, all but one say it
  for (const [faults, told] of [
    ["nolength", true],
    ["gzip", true],
    ["gzip&norange", true],
    ["nolength&norange", false],
  ]) {
    const url = `${TINY}?${faults}&slow=5`;
    const { text, progress, ...r } = await attempt(url);
    assert.equal(text, expected, `${faults} ${JSON.stringify(r)}`);
    assert.equal(r.from, "network", faults);
    const before = progress.filter((p) => p.total === Infinity);
    assert.equal(before.length > 2, !told, faults);
    assert.ok(before.every((p) => p.rate > 0 && p.remaining === Infinity));
    const { loaded, total, remaining } = progress.at(-1);
    assert.deepEqual([loaded, total, remaining], [bytes.length, bytes.length, 0], faults);
    assert.equal((await attempt(url, { cache: "revalidate" })).from, "cache", faults);
  }
  for (const faults of ["nolength", "gzip"])
    assert.equal((await attempt(`${TINY}?${faults}&drop=1000000`)).text, expected, faults);
  const broken = await attempt(`${TINY}?nolength&norange&drop=1000000`);
  assert.equal(broken.code, "network");
  assert.match(broken.message, /gguf.* broke after \d+ bytes/);
  const cached = await cache();
  assert.equal(cached.length, 6, "what broke is not cached");
  assert.ok(cached.every(({ tag, size }) => tag && size === bytes.length));
});

test("a cut connection is resumed by range, or from the start where there are no ranges", async () => {
  const r = await attempt(`${TINY}?drop=1000000`);
  assert.equal(r.text, expected, JSON.stringify(r));
  // a connection that is cut before the browser has handed out a byte is begun anew
  const ranged = gets().findIndex((get) => get.includes("bytes="));
  const others = gets().slice(ranged);
  assert.ok(ranged > 0 && others.length >= 3 && others.every((get) => /bytes=\d+-/.test(get)), gets().join());
  assert.equal((await attempt(TINY)).from, "network", "another URL is another entry");

  const whole = await attempt(`${TINY}?drop=1000000&norange`, { cache: "none" });
  assert.equal(whole.code, "network");
  assert.match(whole.message, /of 3972000 bytes/);
});

test("a second load needs no network", async () => {
  assert.equal((await attempt(TINY)).from, "network");
  assert.equal(gets().length, 1);
  const again = await attempt(TINY);
  assert.deepEqual([again.text, again.from, gets().length], [expected, "cache", 1]);
  const [entry] = await cache();
  assert.equal(entry.size, bytes.length);
  const usage = await page.evaluate(() => Starling.cache.usage());
  assert.equal(usage.cached, bytes.length);
  assert.equal(usage.storage, "opfs");
  assert.ok(usage.quota > usage.usage);
  assert.equal(await page.evaluate((url) => Starling.cache.evict(url), entry.url), true);
  assert.deepEqual(await cache(), []);
  assert.equal((await attempt(TINY)).from, "network");
});

test("revalidation fetches what has changed, and only that", async () => {
  let tag = "a";
  await page.route(/tagged\.gguf/, (route) => route.continue({ url: `${b.server.origin}${TINY}?tag=${tag}` }));
  await attempt("/tagged.gguf");
  assert.equal((await attempt("/tagged.gguf", { cache: "revalidate" })).from, "cache");
  tag = "b";
  assert.equal((await attempt("/tagged.gguf")).from, "cache");
  assert.equal((await attempt("/tagged.gguf", { cache: "revalidate" })).from, "network");
  assert.equal((await attempt("/tagged.gguf", { cache: "revalidate" })).from, "cache");
  assert.equal((await attempt("/tagged.gguf", { cache: "reload" })).from, "network");
  await page.unroute(/tagged\.gguf/);
  await page.route(/tagged\.gguf/, (route) => route.abort());
  assert.equal((await attempt("/tagged.gguf", { cache: "revalidate" })).from, "cache", "without network");
  await page.unroute(/tagged\.gguf/);
});

test("what the browser itself has kept is not taken for what the server has", async () => {
  const url = `${REFERENCE}?keep`;
  for (const how of ["reuse", "revalidate", "reload"]) {
    b.server.version += 1;
    // so that there is an older answer to take
    await page.evaluate(async (url) => (await fetch(url)).arrayBuffer(), url);
    b.server.version += 1;
    await page.evaluate(async ([url, cache]) => (await Starling.load(url, { cache })).dispose(), [url, how]);
    assert.equal((await cache())[0].tag, `"${b.server.version}"`, how);
  }
});

test("what was given to load can be given to evict", async () => {
  const body = split(bytes, 2).map(Buffer.from);
  const context = { "access-control-allow-origin": "*" };
  // one that may ask for other servers
  const target = await b.browser.newPage();
  await target.goto(`${b.server.origin}/tests/browser/blank.html`);
  await target.waitForFunction(() => globalThis.Starling);
  await target.evaluate(() =>
    document.head.append(Object.assign(document.createElement("base"), { href: "/models/" })),
  );
  for (const i of [0, 1])
    await target.route(new RegExp(`m-0000${i + 1}-of-00002`), (route) =>
      route.fulfill({ body: body[i], headers: context }),
    );
  await target.route(/tiny\.gguf/, (route) => route.fulfill({ body: bytes, headers: context }));
  const r = await target.evaluate(async () => {
    const left = [];
    for (const source of [
      "tiny.gguf",
      new URL("tiny.gguf", document.baseURI),
      "hf:owner/repo/tiny.gguf",
      "m-00001-of-00002.gguf",
      ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"],
    ]) {
      (await Starling.load(source, { worker: false })).dispose();
      const before = (await Starling.cache.list()).length;
      const evicted = [await Starling.cache.evict(source), await Starling.cache.evict(source)];
      left.push([before, ...evicted, (await Starling.cache.list()).length]);
    }
    return left;
  });
  assert.deepEqual(
    r,
    [1, 1, 1, 2, 2].map((n) => [n, true, false, 0]),
  );
  await target.close();
});

test("a cached file that is damaged, or another than is asked for, is fetched anew", async () => {
  const other = await readFile(new URL(`../..${REFERENCE}`, import.meta.url));
  let path = TINY;
  await page.route(/model\.gguf/, (route) => route.continue({ url: b.server.origin + path }));
  assert.equal((await attempt("/model.gguf", { sha256 })).text, expected);
  path = REFERENCE;
  const changed = createHash("sha256").update(other).digest("hex");
  const r = await attempt("/model.gguf", { sha256: changed });
  assert.deepEqual([r.code, r.from, (await cache())[0].size], [undefined, "network", other.length], JSON.stringify(r));
  assert.equal((await attempt("/model.gguf", { sha256: changed })).from, "cache");
  // a digest that is wrong itself costs nothing that is there
  assert.equal((await attempt("/model.gguf", { sha256: "0".repeat(64) })).code, "checksum");
  assert.equal((await attempt("/model.gguf", { sha256: changed })).from, "cache");
  await page.unroute(/model\.gguf/);

  assert.equal((await attempt(TINY)).from, "network");
  await damageCache(page);
  const again = await attempt(TINY);
  assert.deepEqual([again.text, again.from], [expected, "network"], JSON.stringify(again));
  assert.equal((await attempt(TINY)).from, "cache");
  await damageCache(page);
  await page.route(/starling-tiny/, (route) => route.abort());
  assert.match((await attempt(TINY)).message, /web page/, "without a network, what is wrong is the file");
  await page.unroute(/starling-tiny/);
  assert.equal((await attempt(TINY)).from, "network");
});

test("from another origin that compresses, whose headers the page may not see", async (t) => {
  const cdn = await serve(undefined, { "access-control-allow-origin": "*" });
  t.after(cdn.close);
  const other = await b.browser.newPage();
  await other.goto(`${b.server.origin}/tests/browser/blank.html`);
  await other.waitForFunction(() => globalThis.Starling);
  for (const faults of ["packed", "packed&norange", "gzip&norange", "nolength"]) {
    const text = await other.evaluate(async (url) => {
      const model = await Starling.load(url, { cache: "none" });
      const { text } = await model.generate("Once upon a time", { maxTokens: 8, temperature: 0 }).result;
      model.dispose();
      return text;
    }, `${cdn.origin}${TINY}?${faults}`);
    assert.equal(text, expected, faults);
  }
  // nor is the compressed length taken for a change
  const from = await other.evaluate(async (url) => {
    const from = [];
    for (const cache of ["reload", "revalidate"]) {
      let last;
      (await Starling.load(url, { cache, onProgress: (p) => (last = p.from) })).dispose();
      from.push(last);
    }
    return from;
  }, `${cdn.origin}${TINY}?packed`);
  assert.deepEqual(from, ["network", "cache"]);
  await other.close();
});

test("headers go with every request for a file", async () => {
  const asked = [];
  await page.route(/private\.gguf/, (route) => {
    const { authorization, range } = route.request().headers();
    asked.push([route.request().method(), authorization, range]);
    if (authorization === "Bearer key") return route.continue({ url: `${b.server.origin}${TINY}?drop=2000000` });
    return route.fulfill({ status: 401, body: "no" });
  });
  assert.match((await attempt("/private.gguf")).message, /401/);
  asked.length = 0;
  const headers = { authorization: "Bearer key" };
  assert.equal((await attempt("/private.gguf", { headers })).text, expected);
  assert.equal((await attempt("/private.gguf", { headers, cache: "revalidate" })).from, "cache");
  assert.ok(asked.length >= 3 && asked.some(([, , range]) => range) && asked.some(([method]) => method === "HEAD"));
  assert.ok(asked.every(([, authorization]) => authorization === "Bearer key"));
  await page.unroute(/private\.gguf/);
});

test("the Cache API serves where there is no file system", async () => {
  const other = await b.page("/tests/browser/blank.html");
  const result = await other.evaluate(async (url) => {
    delete FileSystemFileHandle.prototype.createWritable;
    const froms = [];
    // inline, as a worker has a file system of its own
    for (let i = 0; i < 2; i++) {
      const model = await Starling.load(url, { worker: false, onProgress: (p) => (froms[i] = p.from) });
      model.dispose();
    }
    const entries = await Starling.cache.list();
    const { storage } = await Starling.cache.usage();
    await Starling.cache.clear();
    return { froms, storage, sizes: entries.map((e) => e.size), after: (await Starling.cache.list()).length };
  }, TINY);
  assert.deepEqual(result, { froms: ["network", "cache"], storage: "cache-api", sizes: [bytes.length], after: 0 });
  await other.close();
});

test("what is wrong has a code, and leaves nothing in the cache", async () => {
  const cases = [
    [`${TINY}?truncate=3000000`, {}, "model", /./],
    [`${TINY}?truncate=100`, {}, "model", /./],
    [`${TINY}?truncate=0`, {}, "model", /./],
    ["/LICENSE-MIT", {}, "model", /magic/],
    [`${TINY}?html`, {}, "model", /web page/],
    ["/nothing.gguf", {}, "network", /404/],
    ["/unreachable.gguf", {}, "network", /./],
    [TINY, { sha256: "0".repeat(64) }, "checksum", /SHA-256/],
    [TINY, { kvType: "f8" }, "request", /f8/],
    [TINY, { sha256: ["a", "b"] }, "request", /2 digests/],
    ["http://", {}, "request", /URL/],
    [[], {}, "request", /empty/],
  ];
  await page.route(/unreachable/, (route) => route.abort());
  for (const [source, options, code, message] of cases) {
    const r = await attempt(source, options);
    assert.deepEqual([r.error, r.code], ["StarlingError", code], `${source} ${JSON.stringify(r)}`);
    assert.match(r.message, message);
    assert.deepEqual(await cache(), [], `${source} is cached`);
  }
  assert.equal((await attempt("/unreachable.gguf")).cause, "TypeError", "it crosses from the worker");
  assert.equal((await attempt(TINY, { sha256: sha256.toUpperCase() })).text, expected);
});

test("a module that does not come, or is none, has a code and its URL", async () => {
  for (const [wasm, message, cause] of [
    ["/web/demo/index.html", /index\.html is not a WebAssembly module/, "CompileError"],
    ["/LICENSE-MIT", /LICENSE-MIT is not a WebAssembly module/, "CompileError"],
    ["/web/wasm/simd128.wasm?drop=100000", /simd128\.wasm\?drop/, "TypeError"],
    ["/nothing.wasm", /nothing\.wasm: 404/, undefined],
    ["/unreachable.wasm", /unreachable\.wasm: /, "TypeError"],
  ]) {
    const r = await attempt(TINY, { wasm });
    assert.deepEqual([r.error, r.code, r.cause], ["StarlingError", "network", cause], `${wasm} ${JSON.stringify(r)}`);
    assert.match(r.message, message);
  }
  const old = await b.page("/tests/browser/blank.html");
  await old.waitForFunction(() => globalThis.Starling);
  const codes = await old.evaluate(async (url) => {
    const validate = WebAssembly.validate;
    // an engine without relaxed SIMD
    WebAssembly.validate = (bytes) => !bytes.toString().includes("253,128,2") && validate(bytes);
    const said = (options) => Starling.load(url, options).catch(({ code, message }) => [code, message]);
    const codes = [await said({ isa: "relaxed-simd" }), await said({ isa: "relaxed-i16" })];
    WebAssembly.validate = validate;
    delete globalThis.Worker;
    return [...codes, await said({})];
  }, TINY);
  assert.deepEqual(
    codes.map(([code]) => code),
    ["unsupported", "unsupported", "unsupported"],
  );
  assert.match(codes[1][1], /relaxed-i16/);
  assert.match(codes[2][1], /no workers/);
  await old.close();
});

test("a full disk is a quota error", async () => {
  const other = await b.page("/tests/browser/blank.html", {});
  await other.waitForFunction(() => globalThis.Starling);
  const session = await other.context().newCDPSession(other);
  await session.send("Storage.overrideQuotaForOrigin", { origin: b.server.origin, quotaSize: 2_000_000 });
  const r = await other.evaluate(async (url) => {
    const error = await Starling.load(url).catch(({ code, message }) => ({ code, message }));
    const entries = await Starling.cache.list();
    (await Starling.load(url, { cache: "none" })).dispose();
    return { error, entries };
  }, TINY);
  assert.equal(r.error.code, "quota");
  assert.match(r.error.message, /3972000 bytes/);
  assert.deepEqual(r.entries, []);
  // parts of which each would fit
  await session.send("Storage.overrideQuotaForOrigin", { origin: b.server.origin, quotaSize: 3_000_000 });
  const parts = split(bytes, 2).map(Buffer.from);
  for (const i of [0, 1])
    await other.route(new RegExp(`q-0000${i + 1}-of-00002`), (route) => route.fulfill({ body: parts[i] }));
  const split2 = await other.evaluate(() =>
    Starling.load("/q-00001-of-00002.gguf").catch(({ code, message }) => ({ code, message })),
  );
  assert.equal(split2.code, "quota");
  assert.match(split2.message, new RegExp(`${parts[0].length + parts[1].length} with the model's other parts`));
  await other.context().close();
});

test("an aborted download stops, and leaves nothing", async () => {
  const r = await page.evaluate(async (url) => {
    const abort = new AbortController();
    setTimeout(() => abort.abort(), 200);
    const began = performance.now();
    const result = await attempt(url, { signal: abort.signal });
    return { ...result, ms: performance.now() - began, already: await attempt(url, { signal: AbortSignal.abort() }) };
  }, `${TINY}?slow=50`);
  assert.deepEqual([r.error, r.already.error], ["AbortError", "AbortError"]);
  assert.ok(r.ms < 1500, `${r.ms} ms`);
  assert.deepEqual(await cache(), []);
});

test("a model beyond 4 GiB gets the module with memory64, or is refused before it is read", async () => {
  /** As {@link attempt}, of a file that is said to be longer than it is; and the modules that were fetched. */
  const large = async (options) => {
    const target = await blank(b);
    b.server.requests.length = 0;
    const error = await target.evaluate(
      async ([url, options]) => {
        const { body } = await fetch(url);
        return Starling.load(body, { size: 5e9, ...options }).catch(({ code, message }) => ({ code, message }));
      },
      [TINY, options],
    );
    await target.close();
    return { ...error, modules: b.server.requests.filter((r) => r.endsWith(".wasm")).map((r) => r.split("/").at(-1)) };
  };
  const chosen = await large({});
  assert.deepEqual([chosen.code, chosen.modules], ["model", ["relaxed-simd.wasm", "simd128-memory64.wasm"]]);
  assert.match(chosen.message, new RegExp(`^stream: .*${bytes.length}`));
  for (const [options, code, message, modules] of [
    [{ memory64: true }, "model", /^stream: /, ["simd128-memory64.wasm"]],
    [{ memory64: false }, "memory", /5000000000 bytes.*option memory64 is false/, ["relaxed-simd.wasm"]],
    [{ wasm: "/web/wasm/simd128.wasm" }, "memory", /room for 3600000000/, ["simd128.wasm"]],
    [{ wasm: "/web/wasm/simd128.wasm", memory64: true }, "request", /has 32-bit addresses/, ["simd128.wasm"]],
    [{ size: 2e10 }, "memory", /room for 15500000000/, ["relaxed-simd.wasm"]],
    [{ isa: "relaxed-simd" }, "unsupported", /have simd128 only/, ["relaxed-simd.wasm"]],
  ]) {
    const r = await large(options);
    assert.deepEqual([r.code, r.modules], [code, modules], JSON.stringify(r));
    assert.match(r.message, message);
  }
  assert.equal((await attempt(TINY, { wasm: "/web/wasm/simd128-memory64.wasm" })).text, expected);

  const old = await blank(b);
  const refused = await old.evaluate(async (url) => {
    const { validate } = WebAssembly;
    // an engine without memory64: tables and memories have no such flag
    WebAssembly.validate = (bytes) => !bytes.toString().endsWith("5,3,1,4,1") && validate(bytes);
    const { body } = await fetch(url);
    const [large, forced] = [Starling.load(body, { size: 5e9 }), Starling.load(url, { memory64: true })];
    return Promise.all([large, forced].map((load) => load.catch(({ code, message }) => [code, message])));
  }, TINY);
  assert.deepEqual(refused.map(([code]) => code), ["memory", "unsupported"]);
  assert.match(refused[0][1], /this runtime has no memory64 for larger models: Chrome and Edge 133/);
  await old.close();
});

test("an abort is heard at every stage of loading", async () => {
  const target = await blank(b);
  const run = (f) =>
    target.evaluate(
      async ([url, f]) => {
        globalThis.cancelled = 0;
        // one that never says more
        const stream = () => new ReadableStream({ cancel: () => void (cancelled += 1) });
        const began = performance.now();
        const load = (source, options) =>
          Starling.load(source, { signal: AbortSignal.timeout(500), ...options }).then(
            (model) => model.dispose(),
            (e) => e.name,
          );
        const name = await eval(f)(load, stream, url);
        const ms = performance.now() - began;
        // from a worker this takes its time
        for (let i = 0; i < 50 && cancelled === 0 && /stream\(\)/.test(f); i++)
          await new Promise((resolve) => setTimeout(resolve, 20));
        return { name, ms, cancelled };
      },
      [TINY, String(f)],
    );
  const soon = (r, name, cancelled) => {
    assert.deepEqual([r.name, r.cancelled], [name, cancelled]);
    assert.ok(r.ms < 2000, `${r.ms} ms`);
  };
  // compiled once, that what follows gets as far as it shall
  await target.evaluate(async (url) => (await Starling.load(url, { cache: "none" })).dispose(), TINY);
  soon(await run((load, _, url) => load(url, { wasm: "/web/wasm/simd128.wasm?slow=200" })), "TimeoutError", 0);
  soon(await run((load, stream) => load(stream(), { worker: false })), "TimeoutError", 1);
  soon(await run((load, stream) => load(stream(), { worker: false, size: 1e6 })), "TimeoutError", 1);
  soon(await run((load, stream) => load(stream())), "TimeoutError", 1);
  // when the last byte was told of
  for (const worker of [true, false]) {
    await target.evaluate((worker) => (globalThis.worker = worker), worker);
    const last = (load, _, url) => {
      const abort = new AbortController();
      const onProgress = ({ loaded, total }) => loaded === total && abort.abort();
      return load(url, { signal: abort.signal, onProgress, worker });
    };
    await page.evaluate(() => Starling.cache.clear());
    soon(await run(last), "AbortError", 0);
  }
  // inline; a worker may be done before it hears of it
  assert.deepEqual(await cache(), []);
  // where streams cannot be sent to workers
  await target.evaluate(() => {
    const { postMessage } = Worker.prototype;
    Worker.prototype.postMessage = function (message, transfer) {
      if (transfer?.length > 0) throw new DOMException("cannot be cloned", "DataCloneError");
      postMessage.call(this, message);
    };
  });
  soon(await run((load, stream) => load(stream(), { size: 1e6 })), "TimeoutError", 1);
  assert.equal(
    await target.evaluate(async (url) => {
      const model = await Starling.load((await fetch(url)).body);
      return (await model.generate("Once upon a time", { maxTokens: 8, temperature: 0 }).result).text;
    }, TINY),
    expected,
  );
  // errors that nobody caught would come late
  await target.waitForTimeout(2500);
  assert.equal(target.workers().length, 1, "workers are left");
  await target.close();
});

test("an aborted answer stops within a token and makes room for the next", async () => {
  const r = await page.evaluate(async (url) => {
    const model = await Starling.load(url, { cache: "none" });
    const abort = new AbortController();
    const generation = model.generate("Once upon a time", { maxTokens: 450, ignoreEos: true, signal: abort.signal });
    let pieces = 0;
    let error;
    try {
      for await (const _ of generation) if (++pieces === 5) abort.abort();
    } catch (e) {
      error = e.name;
    }
    // leaving the loop stops too
    for await (const _ of model.generate("Once", { maxTokens: 450, ignoreEos: true })) break;
    const { usage } = await model.generate("The end", { maxTokens: 4, ignoreEos: true }).result;
    const memory = await model.memory();
    model.dispose();
    const late = await model.generate("Once").result.catch((e) => e.code);
    return { pieces, error, usage, inUse: memory.kvInUse, late, result: await generation.result.catch((e) => e.name) };
  }, TINY);
  assert.deepEqual(r, {
    pieces: 5,
    error: "AbortError",
    usage: { ...r.usage, completionTokens: 4 },
    inUse: 0,
    late: "disposed",
    result: "AbortError",
  });
});

test("several answers at once have the text that each has alone", async () => {
  const r = await page.evaluate(async (url) => {
    const model = await Starling.load(url, { sequences: 3 });
    const requests = Array.from({ length: 7 }, (_, i) => [
      "The " + "little ".repeat(i) + "dog",
      { maxTokens: 20, seed: i },
    ]);
    const alone = [];
    for (const [prompt, options] of requests) alone.push((await model.generate(prompt, options).result).text);
    const together = await Promise.all(
      requests.map(async ([prompt, options]) => (await model.generate(prompt, options).result).text),
    );
    model.dispose();
    return { alone, together };
  }, TINY);
  assert.deepEqual(r.together, r.alone);
});

test("a crash names itself, and a new model can be loaded", async () => {
  const r = await page.evaluate(async (url) => {
    const model = await Starling.load(url);
    const generation = model.generate("Once", { maxTokens: 400, ignoreEos: true });
    const crash = await model.crash().catch((e) => [e.code, e.message]);
    const running = await generation.result.catch((e) => e.code);
    const next = await model.memory().catch((e) => e.code);
    model.dispose();
    return { crash, running, next, after: (await attempt(url)).text };
  }, TINY);
  assert.equal(r.crash[0], "crashed");
  assert.match(r.crash[1], /crash on request/);
  assert.deepEqual([r.running, r.next, r.after], ["crashed", "crashed", expected]);
});

test("a worker that fails ends what it was asked for", async () => {
  const other = await b.page("/tests/browser/blank.html", {});
  await other.waitForFunction(() => globalThis.Starling);
  const ended = other.evaluate(async (url) => {
    const model = await Starling.load(url);
    const asked = [];
    for await (const _ of model.generate("Once", { maxTokens: 2 })) break;
    globalThis.ready = true;
    // however fast it writes, one of them is under way
    while (asked.length === 0) await model.generate("Once", { maxTokens: 500 }).result.catch((e) => asked.push(e.code));
    asked.push(await model.generate("Once").result.catch((e) => e.code));
    asked.push(await model.memory().catch((e) => e.code));
    model.dispose();
    return asked;
  }, TINY);
  await other.waitForFunction(() => globalThis.ready);
  const [worker] = other.workers();
  // evaluated in the worker, where nothing catches it
  const fail = () => {
    throw new Error("lost");
  };
  await worker.evaluate(`setTimeout(${fail}) && 0`).catch(() => {});
  assert.deepEqual(await ended, ["crashed", "crashed", "crashed"]);
  await other.context().close();
});

test("two tabs load the same model at once", async () => {
  const other = await blank(b);
  const run = (target) =>
    target.evaluate(async (url) => {
      const model = await Starling.load(url);
      const { text } = await model.generate("Once upon a time", { maxTokens: 8, temperature: 0 }).result;
      model.dispose();
      return text;
    }, `${TINY}?slow=2`);
  assert.deepEqual(await Promise.all([run(page), run(other)]), [expected, expected]);
  assert.equal((await cache()).length, 1);
  await other.close();
});

/** Names of the cache's files, without those where Chromium writes what is put in their place later. */
const files = () =>
  page.evaluate(async () => {
    const directory = await (await navigator.storage.getDirectory()).getDirectoryHandle("starling-models");
    return (await Array.fromAsync(directory.keys())).filter((name) => !name.endsWith(".crswap"));
  });

test("what a tab left that ended before its time goes, and not what another one is writing", async () => {
  const leave = () =>
    page.evaluate(async () => {
      const directory = await (await navigator.storage.getDirectory()).getDirectoryHandle("starling-models");
      for (const name of ["0".repeat(64) + ".gguf", "1".repeat(64) + ".json", "other"]) {
        const stream = await (await directory.getFileHandle(name, { create: true })).createWritable();
        await stream.write("left");
        await stream.close();
      }
    });
  await leave();
  const loading = attempt(`${TINY}?slow=10`);
  while (!(await files()).some((name) => !/^(0+\.gguf|1+\.json|other)$/.test(name))) await page.waitForTimeout(10);
  assert.equal((await page.evaluate(() => Starling.cache.usage())).cached, 0);
  assert.deepEqual(await cache(), []);
  assert.equal((await files()).length, 2, "what is written stays, and what is none of the cache's");
  await leave();
  await page.evaluate(() => Starling.cache.clear());
  assert.equal((await files()).length, 1, "what is written stays");
  assert.equal((await loading).text, expected);
  assert.equal((await cache()).length, 1);
  assert.equal((await files()).length, 2);
  await page.evaluate(() => Starling.cache.clear());
  assert.deepEqual(await files(), []);
});

test("two tabs with two versions: the cache has one of them, and says which", async () => {
  const other = await blank(b);
  const version = bytes.indexOf("Starling Tiny");
  for (const [i, target] of [page, other].entries()) {
    const body = Buffer.from(bytes);
    body[version] += i;
    await target.route(/versions\.gguf/, (route) => route.fulfill({ body, headers: { etag: `"${i}"` } }));
    // the first tab is slow between the data and what is said of it
    await target.evaluate((slow) => {
      const { createWritable } = FileSystemFileHandle.prototype;
      FileSystemFileHandle.prototype.createWritable = async function () {
        if (slow && this.name.endsWith(".json")) {
          globalThis.between = true;
          await new Promise((resolve) => setTimeout(resolve, 1000));
        }
        return createWritable.call(this);
      };
    }, i === 0);
  }
  const load = (target) =>
    target.evaluate(async () => (await Starling.load("/versions.gguf", { worker: false, cache: "reload" })).dispose());
  const first = load(page);
  await page.waitForFunction(() => globalThis.between);
  await Promise.all([first, load(other)]);
  const [{ tag }] = await cache();
  const name = await page.evaluate(async () => (await Starling.load("/versions.gguf", { worker: false })).info.name);
  assert.equal(name, { '"0"': "Starling Tiny", '"1"': "Ttarling Tiny" }[tag]);
  await Promise.all([page.unroute(/versions\.gguf/), other.close()]);
  await page.reload();
});

test("a split model is cached whole or not at all", async () => {
  const target = await blank(b);
  const parts = split(bytes, 2).map(Buffer.from);
  for (const i of [0, 1])
    await target.route(new RegExp(`m-0000${i + 1}-of-00002`), (route) => route.fulfill({ body: parts[i] }));
  const r = await target.evaluate(async () => {
    const { createWritable } = FileSystemFileHandle.prototype;
    let jsons = 0;
    FileSystemFileHandle.prototype.createWritable = async function () {
      if (this.name.endsWith(".json") && ++jsons === 2) throw new DOMException("full", "QuotaExceededError");
      return createWritable.call(this);
    };
    return Starling.load("/m-00001-of-00002.gguf", { worker: false }).catch((e) => [e.code, e.cause.name]);
  });
  assert.deepEqual(r, ["quota", "QuotaExceededError"]);
  assert.deepEqual(await files(), []);
  await target.close();
});

test("reads go on when garbage is collected meanwhile", { timeout: 120_000 }, async () => {
  const text = (cache) =>
    page.evaluate(
      async ([url, cache]) => {
        const timer = setInterval(gc, 5);
        const model = await Starling.load(url, { cache, worker: false });
        clearInterval(timer);
        const { text } = await model.generate("Once upon a time", { maxTokens: 8, temperature: 0 }).result;
        model.dispose();
        return text;
      },
      [TINY, cache],
    );
  for (const cache of ["none", ...Array(10).fill("reuse")]) assert.equal(await text(cache), expected);
});

test("loading and disposing a hundred times does not grow", async () => {
  const size = async () => {
    const session = await page.context().newCDPSession(page);
    await session.send("HeapProfiler.collectGarbage");
    const { usedSize } = await session.send("Runtime.getHeapUsage");
    await session.detach();
    return usedSize;
  };
  const cycles = (n, options) =>
    page.evaluate(
      async ([url, n, options]) => {
        let module;
        for (let i = 0; i < n; i++) {
          const model = await Starling.load(url, options);
          await model.generate("Once", { maxTokens: 1 }).result;
          ({ module } = await model.memory());
          model.dispose();
        }
        return module;
      },
      [TINY, n, options],
    );
  await cycles(5, {});
  const before = await size();
  await cycles(50, {});
  const grown = (await size()) - before;
  assert.ok(grown < 500_000, `the page grew by ${grown} bytes`);
  // inline too, where each model has an instance of the module
  const small = await cycles(5, { worker: false });
  const large = await cycles(50, { worker: false });
  assert.ok(large - small < bytes.length, `the module grew from ${small} to ${large} bytes`);
  // workers end some time after they are told to
  for (let i = 0; i < 50 && page.workers().length > 0; i++) await page.waitForTimeout(100);
  assert.equal(page.workers().length, 0, "workers are left");
});

test("the page stays responsive while the model loads and writes", async () => {
  const longest = await page.evaluate(async (url) => {
    let longest = 0;
    const observer = new PerformanceObserver((list) =>
      list.getEntries().forEach((e) => (longest = Math.max(longest, e.duration))),
    );
    observer.observe({ type: "longtask" });
    const model = await Starling.load(url);
    const output = document.body.appendChild(document.createElement("p"));
    for await (const piece of model.generate("Once upon a time", { maxTokens: 300, ignoreEos: true }))
      output.append(piece);
    await new Promise((resolve) => setTimeout(resolve, 200));
    model.dispose();
    observer.disconnect();
    return longest;
  }, `${TINY}?again`);
  // tasks of 50 ms and more are reported
  assert.equal(longest, 0, `a task of ${longest} ms`);
});
