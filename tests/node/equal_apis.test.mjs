// `responses` and `messages` of the package in Node are those of the server for the same body, but for ids and times; so are
// errors and counts. After web/build.sh; STARLING is the command.

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
  model = await Starling.load(pathToFileURL(TINY));
  server = await startServer(TINY, "--chat-template", TEMPLATE);
});
after(() => {
  model.dispose();
  server.stop();
});

const post = (path, body) => server.post(`/v1/${path}`, body);

/** Without what differs between hosts: IDs are replaced by their number, so that what refers to one still does. */
function comparable(value) {
  const ids = new Map();
  const isId = (text) => /^(resp|msg|rs|fc|call|toolu|item)_[\w-]+$/.test(text);
  const plain = (key, value) => {
    if (key === "created_at" || key === "model" || key === "input_tokens_details") return undefined;
    if (typeof value !== "string" || !isId(value)) return value;
    if (!ids.has(value)) ids.set(value, `id ${ids.size}`);
    return ids.get(value);
  };
  return JSON.parse(JSON.stringify(value, plain));
}

/** Prompt tokens of a message, whose prefix cache differs. */
function withoutCache(value) {
  return JSON.parse(JSON.stringify(value), (_, v) => {
    if (v?.cache_read_input_tokens === undefined) return v;
    const { input_tokens, cache_read_input_tokens, ...usage } = v;
    return { ...usage, all: input_tokens + cache_read_input_tokens };
  });
}

const schema = {
  type: "object",
  properties: { name: { type: "string", maxLength: 6 }, age: { type: "integer", minimum: 0, maximum: 20 } },
  required: ["name", "age"],
  additionalProperties: false,
};
const tool = { type: "function", name: "weather", description: "Weather.", parameters: schema, strict: true };
const RESPONSES = {
  path: "responses",
  create: (body) => model.responses.create(body),
  common: { input: "Tell me of a fox.", seed: 5, max_output_tokens: 30, temperature: 0.8 },
  good: [
    {},
    { instructions: "You tell stories.", reasoning: { effort: "low" }, metadata: { topic: "foxes" } },
    { input: [{ role: "user", content: [{ type: "input_text", text: "And of Zoë." }] }], top_p: 0.9 },
    { include: ["message.output_text.logprobs"], top_logprobs: 2, temperature: 0 },
    { text: { format: { type: "json_schema", name: "person", schema } }, max_output_tokens: 80 },
    { tools: [tool, { type: "web_search" }], tool_choice: "required", max_output_tokens: 150 },
    {
      tools: [tool],
      input: [
        { role: "user", content: "Weather?" },
        { type: "function_call", call_id: "call_1", name: "weather", arguments: '{"age": 1}' },
        { type: "function_call_output", call_id: "call_1", output: "sunny" },
      ],
    },
  ],
  bad: [
    { input: 3 },
    { max_output_tokens: 0 },
    { temperature: 5 },
    { truncation: "auto" },
    { background: true },
    { tool_choice: "sometimes" },
    { text: { format: { type: "xml" } } },
    { input: [{ type: "function_call", name: "weather" }] },
  ],
};
const MESSAGES = {
  path: "messages",
  create: (body) => model.messages.create(body),
  common: { model: "starling-tiny-q8_0", max_tokens: 30, messages: [{ role: "user", content: "Tell me of a fox." }], temperature: 0 },
  good: [
    {},
    { system: [{ type: "text", text: "You tell stories." }], stop_sequences: [" the"] },
    { messages: [{ role: "user", content: [{ type: "text", text: "And of Zoë." }] }, { role: "assistant", content: "Once" }] },
    { tools: [{ name: "weather", input_schema: schema }], tool_choice: { type: "any" }, max_tokens: 150 },
    { output_config: { format: { type: "json_schema", schema } }, max_tokens: 80 },
    { thinking: { type: "enabled", budget_tokens: 1024 }, max_tokens: 20 },
  ],
  bad: [
    { messages: [] },
    { max_tokens: undefined },
    { temperature: -1 },
    { tool_choice: { type: "any" } },
    { messages: [{ role: "robot", content: "a" }] },
    { container: "c" },
  ],
};

for (const { path, create, common, good, bad } of [RESPONSES, MESSAGES]) {
  test(`${path} are those of the server`, async () => {
    for (const more of good) {
      const body = { ...common, ...more };
      const want = await (await post(path, body)).json();
      const got = await create({ ...body, chat_template });
      assert.ok(got.output?.length ?? got.content?.length, JSON.stringify(got));
      assert.deepEqual(withoutCache(comparable(got)), withoutCache(comparable(want)), JSON.stringify(more));
    }
  });

  test(`events of ${path} are those of the server`, async () => {
    for (const more of good) {
      const body = { ...common, ...more, stream: true };
      const lines = (await (await post(path, body)).text()).split("\n").filter((line) => line.startsWith("data: {"));
      const want = lines.map((line) => JSON.parse(line.slice("data: ".length)));
      const got = [];
      for await (const event of await create({ ...body, chat_template })) got.push(event);
      assert.ok(got.length > 4);
      assert.deepEqual(withoutCache(comparable(got)), withoutCache(comparable(want)), JSON.stringify(more));
    }
  });

  test(`errors of ${path} are those of the server`, async () => {
    for (const more of bad) {
      const body = { ...common, ...more };
      const response = await post(path, body);
      const { error } = await response.json();
      assert.equal(response.status, 400, JSON.stringify([more, error]));
      await assert.rejects(create({ ...body, chat_template }), (e) => {
        assert.ok(e instanceof StarlingError, String(e));
        assert.deepEqual([e.code, e.message], ["request", error.message], JSON.stringify(more));
        return true;
      });
    }
  });
}

test("counts are those of the server", async () => {
  const { input } = RESPONSES.common;
  const counted = await (await post("responses/input_tokens", { input })).json();
  assert.deepEqual(await model.responses.inputTokens.count({ input, chat_template }), counted);
  const { messages } = MESSAGES.common;
  const body = { model: "starling-tiny-q8_0", messages, system: "You tell stories." };
  assert.deepEqual(await model.messages.countTokens({ ...body, chat_template }), await (await post("messages/count_tokens", body)).json());
});

test("a response of the page continues none", async () => {
  const request = { input: "a", previous_response_id: "resp_1", chat_template };
  await assert.rejects(model.responses.create(request), /previous_response_id: the page keeps no responses/);
});

test("an aborted stream ends", async () => {
  const abort = new AbortController();
  const request = { ...MESSAGES.common, max_tokens: 500, stream: true, chat_template };
  const events = await model.messages.create(request, { signal: abort.signal });
  await assert.rejects(async () => {
    for await (const { type } of events) if (type === "content_block_delta") abort.abort(new Error("enough"));
  }, /enough/);
});
