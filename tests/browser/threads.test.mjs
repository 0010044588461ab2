// Several threads in headless Chromium, on pages that are cross-origin isolated: after web/build.sh.

import assert from "node:assert/strict";
import { existsSync } from "node:fs";
import { readFile, readdir } from "node:fs/promises";
import { after, before, test } from "node:test";

import { TINY, blank, damageCache, native, open } from "./browser.mjs";
import { checkCases, checkEmbeddings } from "./goldens.mjs";

let b;
before(
  async () =>
    (b = await open({
      "cross-origin-opener-policy": "same-origin",
      "cross-origin-embedder-policy": "require-corp",
      "cross-origin-resource-policy": "same-origin",
    })),
);
after(() => b.close());

const STORY = native("Once upon a time", "-n60");

test("memory64, 3 threads", { timeout: 300_000 }, async () => {
  const page = await blank(b);
  const build = { isa: "simd128", threads: 3, memory64: true };
  await checkCases(page, build, build);
  await checkEmbeddings(page, build);
  await page.close();
});

for (const isa of ["simd128", "relaxed-simd"]) {
  for (const threads of [1, 2, 3]) {
    test(`${isa}, ${threads} threads`, { timeout: 300_000 }, async () => {
      const page = await blank(b);
      // of one thread too it is the module with threads that is looked at
      const wasm = `/web/wasm/${isa}-threads.wasm`;
      await checkCases(page, { threads, isa, ...(threads === 1 && { wasm }) }, { isa, threads });
      if (threads === 3) await checkEmbeddings(page, { threads, isa });
      await page.close();
    });
  }
}

/** Threads of workers in the browser's processes. */
async function workers() {
  const session = await b.browser.newBrowserCDPSession();
  const { processInfo } = await session.send("SystemInfo.getProcessInfo");
  await session.detach();
  const tasks = processInfo.map(async ({ id }) => {
    const tasks = await readdir(`/proc/${id}/task`).catch(() => []);
    return Promise.all(tasks.map((task) => readFile(`/proc/${id}/task/${task}/comm`, "utf8").catch(() => "")));
  });
  return (await Promise.all(tasks)).flat().filter((name) => name.trim() === "DedicatedWorker").length;
}

/** Waits until there are so many. */
async function until(count) {
  let found;
  for (let i = 0; i < 600 && (found = await workers()) !== count; i++)
    await new Promise((resolve) => setTimeout(resolve, 50));
  assert.equal(found, count);
}

test("as many as there are, if none are asked for; one where there is no worker", async () => {
  const page = await blank(b);
  const got = await page.evaluate(async (url) => {
    const said = [];
    for (const options of [{}, { threads: 5 }, { worker: false }, { worker: false, threads: 2 }]) {
      const model = await Starling.load(url, options);
      said.push(model.info.threads);
      model.dispose();
    }
    const { sharedMemory, cpus } = Starling.features();
    const wrong = await Promise.all([0, 65, 1.5].map((threads) => Starling.load(url, { threads }).catch((e) => e.code)));
    return { said, sharedMemory, cpus, wrong };
  }, TINY);
  const some = Math.min(got.cpus <= 4 ? got.cpus : Math.ceil(got.cpus / 2), 8);
  assert.deepEqual(got, { ...got, said: [some, 5, 1, 1], sharedMemory: true, wrong: ["request", "request", "request"] });
  await page.close();
});

test("memory grows while threads use it, and all see it", async () => {
  const page = await blank(b);
  const got = await page.evaluate(async (url) => {
    const sizes = [];
    const hashes = [];
    const ids = Array.from({ length: 3000 }, (_, i) => (i * 37) % 300);
    for (const threads of [1, 3]) {
      const model = await Starling.load(url, { threads, kvType: "f32", contextLength: 4096 });
      sizes.push((await model.memory()).module);
      hashes.push(await model.logitsSha256(ids));
      const { text } = await model.generate(ids, { maxTokens: 30, temperature: 0 }).result;
      hashes.push(text);
      sizes.push((await model.memory()).module);
      model.dispose();
    }
    return { sizes, hashes };
  }, TINY);
  assert.deepEqual(got.hashes.slice(0, 2), got.hashes.slice(2));
  assert.ok(got.sizes[3] > got.sizes[2] + (4 << 20), `${got.sizes}`);
  await page.close();
});

