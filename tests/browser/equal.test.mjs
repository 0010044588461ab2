// Answers in the browser are those of the command and of the server. STARLING is the command.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { createInterface } from "node:readline";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";

import { TINY, blank, command, native, open } from "./browser.mjs";
import { asTheServer, more, request } from "./requests.mjs";

const root = fileURLToPath(new URL("../../", import.meta.url));
let b;
let page;
before(async () => {
  b = await open();
  page = await blank(b);
  await page.evaluate(async (url) => (globalThis.model = await Starling.load(url, { sequences: 5 })), TINY);
});
after(() => b.close());

test("20 random requests have the text of the command", async () => {
  const requests = Array.from({ length: 20 }, () => more(request()));
  const texts = await page.evaluate(
    (all) => Promise.all(all.map(({ prompt, options }) => model.generate(prompt, options).result.then((r) => r.text))),
    requests,
  );
  for (const [i, { args }] of requests.entries()) assert.equal(texts[i], native(...args), args.join(" "));
});

test("20 random requests have the text, tokens and log-probabilities of the server", async () => {
  const server = spawn(command, ["serve", "--model", root + TINY, "--port", "0"], {
    stdio: ["ignore", "pipe", "ignore"],
  });
  try {
    const base = (await once(createInterface(server.stdout), "line"))[0].trim();
    const post = async (path, body) => {
      const headers = { "content-type": "application/json" };
      const response = await fetch(base + path, { method: "POST", headers, body: JSON.stringify(body) });
      const answer = await response.json();
      assert.ok(response.ok, JSON.stringify([body, answer]));
      return answer;
    };
    const requests = Array.from({ length: 20 }, request);
    const got = await page.evaluate(
      (all) =>
        Promise.all(
          all.map(async ([prompt, options]) => {
            const { text, tokens, finishReason } = await model.generate(prompt, options).result;
            return { text, finishReason, tokens: tokens.map(({ id, logprob, top }) => ({ id, logprob, top })) };
          }),
        ),
      requests.map(({ prompt, options }) => [prompt, { ...asTheServer(options), logprobs: 3 }]),
    );
    let n = 0;
    for (const [i, { body }] of requests.entries()) {
      const { text, tokens, finishReason } = got[i];
      const said = JSON.stringify(body);
      const ids = await post("/v1/generate", body);
      assert.deepEqual([text, tokens.map((t) => t.id), finishReason], [ids.text, ids.tokens, ids.finish_reason], said);
      const { choices } = await post("/v1/completions", { ...body, logprobs: 3 });
      const { token_logprobs, top_logprobs } = choices[0].logprobs;
      assert.equal(choices[0].text, text, said);
      // the server writes as many digits as an f32 has
      assert.deepEqual(
        tokens.map((t) => t.logprob),
        token_logprobs.map(Math.fround),
        said,
      );
      // there by text, of which two tokens may have the same; and with the token itself
      for (const [j, { top }] of tokens.entries()) {
        const there = Object.values(top_logprobs[j]).map(Math.fround);
        for (const { logprob } of top) assert.ok(there.includes(logprob), said);
      }
      n += tokens.length;
    }
    assert.ok(n > 100, `${n} tokens`);
  } finally {
    server.kill();
  }
});
