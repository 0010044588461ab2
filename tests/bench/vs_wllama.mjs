// The package against wllama (llama.cpp in WebAssembly), in the same Chromium on the same model files, interleaved runs:
// prefill of 256 tokens and decode of 64 tokens after them, in tokens per second; time from the browser's cache to the first
// token; on Linux the peak memory of the page's process above that before the load, and its ratio to the weights (packed
// ones where an engine packs them, else the file), with and without file-backed pages, which are mostly browser code that
// all pages share. Prints a Markdown table of medians. After web/build.sh, `npm ci` here and in tests/browser:
//
//     node tests/bench/vs_wllama.mjs MODEL.gguf...
//
// REPEATS: number of runs, default 5. THREADS: numbers of threads, default "1,2".

import { readFile, stat } from "node:fs/promises";
import { basename, dirname, resolve } from "node:path";

import { open } from "../browser/browser.mjs";
import { serve } from "../browser/server.mjs";

const models = process.argv.slice(2);
const repeats = Number(process.env.REPEATS ?? 5);
const threads = (process.env.THREADS ?? "1,2").split(",").map(Number);
const PREFILL = 256;
const DECODE = 64;

const isolated = {
  "cross-origin-opener-policy": "same-origin",
  "cross-origin-embedder-policy": "require-corp",
  "cross-origin-resource-policy": "cross-origin",
};
const median = (values) => values.toSorted((a, b) => a - b)[values.length >> 1];

const b = await open(isolated);

// each engine: `keep(url)` caches a file; `start(url, threads)` returns `{ vocabulary, turn(ids, decode), stop() }`; `turn`
// returns milliseconds of prefill and decode
async function defineEngines(DECODE) {
  const { ModelManager, Wllama } = await import("/tests/bench/node_modules/@wllama/wllama/esm/index.js");
  const at = (kind) => `/tests/bench/node_modules/@wllama/wllama/esm/${kind}-thread/wllama.wasm`;
  const starling = {
    keep: async (url) => (await Starling.load(url)).dispose(),
    async start(url, threads) {
      let from;
      const onProgress = (progress) => ({ from } = progress);
      const model = await Starling.load(url, { contextLength: 512, batchTokens: 256, threads, onProgress });
      if (from !== "cache") throw new Error("not from the cache");
      return {
        vocabulary: model.info.vocabulary,
        backend: model.info.isa,
        weights: (await model.memory()).weights,
        async turn(ids) {
          const { timings } = await model.generate(ids, { maxTokens: DECODE + 1, temperature: 0, ignoreEos: true })
            .result;
          return [timings.promptMs, timings.generationMs];
        },
        stop: () => model.dispose(),
      };
    },
  };
  const wllama = {
    keep: (url) => new ModelManager().getModelOrDownload(url),
    async start(url, threads) {
      const wllama = new Wllama(
        { "single-thread/wllama.wasm": at("single"), "multi-thread/wllama.wasm": at("multi") },
        { suppressNativeLog: true },
      );
      await wllama.loadModelFromUrl(url, { n_ctx: 512, n_batch: 256, n_threads: threads, useCache: true });
      return {
        vocabulary: wllama.getLoadedContextInfo().n_vocab,
        backend: wllama.isMultithread() ? "multi-thread" : "single-thread",
        async turn(ids) {
          await wllama.kvClear();
          await wllama.samplingInit({ temp: 0 });
          const began = performance.now();
          await wllama.decode(ids, {});
          const prefilled = performance.now();
          for (let i = 0; i < DECODE; i++) {
            const { token } = await wllama.samplingSample();
            await wllama.samplingAccept([token]);
            await wllama.decode([token], {});
          }
          return [prefilled - began, performance.now() - prefilled];
        },
        stop: () => wllama.exit(),
      };
    },
  };
  globalThis.engines = { starling, wllama };
}

const keep = ([url, engine]) => engines[engine].keep(url).then(() => {});

