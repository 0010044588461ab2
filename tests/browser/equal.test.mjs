// Answers in the browser are those of the command and of the server. STARLING is the command.

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";

import { startServer } from "../node/command.mjs";
import { TINY, blank, native, open } from "./browser.mjs";
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

/** Calls `work` with a function that posts to a server of the model, which has more arguments. */
async function withServer(work, ...more) {
  const server = await startServer(root + TINY, ...more);
  try {
    await work(async (path, body) => {
      const response = await server.post(path, body);
      const answer = await response.json();
      assert.ok(response.ok, JSON.stringify([body, answer]));
      return answer;
    });
  } finally {
    server.stop();
  }
}

test("20 random requests have the text, tokens and log-probabilities of the server", () =>
  withServer(async (post) => {
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
      const { choices } = await post("/v1/completions", { ...body, penalty_scope: "all", logprobs: 3 });
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
  }));

test("OpenAI's form has the answer of the server to the same body", () =>
  withServer(async (post) => {
    const messages = [
      { role: "system", content: "You tell stories." },
      {
        role: "user",
        content: [
          { type: "text", text: "Tell me of a fox." },
          { type: "text", text: "And of Zoë." },
        ],
      },
      { role: "assistant", content: null },
      { role: "user", content: "Go on" },
    ];
    // what the server's own defaults do only shows in answers of some length
    const base = { messages, seed: 5, max_tokens: 100, ignore_eos: true };
    const bodies = [
      base,
      { ...base, frequency_penalty: 1.5 },
      { ...base, presence_penalty: 2, seed: -2 },
      { ...base, repetition_penalty: 1.5, top_k: -1 },
      { ...base, repeat_penalty: 1.5, temperature: 0, n: 2, stop_token_ids: [262] },
      { ...base, max_tokens: null, max_completion_tokens: 80, ignore_eos: null, response_format: null },
      ...Array.from({ length: 10 }, () => ({ ...request().body, ...base, prompt: undefined, logprobs: true, top_logprobs: 2 })),
    ];
    const got = await page.evaluate(
      (all) => Promise.all(all.map((body) => model.chat.completions.create(body))),
      bodies,
    );
    const rounded = ({ token, bytes, logprob }) => ({ token, bytes, logprob: Math.fround(logprob) });
    const seen = ({ choices, usage }) => ({
      choices: choices.map(({ message, finish_reason, logprobs }) => ({
        content: message.content,
        finish_reason,
        logprobs: logprobs?.content.map(({ top_logprobs, ...token }) => [token, ...top_logprobs].map(rounded)),
      })),
      // not what was in the cache
      usage: [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens],
    });
    for (const [i, body] of bodies.entries()) {
      const want = await post("/v1/chat/completions", body);
      assert.deepEqual(seen(got[i]), seen(want), JSON.stringify(body));
    }
    assert.ok(got.filter(({ usage }) => usage.completion_tokens > 64).length > 10);
  }));

