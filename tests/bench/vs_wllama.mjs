// Tokens per second of the package against wllama (llama.cpp in WebAssembly), in the same Chromium on the same model files,
// in turns: prefill of 256 tokens, and 64 tokens decoded after them; the time from a file at hand to the first token; and
// on Linux the peak of the page's processes from before the load, over those of a blank page, with what it is of the
// weights (packed ones where an engine packs them, else the file). Prints a Markdown table of medians. After web/build.sh,
// `npm ci` here and in tests/browser:
//
//     node tests/bench/vs_wllama.mjs MODEL.gguf...
//
// REPEATS says how many turns, 5 by default; THREADS which numbers of threads, "1,2" by default.

import { readFile, stat, writeFile } from "node:fs/promises";
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
const page = await b.browser.newPage();
await page.goto(`${b.server.origin}/tests/browser/blank.html`);
await page.waitForFunction(() => globalThis.Starling);

/** Bytes that the browser's page processes hold; with `peak`, the most since `forgetPeaks`. Linux only. */
const processes = await b.browser.newBrowserCDPSession();
async function renderers() {
  const { processInfo } = await processes.send("SystemInfo.getProcessInfo");
  return processInfo.filter(({ type }) => type === "renderer").map(({ id }) => `/proc/${id}`);
}
async function pageBytes(peak) {
  const field = peak ? /VmHWM:\s+(\d+) kB/ : /VmRSS:\s+(\d+) kB/;
  const read = async (process) => Number(field.exec(await readFile(`${process}/status`, "utf8"))[1]) * 1024;
  return (await Promise.all((await renderers()).map(read))).reduce((a, b) => a + b, 0);
}
async function forgetPeaks() {
  await Promise.all((await renderers()).map((process) => writeFile(`${process}/clear_refs`, "5")));
}
const onLinux = process.platform === "linux";
const blank = onLinux ? await pageBytes(false) : 0;

// each engine: `start(blob)` gives `{ vocabulary, turn(ids, decode), stop() }`; a turn gives milliseconds of both halves
await page.evaluate(async (DECODE) => {
  const { Wllama } = await import("/tests/bench/node_modules/@wllama/wllama/esm/index.js");
  const at = (kind) => `/tests/bench/node_modules/@wllama/wllama/esm/${kind}-thread/wllama.wasm`;
  globalThis.engines = {
    async starling(blob, threads) {
      const model = await Starling.load(blob, { contextLength: 512, batchTokens: 256, threads });
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
    async wllama(blob, threads) {
      const wllama = new Wllama(
        { "single-thread/wllama.wasm": at("single"), "multi-thread/wllama.wasm": at("multi") },
        { suppressNativeLog: true },
      );
      await wllama.loadModel([blob], { n_ctx: 512, n_batch: 256, n_threads: threads });
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
}, DECODE);

const rows = threads.flatMap((n) => [["starling", n], ["wllama", n]]);
console.log(`| model | engine | threads | prefill ${PREFILL} | decode ${DECODE} | load to first token, ms | peak, MB |`);
console.log("|---|---|---|---|---|---|---|");
for (const model of models) {
  const server = await serve(dirname(resolve(model)), { ...isolated, "access-control-allow-origin": "*" });
  const { size } = await stat(model);
  const results = rows.map(() => ({ prefill: [], decode: [], first: [], peak: [] }));
  let backends;
  let weights;
  for (let turn = 0; turn < repeats; turn++) {
    backends = [];
    weights = [];
    for (const [i, [engine, n]] of rows.entries()) {
      if (onLinux) await forgetPeaks();
      const [[prefill, decode], first, backend, packed] = await page.evaluate(
        async ([url, engine, n, turn, PREFILL]) => {
          globalThis.blob ??= { url: undefined };
          if (globalThis.blob.url !== url) globalThis.blob = { url, data: await (await fetch(url)).blob() };
          const began = performance.now();
          const e = await engines[engine](globalThis.blob.data, n);
          const loaded = performance.now() - began;
          const ids = (seed) =>
            Array.from({ length: PREFILL }, (_, i) => (i * 7919 + 13 + seed * 104_729) % e.vocabulary);
          const [first] = await e.turn(ids(1000 + turn));
          const times = await e.turn(ids(turn));
          await e.stop();
          return [times, loaded + first, e.backend, e.weights];
        },
        [`${server.origin}/${basename(model)}`, engine, n, turn, PREFILL],
      );
      results[i].prefill.push((PREFILL / prefill) * 1000);
      results[i].decode.push((DECODE / decode) * 1000);
      results[i].first.push(first);
      if (onLinux) results[i].peak.push((await pageBytes(true)) - blank);
      backends.push(backend);
      weights.push(packed ?? size);
    }
  }
  for (const [i, [engine, n]] of rows.entries()) {
    const { prefill, decode, first, peak } = results[i];
    const most = onLinux
      ? `${(median(peak) / 1e6).toFixed(0)} (${((median(peak) / weights[i]) * 100).toFixed(0)} %)`
      : "-";
    console.log(
      `| ${basename(model)} | ${engine} (${backends[i]}) | ${n} | ${median(prefill).toFixed(1)} | ${median(decode).toFixed(1)} | ${median(first).toFixed(0)} | ${most} |`,
    );
  }
  await server.close();
}
await b.close();
