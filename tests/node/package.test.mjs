// The package in Node, inline: options, answers and errors of its interface. After web/build.sh.

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { after, before, test } from "node:test";

import { Starling, StarlingError } from "../../web/dist/index.js";
import { Instance } from "../../web/dist/instance.js";
import { capacityOf } from "../../web/dist/capacity.js";
import { countFitting } from "../../web/dist/load.js";
import { openPart } from "../../web/dist/source.js";
import { split } from "./split.mjs";

const fixture = (name) => new URL(`../../fixtures/${name}`, import.meta.url);
const TINY = fixture("starling-tiny/starling-tiny-q8_0.gguf");
const code = (want) => (e) => e instanceof StarlingError && e.code === want;

/** A model on this thread. */
const load = (source, options) => Starling.load(source, { worker: false, ...options });

let model;
before(async () => (model = await load(TINY, { receipts: true, sequences: 4 })));
after(() => model.dispose());

test("what is known of the model", async () => {
  const { name, architecture, contextLength, generates, worker, threads, sha256 } = model.info;
  assert.deepEqual(
    [name, architecture, contextLength, generates, worker, threads],
    ["Starling Tiny", "llama", 512, true, false, 1],
  );
  assert.match(sha256, /^[0-9a-f]{64}$/);
  const memory = await model.memory();
  assert.ok(memory.weights > 3e6 && memory.module > memory.weights + memory.kvCommitted);
  assert.equal(Starling.features().simd128, true);
});

test("pieces are the text, tokens are its tokens", async () => {
  const options = { maxTokens: 40, seed: 11 };
  const { text, tokens, usage, finishReason, timings } = await model.generate("Once upon a time", options).result;
  let streamed = "";
  for await (const piece of model.generate("Once upon a time", options)) streamed += piece;
  assert.equal(streamed, text);
  assert.equal(await model.detokenize(tokens.map((t) => t.id)), text);
  assert.deepEqual([usage.completionTokens, finishReason], [40, "length"]);
  assert.ok(timings.promptMs > 0 && timings.generationPerSecond > 0);
  const { ids, offsets } = await model.tokenize("Once upon a time");
  assert.equal(usage.promptTokens, ids.length);
  assert.equal(offsets.at(-1)[1], "Once upon a time".length);
  assert.equal((await model.generate(ids, options).result).text, text);
});

test("log-probabilities", async () => {
  const { tokens } = await model.generate("Once", { maxTokens: 5, temperature: 0, logprobs: 3 }).result;
  for (const { id, logprob, top, text, bytes } of tokens) {
    assert.equal(top.length, 3);
    assert.deepEqual(top[0], { id, logprob, text, bytes });
    assert.deepEqual(bytes, [...new TextEncoder().encode(text)]);
    assert.ok(logprob <= 0 && top[1].logprob <= logprob);
  }
  const [plain] = (await model.generate("Once", { maxTokens: 1 }).result).tokens;
  assert.deepEqual([plain.logprob, plain.top], [undefined, undefined]);
});

test("stops, biases, penalties and seeds do what they say", async () => {
  const base = { maxTokens: 60, temperature: 0 };
  const { text } = await model.generate("Once upon a time", base).result;
  const stop = text.slice(20, 26);
  const stopped = await model.generate("Once upon a time", { ...base, stop }).result;
  assert.deepEqual([stopped.text, stopped.finishReason], [text.slice(0, text.indexOf(stop)), "stop"]);
  const first = (await model.generate("Once upon a time", base).result).tokens[0].id;
  for (const logitBias of [{ [first]: -100 }, [[first, -100]]]) {
    assert.notEqual((await model.generate("Once upon a time", { ...base, logitBias }).result).tokens[0].id, first);
  }
  const stopToken = await model.generate("Once upon a time", { ...base, stopTokens: [first] }).result;
  assert.deepEqual([stopToken.text, stopToken.finishReason, stopToken.stopToken], ["", "stop", first]);
  assert.deepEqual([stopToken.tokens, stopToken.usage.completionTokens], [[], 1]);
  const seeded = async (seed) => (await model.generate("Once", { maxTokens: 20, seed }).result).text;
  const big = 2n ** 64n - 1n;
  assert.equal(await seeded(big), await seeded(big));
  assert.notEqual(await seeded(big), await seeded(big - 1n));
  assert.equal(await seeded(5), await seeded(5n));
  const repeat = "The dog ran and ran and ran and ran and";
  const dry = { multiplier: 50, base: 2, allowedLength: 1 };
  const plain = await model.generate(repeat, base).result;
  const dried = await model.generate(repeat, { ...base, dry }).result;
  assert.notEqual(dried.text, plain.text);
  const broken = await model.generate(repeat, { ...base, dry: { ...dry, breakers: [" and"] } }).result;
  assert.notEqual(broken.text, dried.text);
});

