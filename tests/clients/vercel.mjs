// Vercel's AI SDK against a server: node vercel.mjs BASE_URL MODEL
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, embedMany, generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const [baseURL, id] = process.argv.slice(2);
const compatible = createOpenAICompatible({ name: "starling", baseURL, supportsStructuredOutputs: true, includeUsage: true });
const openai = createOpenAI({ baseURL, apiKey: "none" });
const anthropic = createAnthropic({ baseURL, apiKey: "none" });

const inputSchema = z.object({ city: z.enum(["Oslo", "Rome"]), days: z.int().min(1).max(9) });
const weather = ({ city, days }) => `${days} days in ${city}`;
const tools = { weather: tool({ inputSchema, execute: weather }) };
// the small model does not call tools by itself
const toolChoice = { type: "tool", toolName: "weather" };

async function all(stream) {
  const pieces = [];
  for await (const piece of stream) pieces.push(piece);
  return pieces;
}

const ask = { prompt: "Hi", temperature: 0, maxRetries: 0 };
// what the APIs answer, which must be the same
const answers = new Set();
for (const model of [compatible(id), openai.chat(id), openai.responses(id), anthropic(id)]) {
  const short = { ...ask, model, maxOutputTokens: 12 };
  const long = { ...ask, model, maxOutputTokens: 200 };

  const answer = await generateText(short);
  const streamed = streamText(short);
  assert.equal((await all(streamed.textStream)).join(""), answer.text);
  assert.equal(await streamed.finishReason, answer.finishReason);
  const { inputTokens, outputTokens } = await streamed.usage;
  assert.deepEqual([inputTokens, outputTokens], [answer.usage.inputTokens, answer.usage.outputTokens]);

  const { object } = await generateObject({ ...long, schema: inputSchema });
  inputSchema.parse(object);
  const parts = streamText({ ...long, output: Output.object({ schema: inputSchema }) });
  assert.deepEqual((await all(parts.partialOutputStream)).at(-1), object);

  const called = await generateText({ ...long, tools, toolChoice });
  const streamedCall = streamText({ ...long, tools, toolChoice });
  for (const [calls, results] of [
    [called.toolCalls, called.toolResults],
    [await streamedCall.toolCalls, await streamedCall.toolResults],
  ]) {
    assert.deepEqual([calls.length, calls[0].toolName], [1, "weather"]);
    assert.equal(results[0].output, weather(calls[0].input));
  }
  // the call and its result in the messages of the second request
  const messages = [{ role: "user", content: ask.prompt }, ...called.response.messages];
  assert.deepEqual(messages.map(({ role }) => role), ["user", "assistant", "tool"]);
  const { prompt, ...rest } = short;
  const second = await generateText({ ...rest, messages, tools, toolChoice: "none" });
  assert.ok(second.usage.inputTokens > inputTokens);
  answers.add(`${answer.text} ${second.usage.inputTokens} ${second.text}`);

  await assert.rejects(generateText({ ...short, maxOutputTokens: 9, prompt: "dog ".repeat(9000) }), (e) => {
    assert.ok(APICallError.isInstance(e));
    assert.deepEqual([e.statusCode, e.isRetryable], [400, false]);
    assert.match(e.message, /maximum context length/);
    return true;
  });
}
assert.equal(answers.size, 1);

const { embeddings } = await embedMany({ model: compatible.embeddingModel(id), values: ["a", "b"] });
assert.deepEqual(embeddings.map(({ length }) => length), [256, 256]);