/** What is measured in a page: a load, a turn to warm up, a turn. */
async function measure([url, engine, n, turn, PREFILL]) {
  const began = performance.now();
  const e = await engines[engine].start(url, n);
  const loaded = performance.now() - began;
  const ids = (seed) => Array.from({ length: PREFILL }, (_, i) => (i * 7919 + 13 + seed * 104_729) % e.vocabulary);
  const [first] = await e.turn(ids(1000 + turn));
  const times = await e.turn(ids(turn));
  await e.stop();
  return { times, first: loaded + first, backend: e.backend, weights: e.weights };
}

/** A page, in a new context or beside another. */
async function newPage(context) {
  const page = await (context ?? (await b.browser.newContext())).newPage();
  await page.goto(`${b.server.origin}/tests/browser/blank.html`);
  await page.waitForFunction(() => globalThis.Starling);
  await page.evaluate(defineEngines, DECODE);
  return page;
}

/** Resident bytes of the browser's page processes: now, at most, and of files. */
async function resident(processes) {
  const { processInfo } = await processes.send("SystemInfo.getProcessInfo");
  const pages = processInfo.filter(({ type }) => type === "renderer").map(({ id }) => id);
  const sizes = async (id) => {
    const status = await readFile(`/proc/${id}/status`, "utf8");
    const bytes = (name) => Number(new RegExp(`${name}:\\s+(\\d+) kB`).exec(status)[1]) * 1024;
    return { now: bytes("VmRSS"), most: bytes("VmHWM"), files: bytes("RssFile") };
  };
  return new Map(await Promise.all(pages.map(async (id) => [id, await sizes(id)])));
}

/** The peak of a page of its own, as Markdown. */
async function peakOf(size, ...what) {
  if (process.platform !== "linux") return "-";
  const first = await newPage();
  const [url, engine] = what;
  await first.evaluate(keep, [url, engine]);
  const page = await newPage(first.context());
  await first.close();
  const processes = await b.browser.newBrowserCDPSession();
  const before = await resident(processes);
  const { weights = size } = await page.evaluate(measure, what);
  const grown = [...(await resident(processes))]
    .filter(([id]) => before.has(id))
    .map(([id, { most, files }]) => [most - before.get(id).now, files - before.get(id).files]);
  await page.context().close();
  const [most, files] = grown.reduce((a, b) => (a[0] > b[0] ? a : b));
  const text = (bytes) => `${(bytes / 1e6).toFixed(0)} (${((bytes / weights) * 100).toFixed(0)} %)`;
  return `${text(most)}, ${text(most - files)}`;
}

const rows = threads.flatMap((n) => [["starling", n], ["wllama", n]]);
console.log(`| model | engine | threads | prefill ${PREFILL} | decode ${DECODE} | cache to first token, ms | peak, MB, and without files |`);
console.log("|---|---|---|---|---|---|---|");
for (const model of models) {
  const { size } = await stat(model);
  const server = await serve(dirname(resolve(model)), { ...isolated, "access-control-allow-origin": "*" });
  const url = `${server.origin}/${basename(model)}`;
  const results = [];
  for (const row of rows) results.push({ prefill: [], decode: [], first: [], peak: await peakOf(size, url, ...row, 0, PREFILL) });
  const page = await newPage();
  for (const engine of ["starling", "wllama"]) await page.evaluate(keep, [url, engine]);
  for (let turn = 0; turn < repeats; turn++) {
    for (const [i, row] of rows.entries()) {
      const { times, first, backend } = await page.evaluate(measure, [url, ...row, turn, PREFILL]);
      results[i].prefill.push((PREFILL / times[0]) * 1000);
      results[i].decode.push((DECODE / times[1]) * 1000);
      results[i].first.push(first);
      results[i].backend = backend;
    }
  }
  await page.context().close();
  for (const [i, [engine, n]] of rows.entries()) {
    const { prefill, decode, first, peak, backend } = results[i];
    console.log(
      `| ${basename(model)} | ${engine} (${backend}) | ${n} | ${median(prefill).toFixed(1)} | ${median(decode).toFixed(1)} | ${median(first).toFixed(0)} | ${peak} |`,
    );
  }
  await server.close();
}
await b.close();