test("answers that have to follow something are those of the server", () =>
  withServer(async (post) => {
    const schema = {
      type: "object",
      properties: {
        name: { type: "string", maxLength: 12 },
        kinds: { type: "array", items: { enum: ["cat", "fox", "b\u00e4r"] }, maxItems: 3 },
        age: { type: ["integer", "null"], minimum: 0, maximum: 20 },
      },
      required: ["kinds", "name"],
      additionalProperties: false,
    };
    const messages = [{ role: "user", content: "Tell me of a cat." }];
    const base = { messages, seed: 5, max_tokens: 60, logprobs: true, top_logprobs: 2 };
    const forms = [
      { response_format: { type: "json_schema", json_schema: { name: "cat", schema } } },
      { response_format: { type: "json_object" } },
      { response_format: { type: "json_object", schema } },
      { response_format: { type: "text" } },
      { json_schema: schema },
      { grammar: 'start: "The " /[a-z]{1,5}/ (" and " /[a-z]{1,5}/)* "."' },
      { structured_outputs: { json: JSON.stringify(schema) } },
      { structured_outputs: { regex: "[A-Z][a-z]+( [a-z]+){2,5}\\." } },
      { structured_outputs: { choice: ["It is a cat.", "It is a fox.", "No"] } },
      { structured_outputs: { json_object: true } },
      { guided_json: schema },
      { guided_regex: "[0-9]{3,9}" },
      { guided_choice: ["yes", "no"] },
      { guided_grammar: 'start: "a"+ "b"' },
    ];
    const bodies = forms.flatMap((form) => [1, 2].map((seed) => ({ ...base, ...form, seed, n: seed })));
    const got = await page.evaluate(
      (all) => Promise.all(all.map((body) => model.chat.completions.create(body))),
      bodies,
    );
    const seen = ({ choices, usage }) => [
      usage.completion_tokens,
      ...choices.map(({ message, finish_reason, logprobs }) => [
        message.content,
        finish_reason,
        logprobs.content.map(({ token, logprob, top_logprobs }) => [token, Math.fround(logprob), top_logprobs.length]),
      ]),
    ];
    for (const [i, body] of bodies.entries())
      assert.deepEqual(seen(got[i]), seen(await post("/v1/chat/completions", body)), JSON.stringify(body));
    assert.ok(got.filter(({ choices }) => choices[0].finish_reason === "stop").length > 10);
  }));

test("a model is told of tools as the server tells it", () => {
  const template = `${root}fixtures/chat/qwen-tools.jinja`;
  return withServer(
    async (post) => {
      const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
      const tools = [{ type: "function", function: { name: "weather", description: "Of a city", parameters } }];
      const call = { id: "call_1", type: "function", function: { name: "weather", arguments: '{"city": "Oslo"}' } };
      const messages = [
        { role: "user", content: "Is it raining in Oslo?" },
        { role: "assistant", content: null, tool_calls: [call] },
        { role: "tool", tool_call_id: "call_1", content: "It is." },
      ];
      const base = { messages, tools, seed: 5, max_tokens: 40, ignore_eos: true, logprobs: true };
      const city = { enum: ["Oslo", "Rome"] };
      const strict = { type: "object", properties: { city }, required: ["city"], additionalProperties: false };
      const time = { type: "function", function: { name: "time", strict: true, parameters: strict } };
      const forced = { ...base, ignore_eos: false, max_tokens: 120, tools: [...tools, time] };
      const bodies = [
        base,
        { ...base, tool_choice: "none" },
        { ...base, parallel_tool_calls: false, seed: 6 },
        { ...forced, tool_choice: "required" },
        { ...forced, tool_choice: "required", parallel_tool_calls: false, seed: 7 },
        { ...forced, tool_choice: { type: "function", function: { name: "time" } } },
        { ...forced, tool_choice: "auto" },
      ];
      const got = await page.evaluate(
        ([all, chat_template]) =>
          Promise.all(all.map((body) => model.chat.completions.create({ ...body, chat_template }))),
        [bodies, await readFile(template, "utf8")],
      );
      // names of calls differ
      const seen = ({ choices: [{ message, finish_reason, logprobs }], usage }) => [
        message.content,
        message.tool_calls?.map((call) => call.function),
        finish_reason,
        logprobs.content.map(({ logprob }) => Math.fround(logprob)),
        usage.prompt_tokens,
      ];
      for (const [i, body] of bodies.entries())
        assert.deepEqual(seen(got[i]), seen(await post("/v1/chat/completions", body)), JSON.stringify(body));
      assert.ok(got[0].usage.prompt_tokens > got[1].usage.prompt_tokens, "it is told");
      const { finish_reason, message: called } = got[5].choices[0];
      assert.equal(finish_reason, "tool_calls");
      assert.match(called.tool_calls[0].function.arguments, /^\{"city":"(Oslo|Rome)"\}$/);
    },
    "--chat-template",
    template,
  );
});