test("conversations, by the template and in OpenAI's form", async () => {
  const messages = [{ role: "user", content: "Who are you?" }];
  const options = { maxTokens: 16, temperature: 0 };
  const { text } = await model.chat(messages, options).result;
  const rendered = await model.applyTemplate(messages);
  assert.match(rendered.text, /user\nWho are you\?/);
  assert.equal((await model.generate(rendered.ids, options).result).text, text);
  const other = await model.applyTemplate(messages, {
    template: "{{ messages[0].content }}|{{ x }}",
    variables: { x: 3 },
  });
  assert.equal(other.text, "Who are you?|3");

  const request = { messages, max_tokens: 16, temperature: 0, logprobs: true, top_logprobs: 2 };
  const whole = await model.chat.completions.create(request);
  const [choice] = whole.choices;
  assert.deepEqual([choice.message.content, whole.object, whole.model], [text, "chat.completion", "Starling Tiny"]);
  assert.equal(choice.logprobs.content[0].top_logprobs.length, 2);
  assert.equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens);
  const chunks = [];
  for await (const chunk of await model.chat.completions.create({
    ...request,
    stream: true,
    stream_options: { include_usage: true },
  }))
    chunks.push(chunk);
  assert.equal(chunks[0].choices[0].delta.role, "assistant");
  assert.equal(chunks.map((c) => c.choices[0]?.delta.content ?? "").join(""), text);
  assert.equal(chunks.at(-2).choices[0].finish_reason, choice.finish_reason);
  assert.deepEqual(chunks.at(-1).usage, {
    ...whole.usage,
    prompt_tokens_details: chunks.at(-1).usage.prompt_tokens_details,
  });
  const two = await model.chat.completions.create({ messages, max_tokens: 12, n: 2, seed: 4 });
  assert.equal(two.choices.length, 2);
});

test("OpenAI's form has the defaults and names of the server", async () => {
  const ask = (body) => model.chat.completions.create({ messages, max_tokens: 80, ignore_eos: true, seed: 3, ...body });
  const messages = [{ role: "user", content: "Tell me a story" }];
  const options = {
    maxTokens: 80,
    ignoreEos: true,
    seed: 3,
    temperature: 1,
    topP: 1,
    topK: 0,
    minP: 0,
    repeatLastN: -1,
  };
  const text = async (more, told = messages) => (await model.chat(told, { ...options, ...more }).result).text;
  const said = async (body) => (await ask(body)).choices[0].message.content;

  assert.equal(await said({ response_format: null, top_k: -1 }), await text({}));
  assert.equal(await said({ frequency_penalty: 1 }), await text({ frequencyPenalty: 1, penaltyScope: "answer" }));
  assert.equal(await said({ frequency_penalty: 1, penalty_scope: "all" }), await text({ frequencyPenalty: 1 }));
  assert.equal(await said({ top_p: 0 }), await text({ temperature: 0 }));
  const begun = [...messages, { role: "assistant", content: "Once upon" }];
  const continued = await text({ continueFinalMessage: true }, begun);
  assert.equal(await said({ messages: begun, continue_final_message: true }), continued);
  assert.equal(await said({ messages: begun }), await text({}, begun));
  assert.equal(await said({ messages: begun, add_generation_prompt: true }), await text({}, begun));
  assert.equal(await said({ repetition_penalty: 1.5 }), await text({ repeatPenalty: 1.5 }));
  assert.equal(await said({ seed: -2 }), await text({ seed: 2n ** 64n - 2n }));
  const seeds = await Promise.all([ask({ seed: -1 }), ask({ seed: -1 })]);
  assert.notEqual(seeds[0].seed, seeds[1].seed, "-1 is a random seed");
  const { tokens } = await model.chat(messages, options).result;
  assert.equal((await ask({ stop_token_ids: [tokens[5].id] })).choices[0].finish_reason, "stop");

  const call = (args) => [{ type: "function", function: { name: "f", arguments: args } }];
  const parts = [
    { type: "text", text: "Tell me" },
    { type: "text", text: "a story" },
  ];
  const long = [
    { role: "user", content: parts },
    { role: "assistant", content: null, tool_calls: call('{"a": "b"}') },
  ];
  const plain = [
    { role: "user", content: "Tell me\na story" },
    { role: "assistant", content: "", tool_calls: call({ a: "b" }) },
  ];
  assert.equal(
    await said({ messages: long, chat_template_kwargs: { x: 1 } }),
    await text({ variables: { x: 1 } }, plain),
  );

  const proven = await ask({ receipt: true });
  assert.equal((await model.verify(proven.choices[0].receipt)).verified, true);
  const chunks = [];
  for await (const chunk of await ask({ receipt: true, stream: true })) chunks.push(chunk);
  assert.equal((await model.verify(chunks.at(-1).choices[0].receipt)).verified, true);

  for (const wrong of [
    { response_format: { type: "xml" } },
    { response_format: { type: "json_schema" } },
    { response_format: { type: "json_object" }, guided_regex: "a" },
    { guided_json: "{" },
    { tool_choice: "required" },
    { tool_choice: "sometimes" },
    { n: 0 },
    { n: 1.5 },
    { messages: undefined },
    { messages: [{ role: "user", content: [{ type: "image_url" }] }] },
    { continue_final_message: true, add_generation_prompt: true },
    ...[{}, "f()", ["f"], [{}], call(3), [{ function: {} }], [{ function: { name: 3 } }], [{ function: { name: "" } }]].map(
      (calls) => ({ messages: [...messages, { role: "assistant", content: "", tool_calls: calls }] }),
    ),
    { seed: 0.5 },
  ])
    await assert.rejects(ask(wrong), code("request"), JSON.stringify(wrong));
});

