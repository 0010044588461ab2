// The pinned results through the package, in a page of a browser.

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";

const fixtures = new URL("../../fixtures/", import.meta.url);
const json = async (path) => JSON.parse(await readFile(new URL(path, fixtures), "utf8"));
// those made of another file are for the engine's own tests
const cases = (await json("goldens/cases.json")).cases.filter((c) => !c.quantise);
const { cases: embeddings } = await json("goldens/embeddings.json");
const pinned = (name) => json(`goldens/pinned/${name}.json`);

/** Options of a case in the package's names; what a case does not give is off. */
function options({ max_tokens, sampling: s }) {
  const dry = s.dry && {
    multiplier: s.dry.multiplier,
    base: s.dry.base,
    allowedLength: s.dry.allowed_length,
    lastN: s.dry.last_n,
    breakers: s.dry.breakers ?? [],
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

/** Every case, by a model that is loaded as said; the model says that it runs as in `info`. */
export async function checkCases(page, load, info) {
  assert.ok(cases.length > 20, "cases are missing");
  for (const [i, c] of cases.entries()) {
    const want = await pinned(c.name);
    const whole = {
      ...load,
      kvType: c.kv_type,
      contextLength: want.prompt_ids.length + c.max_tokens,
      batchTokens: [64, 7, 512][i % 3],
      cache: "none",
    };
    const got = await page.evaluate(
      async ([url, load, prompt, options]) => {
        const model = await Starling.load(url, load);
        const { isa, threads, memory64 } = model.info;
        const { ids } = await model.tokenize(prompt);
        const logits_sha256 = await model.logitsSha256(ids);
        const { text, tokens, stopToken } = await model.generate(prompt, options).result;
        model.dispose();
        const picked = [...tokens.map((t) => t.id), stopToken].filter((id) => id !== undefined);
        return { isa, threads, memory64, prompt_ids: ids, logits_sha256, ids: picked, text };
      },
      [`/fixtures/${c.model}`, whole, c.prompt, options(c)],
    );
    assert.deepEqual(got, { memory64: false, ...info, ...want }, c.name);
  }
}

/** Every model that embeds. */
export async function checkEmbeddings(page, load) {
  for (const c of embeddings) {
    const [sha256, generates, refused] = await page.evaluate(
      async ([url, load, texts]) => {
        const model = await Starling.load(url, { ...load, cache: "none", contextLength: 512 });
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
      [`/fixtures/${c.model}`, load, c.texts],
    );
    assert.equal(sha256, (await pinned(`embedding-${c.name}`)).vectors_sha256, c.name);
    if (!generates) assert.equal(refused, "request");
  }
}
