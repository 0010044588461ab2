// OpenAI's Node client against a server: node openai.mjs BASE_URL MODEL
import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });

const models = [];
for await (const of of client.models.list()) models.push(of.id);
assert.deepEqual(models, [model]);

const ask = { model, messages: [{ role: "user", content: "Hi" }], max_tokens: 12, seed: 3 };
const whole = await client.chat.completions.create({ ...ask, logprobs: true, top_logprobs: 2, n: 2 });
assert.equal(whole.choices.length, 2);
assert.equal(whole.choices[0].logprobs.content[0].top_logprobs.length, 2);

let text = "";
let usage = null;
for await (const chunk of await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } })) {
  text += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
assert.equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens);

// the stream helper joins the chunks and validates them
const helper = client.chat.completions.stream(ask);
assert.equal(await helper.finalContent(), text);

const completion = await client.completions.create({ model, prompt: "Once upon a time", max_tokens: 200, temperature: 0, stop: ["Lena"] });
assert.equal(completion.choices[0].finish_reason, "stop");
assert.ok(!completion.choices[0].text.includes("Lena"));

// the client requests base64 by default
const vectors = await client.embeddings.create({ model, input: ["a", "b"] });
const plain = await client.embeddings.create({ model, input: "a", encoding_format: "float" });
assert.deepEqual([...vectors.data[0].embedding].map(Math.fround), plain.data[0].embedding.map(Math.fround));

for (const [wrong, kind, code, param] of [
  [{ model: "x" }, OpenAI.NotFoundError, "model_not_found", "model"],
  [{ messages: [] }, OpenAI.BadRequestError, null, "messages"],
  [{ messages: [{ role: "user", content: "far ".repeat(5000) }] }, OpenAI.BadRequestError, "context_length_exceeded", "messages"],
]) {
  await assert.rejects(client.chat.completions.create({ ...ask, ...wrong }), (e) => {
    assert.ok(e instanceof kind);
    assert.deepEqual([e.code, e.param], [code, param]);
    assert.ok(e.requestID);
    return true;
  });
}

// a client that disconnects
const stream = await client.chat.completions.create({ ...ask, max_tokens: 400, stream: true });
for await (const _ of stream) break;