test("answers follow what they have to be", async () => {
  const schema = {
    type: "object",
    properties: { name: { type: "string", maxLength: 8 }, age: { type: "integer", minimum: 0, maximum: 20 } },
    required: ["name", "age"],
    additionalProperties: false,
  };
  const text = async (structure, more) =>
    (await model.generate("A cat: ", { structure, maxTokens: 100, ...more }).result).text;
  for (let seed = 0; seed < 4; seed++) {
    const { name, age, ...rest } = JSON.parse(await text({ json: schema }, { seed }));
    assert.ok(typeof name === "string" && age >= 0 && age <= 20, `${name} ${age}`);
    assert.deepEqual(rest, {});
    assert.match(await text({ regex: "[a-z]{3}-[0-9]{2}" }, { seed }), /^[a-z]{3}-[0-9]{2}$/);
    assert.match(await text({ choice: ["fox", "a cat"] }, { seed }), /^(fox|a cat)$/);
    assert.match(await text({ grammar: 'start: "The " /[a-z]{1,5}/ "."' }, { seed }), /^The [a-z]{1,5}\.$/);
  }
  assert.match(await text({ json: true }, { temperature: 0 }), /^\{/);

  for (const [structure, message] of [
    [{}, /structure has nothing, expected one of json/],
    [{ json: true, regex: "a" }, /structure has json, regex, expected one/],
    [{ yaml: "a" }, /structure has yaml/],
    [{ json: { type: "nonsense" } }, /^structure\.json: .*nonsense/],
    [{ json: [] }, /^structure\.json: is not a schema/],
    [{ regex: "[a-z" }, /^structure\.regex: .*unclosed character class/s],
    [{ choice: [] }, /^structure\.choice: has no texts/],
    [{ choice: "a" }, /^structure\.choice: .*expected a sequence/],
    [{ grammar: "root ::= a" }, /GBNF/],
    [{ regex: "a".repeat(70_000) }, /has 70000 bytes, expected at most 65536/],
  ]) {
    const wrong = (e) => e instanceof StarlingError && e.code === "request" && message.test(e.message);
    await assert.rejects(text(structure), wrong, JSON.stringify(structure).slice(0, 100));
  }
  await assert.rejects(text({ regex: "a" }, { receipt: true }), code("request"));
});

test("a crash of the grammar module ends the answers of its model that have a grammar, and no others", async () => {
  const length = { maxTokens: 200, ignoreEos: true, seed: 0 };
  const story = (options) => model.generate("Once upon a time", { ...length, ...options });
  // as deep as 64 KiB allow
  const name = (i) => `a${i.toString(36)}`;
  const deep = Array.from({ length: 5000 }, (_, i) => `${name(i)}:"x"${name(i + 1)}`).join("\n");
  const grammar = `start: a0\n${deep}\n${name(5000)}: "y"`;
  const [free, bound] = [story({}), story({ structure: { regex: "(.|\n)*" } })];
  const other = await load(TINY);
  const alike = () => other.generate("Once upon a time", { ...length, structure: { regex: "(.|\n)*" } });
  const beside = alike();
  await Promise.all([bound.tokens().next(), beside.tokens().next()]);
  await assert.rejects(story({ structure: { grammar } }).result, (e) => /structure.grammar: .*nested/.test(e.message));
  await assert.rejects(bound.result, (e) => e.code === "request" && /the grammar has failed/.test(e.message));
  assert.equal((await free.result).usage.completionTokens, 200);
  assert.equal((await beside.result).text, (await alike().result).text);
  other.dispose();
  assert.equal((await model.generate("A", { structure: { choice: ["fox"] } }).result).text, "fox");
});

test("answers that follow something wait for their turn, and can be given up", async () => {
  const asked = Array.from({ length: 12 }, (_, seed) =>
    model.generate("A cat", { structure: { regex: "[a-z ]{20}" }, seed, maxTokens: 40 }),
  );
  const reason = new Error("enough");
  const abort = new AbortController();
  const given = model.generate("A cat", { structure: { regex: "[a-z ]{20}" }, signal: abort.signal });
  abort.abort(reason);
  await assert.rejects(given.result, reason);
  for (const { result } of asked) assert.match((await result).text, /^[a-z ]{20}$/);
});

test("tools of OpenAI's form are rendered, checked and enforced", async () => {
  const { completions } = model.chat;
  const tools = [{ type: "function", function: { name: "f", parameters: { type: "object" } } }];
  const messages = [{ role: "user", content: "?" }];
  // where the page brings a template, that is what counts
  const chat_template = "{% for t in tools %}{{ t.function.name }}{% endfor %}{{ messages[0].content }}";
  const base = { messages, tools, chat_template, seed: 1 };
  const other = { type: "function", function: { name: "g" } };
  const form = { response_format: { type: "json_object" } };
  for (const [wrong, message] of [
    [{ tools: {} }, "tools is not a list"],
    [{ tools: [{}] }, "tools[0] is not a function with a name"],
    [{ tool_choice: other }, 'tool_choice asks for "g", which is not among the tools'],
    [{ tool_choice: "required", ...form }, "response_format is given, but tool_choice asks for a call"],
    [{ session_id: "a" }, "session_id is given, but the page has no sessions"],
    [{ temperature: "hot" }, 'temperature: invalid type: string "hot", expected f32'],
  ]) {
    const refused = (e) => code("request")(e) && e.message === message;
    await assert.rejects(completions.create({ ...base, ...wrong }), refused, JSON.stringify(wrong));
  }
  await assert.rejects(completions.create({ messages, tools }), code("unsupported"));
  const answer = await completions.create({ ...base, max_tokens: 4 });
  const options = { maxTokens: 4, seed: 1, temperature: 1, topK: 0, topP: 1, minP: 0, repeatLastN: -1 };
  const same = await model.chat(messages, { tools, template: chat_template, ...options }).result;
  assert.equal(answer.choices[0].message.content, same.text);

  const n = { enum: [1, 2] };
  const parameters = { type: "object", properties: { n }, required: ["n"], additionalProperties: false };
  const forced = {
    ...base,
    tools: [{ type: "function", function: { name: "f", parameters } }],
    tool_choice: "required",
    parallel_tool_calls: false,
    n: 2,
  };
  const { choices } = await completions.create(forced);
  const ids = new Set();
  for (const { message, finish_reason } of choices) {
    const [call, ...more] = message.tool_calls;
    assert.deepEqual([message.content, finish_reason, more], [null, "tool_calls", []]);
    assert.match(call.function.arguments, /^\{"n":[12]\}$/);
    ids.add(call.id);
  }
  assert.equal(ids.size, 2);
  const deltas = [];
  for await (const chunk of await completions.create({ ...forced, n: 1, stream: true }))
    for (const { index, function: part } of chunk.choices[0].delta.tool_calls ?? [])
      if (deltas[index]) deltas[index].arguments += part.arguments;
      else deltas[index] = { ...part };
  assert.deepEqual(
    deltas,
    choices[0].message.tool_calls.map((call) => call.function),
  );
});

test("leaving a stream of OpenAI's form stops all of its generations, and leaves no rejection to nobody", async () => {
  const request = { messages: [{ role: "user", content: "Tell me a story" }], stream: true, n: 2, ignore_eos: true };
  const abort = new AbortController();
  const stream = await model.chat.completions.create(request, { signal: abort.signal });
  for await (const { choices } of stream) if (choices[0].delta.content) break;
  abort.abort();
  assert.equal((await model.memory()).kvInUse, 0);
  const other = await load(TINY);
  for await (const { choices } of await other.chat.completions.create(request)) if (choices[0].delta.content) break;
  other.dispose();
  // where a rejection is found to be nobody's
  await new Promise((resolve) => setTimeout(resolve));
});

test("half a surrogate pair is U+FFFD everywhere", async () => {
  const options = { maxTokens: 8, temperature: 0 };
  const [broken, whole] = ["a\ud83d b\ude00 \\ud83d \u{1f600}", "a\ufffd b\ufffd \\ud83d \u{1f600}"];
  const same = async (answer) => assert.deepEqual(await answer(broken), await answer(whole));
  await same((text) => model.tokenize(text));
  await same(async (text) => (await model.generate(text, { ...options, stop: text }).result).text);
  await same(async (text) => (await model.chat([{ role: "user", content: text }], options).result).text);
  await same((text) => model.applyTemplate([{ role: "user", content: "" }], { variables: { [text]: text } }));
  assert.ok((await model.applyTemplate([{ role: "user", content: broken }])).text.includes(whole));
});

test("receipts", async () => {
  const { receipt, tokens } = await model.generate("Once", { maxTokens: 12, seed: 2n ** 63n, receipt: true }).result;
  assert.ok(receipt.includes('"seed":9223372036854775808'), "all of the seed");
  assert.deepEqual(await model.verify(receipt), { verified: true, tokens: tokens.length });
  const changed = { ...JSON.parse(receipt.replace("9223372036854775808", "7")) };
  assert.equal((await model.verify(JSON.stringify(changed))).verified, false);
  await assert.rejects(model.verify("{}"), code("request"));
  const late = new AbortController();
  const waiting = model.verify(receipt, late);
  late.abort(new Error("late"));
  await assert.rejects(waiting, /late/);
  await assert.rejects(model.embed("x", late), /late/);
});

test("a saved cache spares another model the prompt", async () => {
  const prompt = "Once upon a time there was a little bird that lived in a tree by the river. ".repeat(3);
  const options = { maxTokens: 20, seed: 4 };
  const saved = await model.saveCache(prompt);
  const want = await model.generate(prompt, options).result;
  const other = await load(TINY, { receipts: true });
  const tokens = await other.restoreCache(saved);
  assert.ok(tokens > 32 && tokens % 16 === 0);
  const { text, usage } = await other.generate(prompt, options).result;
  assert.equal(text, want.text);
  assert.equal(usage.cachedTokens, Math.floor((usage.promptTokens - 1) / 16) * 16);
  saved[saved.length - 1] ^= 1;
  await assert.rejects(other.restoreCache(saved), code("checksum"));
  await assert.rejects(other.restoreCache(new Uint8Array(10)), code("request"));
  other.dispose();
});

test("what is wrong is refused with a code", async () => {
  for (const [prompt, options, want] of [
    [[], {}, "request"],
    [[99999], {}, "request"],
    ["a", { topP: 2 }, "request"],
    ["a", { maxTokens: 0 }, "request"],
    ["a", { seed: -1 }, "request"],
    ["a", { seed: 1.5 }, "request"],
    ["a", { seed: 2n ** 64n }, "request"],
    ["a", { temperature: NaN }, "request"],
    ["a", { dry: { multiplier: 1, base: 0.5 } }, "request"],
  ]) {
    await assert.rejects(
      model.generate(prompt, options).result,
      code(want),
      JSON.stringify([prompt, String(options.seed)]),
    );
  }
  await assert.rejects(
    model.chat([{ role: "user", content: "x" }], { template: "{{ raise_exception('no') }}" }).result,
    code("template"),
  );
  await assert.rejects(model.detokenize([99999]), code("request"));
  await assert.rejects(model.embed([]), code("request"));
  // and the model goes on
  assert.equal((await model.generate("Once", { maxTokens: 2 }).result).tokens.length, 2);
});

test("many at once, more than there is room for, and aborts among them", async () => {
  const alone = [];
  for (let i = 0; i < 9; i++) alone.push((await model.generate(`Story ${i}:`, { maxTokens: 15, seed: i }).result).text);
  const abort = new AbortController();
  const doomed = Array.from({ length: 3 }, (_, i) =>
    model.generate(`Never ${i}`, { maxTokens: 300, ignoreEos: true, signal: abort.signal }).result.catch((e) => e.name),
  );
  const together = alone.map((_, i) =>
    model.generate(`Story ${i}:`, { maxTokens: 15, seed: i }).result.then((r) => r.text),
  );
  setTimeout(() => abort.abort(), 30);
  assert.deepEqual(await Promise.all(together), alone);
  assert.deepEqual(await Promise.all(doomed), ["AbortError", "AbortError", "AbortError"]);
  assert.equal((await model.memory()).kvInUse, 0);
});

test("a request that waits is tried again when another has ended or was aborted, not at each step", async () => {
  const { call } = Instance.prototype;
  let model;
  Instance.prototype.call = function (...args) {
    model ??= this.bindings.Model.prototype;
    return call.apply(this, args);
  };
  const one = await load(TINY);
  Instance.prototype.call = call;
  const { submit } = model;
  let tries = 0;
  model.submit = function (...args) {
    tries += 1;
    return submit.apply(this, args);
  };
  try {
    const options = { maxTokens: 40, ignoreEos: true };
    const first = one.generate("Once", { ...options, maxTokens: 300 });
    const rest = Array.from({ length: 5 }, () => one.generate("Once", options).result);
    let read = 0;
    // leaving the loop aborts it
    for await (const _ of first.tokens()) if (++read === 20) break;
    await Promise.all(rest);
    assert.ok(tries <= 12, `${tries} tries`);
  } finally {
    one.dispose();
  }
});

test("a model in several files is the same model", async () => {
  const whole = new Uint8Array(await readFile(TINY));
  const want = (await model.generate("Once upon a time", { maxTokens: 20, seed: 0 }).result).text;
  for (const n of [2, 3, 7]) {
    const files = split(whole, n).map((part) => new Blob([part]));
    const joined = await load(files, { receipts: true });
    assert.equal((await joined.generate("Once upon a time", { maxTokens: 20, seed: 0 }).result).text, want);
    assert.match(joined.info.sha256, /^[0-9a-f]{64}$/);
    joined.dispose();
  }
  const [first, second, third] = split(whole, 3).map((part) => new Blob([part]));
  await assert.rejects(load([first, third, second]), code("model"));
  await assert.rejects(load([first, second]), code("model"));
  await assert.rejects(load([first, second, third.slice(0, third.size - 40)]), code("model"));
  await assert.rejects(load(first), code("model"));
});

test("names of files on a hub, parts of a split model, and files that change on the way", async () => {
  const files = new Map();
  const asked = [];
  const real = globalThis.fetch;
  globalThis.fetch = async (url, { headers } = {}) => {
    asked.push(String(url));
    const { body, etag = "1", end } = files.get(String(url)) ?? {};
    if (!body) return new Response(null, { status: 404 });
    const from = Number(/bytes=(\d+)-/.exec(headers?.range ?? "")?.[1] ?? 0);
    const answer = { etag: typeof etag === "function" ? etag() : etag, "content-length": String(body.length - from) };
    return new Response(body.subarray(from, end), { status: from ? 206 : 200, headers: answer });
  };
  try {
    const whole = new Uint8Array(await readFile(TINY));
    const hub = "https://huggingface.co/owner/repo/resolve/main/";
    files.set(`${hub}dir/tiny.gguf`, { body: whole });
    (await load("hf:owner/repo/dir/tiny.gguf")).dispose();
    files.set(`${hub.replace("main", "v1.0")}tiny.gguf`, { body: whole });
    (await load("hf:owner/repo@v1.0/tiny.gguf")).dispose();

    for (const [i, body] of split(whole, 3).entries()) files.set(`${hub}m-0000${i + 1}-of-00003.gguf`, { body });
    const joined = await load("hf:owner/repo/m-00001-of-00003.gguf");
    const { text } = await joined.generate("Once", { maxTokens: 8, seed: 0 }).result;
    assert.equal(text, (await model.generate("Once", { maxTokens: 8, seed: 0 }).result).text);
    joined.dispose();
    files.delete(`${hub}m-00003-of-00003.gguf`);
    await assert.rejects(load("hf:owner/repo/m-00001-of-00003.gguf"), code("network"));

    let version = 0;
    files.set("https://a.example/changes.gguf", { body: whole, etag: () => String(version++), end: 1_000_000 });
    await assert.rejects(load("https://a.example/changes.gguf"), code("checksum"));
    await assert.rejects(
      load("hf:owner/repo/nothing.gguf"),
      (e) => code("network")(e) && /404/.test(e.message),
    );
    assert.equal(asked.at(-1), `${hub}nothing.gguf`);
  } finally {
    globalThis.fetch = real;
  }
});

test("embeddings", async () => {
  const embedder = await load(fixture("reference/bert-mean-f32.gguf"));
  const vector = await embedder.embed("The birds moved");
  assert.ok(Math.abs(Math.hypot(...vector) - 1) < 1e-5);
  await assert.rejects(embedder.generate("x").result, code("request"));
  embedder.dispose();
});

test("sources and modules that are not there or wrong, and models that are too large", async () => {
  await assert.rejects(load(new URL("file:///nothing.gguf")), code("network"));
  await assert.rejects(load("nothing.gguf"), code("network"));
  await assert.rejects(load(new Blob(["<!doctype html>"])), code("model"));
  const stream = () => new ReadableStream({ pull: (c) => c.enqueue(new Uint8Array(10)) });
  await assert.rejects(load(stream(), { size: 2 ** 34 }), code("memory"));
  await assert.rejects(load(stream(), { size: 2 ** 32, memory64: false }), code("memory"));
  if (!Starling.features().memory64) {
    const refused = (e) => code("memory")(e) && /room for 3600000000, and this runtime has no memory64/.test(e.message);
    await assert.rejects(load(stream(), { size: 2 ** 32 }), refused);
    await assert.rejects(load(TINY, { memory64: true }), code("unsupported"));
  }
  await assert.rejects(load(TINY, { wasm: new Uint8Array(8) }), code("request"));
  await assert.rejects(load(TINY, { wasm: "relative.wasm" }), code("request"));
  await assert.rejects(
    load(TINY, { wasm: Uint8Array.of(0, 97, 115, 109, 9, 0, 0, 0) }),
    (e) => code("unsupported")(e) && e.cause instanceof WebAssembly.CompileError,
  );
  const reason = new Error("enough");
  await assert.rejects(load(TINY, { signal: AbortSignal.abort(reason) }), (e) => e === reason);
});

test("a stream of no known length is told of, and ends where it becomes too large", async () => {
  const progress = [];
  const pieces = new Blob([await readFile(TINY)]).stream();
  const other = await load(pieces, { onProgress: (p) => progress.push(p) });
  other.dispose();
  assert.equal(progress.at(-1).loaded, progress.at(-1).total);

  let cancelled = false;
  const capacity = capacityOf({ isMemory64: false, isOwn: false, memory64: false, isSupported: true });
  const endless = new ReadableStream({
    pull: (c) => c.enqueue(new Uint8Array(1 << 20)),
    // a source that never says that it has stopped
    cancel: () => new Promise(() => (cancelled = true)),
  });
  await assert.rejects(
    openPart({ stream: endless, size: undefined }, {}, undefined, countFitting(capacity, 3.6e9 - 5e6)),
    (e) => code("memory")(e) && /at least 36\d+ bytes/.test(e.message),
  );
  assert.ok(cancelled);
});

test("streams of every form are read by the module, to the end or to the abort", async () => {
  const bytes = new Uint8Array(await readFile(TINY));
  const write = { maxTokens: 8, temperature: 0 };
  const want = (await model.generate("Once", write).result).text;
  /** A stream of what `chunk` makes of pieces of `size` bytes. */
  const stream = (size, chunk, more = {}) => {
    let from = 0;
    return new ReadableStream({
      pull(controller) {
        if (from >= bytes.length) return controller.close();
        controller.enqueue(chunk(bytes.slice(from, from + size)));
        from += size;
      },
      ...more,
    });
  };
  const forms = {
    "bytes": stream(300_001, (piece) => piece, { type: "bytes" }),
    "a chunk that is larger than the module's buffer": stream(3 << 20, (piece) => piece),
    "other views": stream(1 << 16, ({ buffer }) => new DataView(buffer)),
    "empty chunks too": stream(1 << 20, (piece) => piece).pipeThrough(
      new TransformStream({
        transform(piece, controller) {
          controller.enqueue(piece);
          controller.enqueue(new Uint8Array());
        },
      }),
    ),
  };
  for (const [form, source] of Object.entries(forms)) {
    const other = await load(source, { size: bytes.length });
    assert.equal((await other.generate("Once", write).result).text, want, form);
    other.dispose();
  }
  await assert.rejects(
    load(stream(1 << 20, () => "text"), { size: bytes.length }),
    (e) => code("network")(e) && /a chunk of the stream is of type string, expected a Uint8Array/.test(e.message),
  );
  // a source that says no more, after half of the file
  for (const type of [undefined, "bytes"]) {
    const abort = new AbortController();
    let cancelled = false;
    let pulls = 0;
    const half = new ReadableStream({
      type,
      pull(controller) {
        if (pulls++ === 0) return controller.enqueue(bytes.slice(0, bytes.length / 2));
        setTimeout(() => abort.abort(new Error("enough")), 20);
        return new Promise(() => {});
      },
      cancel: () => void (cancelled = true),
    });
    await assert.rejects(load(half, { size: bytes.length, signal: abort.signal }), /^Error: enough$/);
    assert.ok(cancelled, String(type));
  }
});

test("a trap in a future of the module is a crash of its model", async () => {
  // what copies a chunk into the module, between two calls of the package
  const { set } = Uint8Array.prototype;
  Uint8Array.prototype.set = function (from, at) {
    if (from.length > 1 << 14) throw new WebAssembly.RuntimeError("unreachable");
    set.call(this, from, at);
  };
  try {
    await assert.rejects(load(TINY), (e) => code("crashed")(e) && /unreachable/.test(e.message));
  } finally {
    delete Uint8Array.prototype.set;
  }
  const other = await load(TINY);
  other.dispose();
});

test("a disposed model says so", async () => {
  const other = await load(TINY);
  const running = other.generate("Once", { maxTokens: 400, ignoreEos: true }).result;
  other.dispose();
  other.dispose();
  await assert.rejects(running, code("disposed"));
  await assert.rejects(other.generate("Once").result, code("disposed"));
  await assert.rejects(other.memory(), code("disposed"));
});

test("an error in a file of a split model names that file", async () => {
  const files = split(new Uint8Array(await readFile(TINY)), 3).map((part, i) => new File([part], `${i + 1}.gguf`));
  const names = (want) => (e) => code("model")(e) && want.test(e.message);
  const [first, second, third] = files;
  await assert.rejects(load([first, new File(["no model"], "second"), third]), names(/^second: GGUF: magic/));
  // the same number in two files
  const again = new File([second], "again.gguf");
  await assert.rejects(load([first, second, again]), names(/^again\.gguf: metadata `split\.no`: found 1/));
  const short = new File([third.slice(0, third.size - 40)], "short.gguf");
  await assert.rejects(load([first, second, short]), names(/^short\.gguf: /));
});

test("a model that crashes says so, and ends no other", async () => {
  const long = { maxTokens: 400, ignoreEos: true, seed: 0 };
  const crashing = await load(TINY, { sequences: 4 });
  const left = await load(TINY, { sequences: 2 });
  const want = await left.generate("Once", long).result;
  const running = crashing.generate("Once", long).result;
  const beside = Array.from({ length: 4 }, () => left.generate("Once", long).result);
  const abort = new AbortController();
  const aborted = crashing.generate("Once", { ...long, signal: abort.signal }).result;
  const unread = crashing.generate("Once", long)[Symbol.asyncIterator]();
  await unread.next();
  const crashed = (e) => code("crashed")(e) && /crash on request/.test(e.message);
  await assert.rejects(crashing.crash(), crashed);
  // before the next step finds out
  abort.abort();
  await assert.rejects(aborted, { name: "AbortError" });
  await unread.return();
  await assert.rejects(running, crashed);
  await assert.rejects(crashing.memory(), crashed);
  crashing.dispose();
  for (const one of beside) assert.equal((await one).text, want.text);
  const later = await load(TINY);
  assert.equal((await later.generate("Once", long).result).text, want.text);
  later.dispose();
  left.dispose();
});