test("threads end with the model, and after 20 models there are none", { skip: !existsSync("/proc") }, async () => {
  const page = await blank(b);
  await until(0);
  const load = () =>
    page.evaluate(async (url) => {
      globalThis.model = await Starling.load(url, { threads: 3 });
    }, TINY);
  const dispose = () => page.evaluate(() => model.dispose());
  await load();
  await until(3);
  await dispose();
  await until(0);
  for (let i = 0; i < 20; i++) {
    await load();
    // in the middle of an answer too
    if (i % 2) await page.evaluate(() => void model.generate("Once upon a time", { ignoreEos: true }));
    await dispose();
  }
  await until(0);
  // of a model that is fetched anew as what was cached is damaged, no more than asked for
  await damageCache(page);
  await load();
  assert.equal(await page.evaluate(() => model.info.threads), 3);
  await until(3);
  await dispose();
  await until(0);
  // and with the page
  await load();
  await until(3);
  await page.close();
  await until(0);
});

test("a load that fails or is aborted leaves no threads", { skip: !existsSync("/proc") }, async () => {
  const page = await blank(b);
  const got = await page.evaluate(async (url) => {
    const codes = [];
    const ends = async (options, path = url) =>
      codes.push(await Starling.load(path, { threads: 3, ...options }).catch(({ code, name }) => (name === "StarlingError" ? code : name)));
    await ends({ cache: "none" }, `${url}?truncate=100000`);
    await ends({ cache: "none", signal: AbortSignal.timeout(200) }, `${url}?slow=20`);
    return codes;
  }, TINY);
  assert.deepEqual(got, ["model", "TimeoutError"]);
  await until(0);
  await page.close();
});

test("a crash of a thread is a crash of the model, and the next model is sound", async () => {
  const page = await blank(b);
  const got = await page.evaluate(async (url) => {
    const model = await Starling.load(url, { threads: 3 });
    const generation = model.generate("Once upon a time", { maxTokens: 400, ignoreEos: true });
    for await (const _ of generation) break;
    const running = model.generate("Once upon a time", { maxTokens: 400, ignoreEos: true });
    const ended = running.result.catch((e) => e.code);
    const crash = await model.crash(true).catch((e) => [e.code, e.message]);
    const later = await model.memory().catch((e) => e.code);
    const again = await model.generate("x").result.catch((e) => e.code);
    model.dispose();
    const next = await Starling.load(url, { threads: 3 });
    const { text } = await next.generate("Once upon a time", { maxTokens: 60, seed: 0 }).result;
    next.dispose();
    return { ended: await ended, crash, later, again, text };
  }, TINY);
  const { crash, ...rest } = got;
  assert.deepEqual(rest, { ended: "crashed", later: "crashed", again: "crashed", text: STORY });
  assert.equal(crash[0], "crashed");
  assert.match(crash[1], /crash on request/);
  if (existsSync("/proc")) await until(0);
  await page.close();
});

test("the page stays responsive, and two models share the machine", async () => {
  const page = await blank(b);
  const got = await page.evaluate(async (url) => {
    const models = await Promise.all([2, 3].map((threads) => Starling.load(url, { threads, sequences: 2 })));
    const longest = [];
    const observer = new PerformanceObserver((list) => longest.push(...list.getEntries().map((e) => e.duration)));
    observer.observe({ type: "longtask" });
    const answers = models.flatMap((m) => [0, 1].map(() => m.generate("Once upon a time", { maxTokens: 60, seed: 0 }).result));
    const texts = (await Promise.all(answers)).map((a) => a.text);
    observer.disconnect();
    for (const model of models) model.dispose();
    return { texts, longest: Math.max(0, ...longest) };
  }, TINY);
  assert.deepEqual(got.texts, [STORY, STORY, STORY, STORY]);
  assert.ok(got.longest < 50, `a task of ${got.longest} ms`);
  await page.close();
});
