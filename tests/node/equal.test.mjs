// Chat completions of the package in Node are those of the server for the same body, but for ids, times and fingerprints;
// so are errors. After web/build.sh; STARLING is the command.

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { after, before, test } from "node:test";
import { fileURLToPath, pathToFileURL } from "node:url";

import { Starling, StarlingError } from "../../web/dist/index.js";
import { startServer } from "./command.mjs";

const fixture = (name) => fileURLToPath(new URL(`../../fixtures/${name}`, import.meta.url));
const TINY = fixture("starling-tiny/starling-tiny-q8_0.gguf");
const TEMPLATE = fixture("chat/qwen-tools.jinja");

let model;
let server;
let chat_template;
before(async () => {
  chat_template = await readFile(TEMPLATE, "utf8");
  model = await Starling.load(pathToFileURL(TINY), { sequences: 4 });
  server = await startServer(TINY, "--chat-template", TEMPLATE, "--max-n", "128");
});
after(() => {
  model.dispose();
  server.stop();
});

const post = (body) => server.post("/v1/chat/completions", body);

/** Responses without what differs between hosts; names of calls are replaced by their number. */
function comparable({ id: _, created: __, model: ___, system_fingerprint: ____, usage, ...response }) {
  let n = 0;
  const text = JSON.stringify(response, (key, value) => (key === "id" ? `call ${n++}` : value));
  // prefix caches differ
  const { prompt_tokens_details: _____, ...counts } = usage ?? {};
  return { ...JSON.parse(text), usage: usage && counts };
}

const messages = [
  { role: "system", content: "You tell stories." },
  { role: "user", content: [{ type: "text", text: "Tell me of a fox." }, { type: "text", text: "And of Zoë." }] },
];
const schema = {
  type: "object",
  properties: { name: { type: "string", maxLength: 6 }, age: { type: "integer", minimum: 0, maximum: 20 } },
  required: ["name", "age"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "weather", strict: true, parameters: schema } }];
const call = { id: "call_1", type: "function", function: { name: "weather", arguments: '{"age": 1}' } };
const common = { messages, seed: 5, max_tokens: 30 };
const GOOD = [
  {},
  { n: 2, seed: 7 },
  { logprobs: true, top_logprobs: 2 },
  { n: 2, logprobs: true },
  { stop: [" the", "."] },
  { stop_token_ids: [262], temperature: 0 },
  { ignore_eos: true, frequency_penalty: 1.5, presence_penalty: -1, penalty_scope: "all" },
  { seed: -2, top_p: 0.9, top_k: 40, min_p: 0.01, typical_p: 0.9, repetition_penalty: 1.2 },
  { dry_multiplier: 2, dry_base: 2, dry_allowed_length: 1, dry_sequence_breakers: ["."] },
  { logit_bias: { 262: -100, 263: 5 }, max_completion_tokens: 12, max_tokens: null },
  { messages: [...messages, { role: "assistant", content: "Once" }], continue_final_message: true },
  { response_format: { type: "json_schema", json_schema: { schema } }, max_tokens: 60 },
  { response_format: { type: "json_object", schema }, max_tokens: 60, logprobs: true },
  { guided_regex: "[a-z]{3,9}" },
  { structured_outputs: { choice: ["fox", "a cat"] }, n: 2 },
  { grammar: 'start: "The " /[a-z]{1,5}/ "."' },
  { tools },
  { tools, tool_choice: "none" },
  { tools, tool_choice: "required", max_tokens: 150, n: 2, logprobs: true },
  { tools, tool_choice: { type: "function", function: { name: "weather" } }, max_tokens: 150 },
  { tools, response_format: { type: "json_object" }, parallel_tool_calls: false },
  { tools, messages: [...messages, { role: "assistant", content: null, tool_calls: [call] }] },
];
const BAD = [
  { messages: [] },
  { messages: 3 },
  { messages: [{ role: "robot", content: "a" }] },
  { messages: [{ role: "user", content: [{ type: "image_url" }] }] },
  { messages: [{ role: "assistant", tool_calls: [{ function: {} }] }] },
  { n: 0 },
  { n: 1.5 },
  { seed: 0.5 },
  { temperature: "hot" },
  { temperature: 3 },
  { top_p: -1 },
  { top_k: -2 },
  { top_logprobs: 2 },
  { logprobs: true, top_logprobs: 21 },
  { logit_bias: { a: 1 } },
  { stop: "" },
  { max_tokens: 0 },
  { priority: "urgent" },
  { penalty_scope: "prompt" },
  { repetition_penalty: 0 },
  { dry_multiplier: 1, dry_base: 0.5 },
  { continue_final_message: true, add_generation_prompt: true },
  { chat_template_kwargs: [] },
  { response_format: { type: "xml" } },
  { response_format: { type: "json_schema" } },
  { response_format: { type: "json_object" }, guided_regex: "a" },
  { guided_json: "{" },
  { guided_regex: "[a-z" },
  { guided_choice: [] },
  { tools: {} },
  { tools: [{}] },
  { tools, tool_choice: "sometimes" },
  { tool_choice: "required" },
  { tools, tool_choice: { type: "function", function: { name: "g" } } },
  { tools, tool_choice: "required", response_format: { type: "json_object" } },
];

test("responses are those of the server", async () => {
  for (const more of GOOD) {
    const body = { ...common, ...more };
    const response = await post(body);
    const want = await response.json();
    assert.ok(response.ok, JSON.stringify([more, want]));
    const got = await model.chat.completions.create({ ...body, chat_template });
    assert.deepEqual(comparable(got), comparable(want), JSON.stringify(more));
  }
});

/** The choices of chunks, those of one choice in order: the order between choices is that of the batch. */
function byChoice(chunks) {
  const choices = new Map();
  for (const chunk of chunks.map(comparable)) {
    const index = chunk.choices[0]?.index ?? "usage";
    choices.set(index, [...(choices.get(index) ?? []), chunk]);
  }
  return choices;
}

test("chunks are those of the server", async () => {
  for (const more of GOOD) {
    const body = { ...common, ...more, stream: true, stream_options: { include_usage: true } };
    const events = (await (await post(body)).text()).split("\n\n").filter((event) => event.startsWith("data: {"));
    const want = events.map((event) => JSON.parse(event.slice("data: ".length)));
    const got = [];
    for await (const chunk of await model.chat.completions.create({ ...body, chat_template })) got.push(chunk);
    assert.ok(got.length > 2);
    assert.deepEqual(byChoice(got), byChoice(want), JSON.stringify(more));
  }
});

test("errors are those of the server", async () => {
  for (const more of BAD) {
    const body = { ...common, ...more };
    const response = await post(body);
    const { error } = await response.json();
    assert.equal(response.status, 400, JSON.stringify([more, error]));
    await assert.rejects(model.chat.completions.create({ ...body, chat_template }), (e) => {
      assert.ok(e instanceof StarlingError, String(e));
      assert.deepEqual([e.code, e.message], ["request", error.message], JSON.stringify(more));
      return true;
    });
  }
});
