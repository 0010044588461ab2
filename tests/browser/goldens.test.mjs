// The pinned results in headless Chromium, through the package, in every build: after web/build.sh.

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { after, before, test } from "node:test";

import { TINY, blank, native, open } from "./browser.mjs";

const fixtures = new URL("../../fixtures/", import.meta.url);
const json = async (path) => JSON.parse(await readFile(new URL(path, fixtures), "utf8"));
// those made of another file are for the engine's own tests
const cases = (await json("goldens/cases.json")).cases.filter((c) => !c.quantise);
const { cases: embeddings } = await json("goldens/embeddings.json");
const pinned = (name) => json(`goldens/pinned/${name}.json`);

let b;
before(async () => (b = await open()));
after(() => b.close());

/** Options of a case in the package's names; what a case does not give is off. */
function options({ max_tokens, sampling: s }) {
  const dry = s.dry && {
    multiplier: s.dry.multiplier,
    base: s.dry.base,
    allowedLength: s.dry.allowed_length,
    lastN: s.dry.last_n,
    breakers: s.dry.breakers,
  };
  return {
    maxTokens: max_tokens,
    logitBias: s.logit_bias,
    repeatPenalty: s.repeat_penalty ?? 1,
    repeatLastN: s.repeat_last_n,
    frequencyPenalty: s.frequency_penalty,
    presencePenalty: s.presence_penalty,
    ...(dry && { dry }),
    topK: s.top_k ?? 0,
    typicalP: s.typical_p ?? 1,
    topP: s.top_p ?? 1,
    minP: s.min_p ?? 0,
    temperature: s.temperature,
    seed: s.seed ?? 0,
  };
}

for (const isa of ["simd128", "relaxed-simd"]) {
  for (const worker of [true, false]) {
    test(`${isa}, ${worker ? "in a worker" : "inline"}`, { timeout: 300_000 }, async () => {
      const page = await blank(b);
      assert.ok(cases.length > 20, "cases are missing");
      for (const [i, c] of cases.entries()) {
        const want = await pinned(c.name);
        const load = {
          isa,
          worker,
          kvType: c.kv_type,
          contextLength: want.prompt_ids.length + c.max_tokens,
          batchTokens: [64, 7, 512][i % 3],
          cache: "none",
        };
        const got = await page.evaluate(
          async ([url, load, prompt, options]) => {
            const model = await Starling.load(url, load);
            const { ids } = await model.tokenize(prompt);
            const logits_sha256 = await model.logitsSha256(ids);
            const { text, tokens } = await model.generate(prompt, options).result;
            model.dispose();
            return { isa: model.info.isa, prompt_ids: ids, logits_sha256, ids: tokens.map((t) => t.id), text };
          },
          [`/fixtures/${c.model}`, load, c.prompt, options(c)],
        );
        assert.deepEqual(got, { isa, ...want }, c.name);
      }
      for (const c of worker ? embeddings : []) {
        const got = await page.evaluate(
          async ([url, isa, texts]) => {
            const model = await Starling.load(url, { isa, cache: "none", contextLength: 512 });
            const vectors = [];
            for (const text of texts) vectors.push(new Uint8Array((await model.embed(text)).buffer));
            const refused = await model.generate("x").result.catch((e) => e.code);
            model.dispose();
            const hash = await crypto.subtle.digest("SHA-256", await new Blob(vectors).arrayBuffer());
            return [
              Array.from(new Uint8Array(hash), (b) => b.toString(16).padStart(2, "0")).join(""),
              model.info.generates,
              refused,
            ];
          },
          [`/fixtures/${c.model}`, isa, c.texts],
        );
        assert.equal(got[0], (await pinned(`embedding-${c.name}`)).vectors_sha256, c.name);
        if (!got[1]) assert.equal(got[2], "request");
      }
      await page.close();
    });
  }
}

test("random requests with random options have the text of the command", async () => {
  // mulberry32: the same requests every time
  let state = 20260;
  const random = () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
  const pick = (list) => list[Math.floor(random() * list.length)];
  const prompts = [
    "Once upon a time",
    "The fox",
    "Zoë said: \u201cno\u201d.",
    "One cold day, the little bird",
    "\n\n",
    "A 12 b",
  ];
  // as the package and as the command call it
  const stages = [
    ["temperature", "--temp", [0, 0.5, 1, 1.75]],
    ["topK", "--top-k", [0, 1, 5, 100]],
    ["topP", "--top-p", [0.25, 0.5, 1]],
    ["minP", "--min-p", [0, 0.125, 0.5]],
    ["typicalP", "--typical", [0.25, 0.75, 1]],
    ["repeatPenalty", "--repeat-penalty", [1, 1.25, 2]],
    ["repeatLastN", "--repeat-last-n", [0, 8, -1]],
    ["frequencyPenalty", "--frequency-penalty", [-0.5, 0, 1.5]],
    ["presencePenalty", "--presence-penalty", [0, 0.75]],
    ["stop", "--stop", [" the", ".", "said"]],
  ];
  const page = await blank(b);
  await page.evaluate(async (url) => (globalThis.model = await Starling.load(url, { sequences: 5 })), TINY);
  const requests = Array.from({ length: 20 }, () => {
    const [prompt, seed, maxTokens] = [pick(prompts), Math.floor(random() * 2 ** 48), 1 + Math.floor(random() * 40)];
    const options = { seed, maxTokens };
    const args = [prompt, `--seed=${seed}`, `-n${maxTokens}`];
    for (const [name, flag, values] of stages) {
      if (random() < 0.5) continue;
      options[name] = pick(values);
      args.push(`${flag}=${options[name]}`);
    }
    if (random() < 0.3) {
      options.dry = { multiplier: 2, base: 1.5, allowedLength: 1 };
      args.push("--dry-multiplier=2", "--dry-base=1.5", "--dry-allowed-length=1");
    }
    if (random() < 0.3) {
      options.logitBias = { 262: 3.5, 17: -2 };
      args.push("--logit-bias=262=3.5", "--logit-bias=17=-2");
    }
    return { prompt, options, args };
  });
  const texts = await page.evaluate(
    (all) => Promise.all(all.map(({ prompt, options }) => model.generate(prompt, options).result.then((r) => r.text))),
    requests,
  );
  for (const [i, { args }] of requests.entries()) assert.equal(texts[i], native(...args), args.join(" "));
  await page.close();
});

test("a service worker generates too", async () => {
  const page = await blank(b);
  const text = await page.evaluate(async (url) => {
    const registration = await navigator.serviceWorker.register("service.js", { type: "module" });
    const worker = registration.installing ?? registration.waiting ?? registration.active;
    const { port1, port2 } = new MessageChannel();
    worker.postMessage({ url: new URL(url, location.href).href, port: port2 }, [port2]);
    const { data } = await new Promise((resolve) => (port1.onmessage = resolve));
    await registration.unregister();
    return data;
  }, TINY);
  assert.equal(text, native("Once upon a time", "-n20"));
  await page.close();
});
