// The package in Node as it is loaded by default, in a worker: sources, options, drafts. After web/build.sh.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { open, stat } from "node:fs/promises";
import { relative } from "node:path";
import { performance } from "node:perf_hooks";
import { after, before, test } from "node:test";
import { fileURLToPath, pathToFileURL } from "node:url";

import { Starling, StarlingError } from "../../web/dist/index.js";

const fixture = (name) => fileURLToPath(new URL(`../../fixtures/${name}`, import.meta.url));
const TINY = fixture("starling-tiny/starling-tiny-q8_0.gguf");
const refused = (message) => (e) => e instanceof StarlingError && e.code === "request" && message.test(e.message);
const story = { maxTokens: 30, temperature: 0 };
/** A prompt of several batches. */
const LONG = "Once upon a time there was a little bird that lived in a tree by the river. ".repeat(12);

let model;
let text;
before(async () => {
  model = await Starling.load(TINY);
  text = (await model.generate("Once upon a time", story).result).text;
});
after(() => model.dispose());

test("a worker computes, and the event loop stays free", async () => {
  assert.equal(model.info.worker, true);
  const before = performance.eventLoopUtilization();
  await model.generate(LONG, { maxTokens: 100, ignoreEos: true }).result;
  const { utilization } = performance.eventLoopUtilization(before);
  assert.ok(utilization < 0.5, `the event loop was busy for ${utilization}`);
});

test("there is one thread, which does not depend on what is asked for", async () => {
  const other = await Starling.load(TINY, { threads: 2 });
  assert.equal(other.info.threads, 1);
  assert.equal((await other.generate("Once upon a time", story).result).text, text);
  other.dispose();
});

test("without a worker, the event loop has its turn within a prompt", async () => {
  const other = await Starling.load(TINY, { worker: false });
  assert.equal(other.info.worker, false);
  const turns = [];
  const turn = setInterval(() => turns.push(performance.now()), 1);
  const { text, timings } = await other.generate(LONG, story).result;
  clearInterval(turn);
  assert.equal(text, (await model.generate(LONG, story).result).text);
  assert.ok(turns.length >= timings.promptMs / 100, `${turns.length} turns in ${timings.promptMs} ms`);
  other.dispose();
});

test("a process ends when it has nothing more to do", () => {
  const index = new URL("../../web/dist/index.js", import.meta.url);
  const script = `import { Starling } from ${JSON.stringify(index.href)};
    const model = await Starling.load(${JSON.stringify(TINY)});
    console.log((await model.generate("Once upon a time", { maxTokens: 30, temperature: 0 }).result).text);`;
  const said = execFileSync(process.execPath, ["--input-type=module", "-e", script], { encoding: "utf8", timeout: 60_000 });
  assert.equal(said.trimEnd(), text.trimEnd());
});

test("paths, file URLs and handles are sources", async () => {
  const handle = await open(TINY);
  for (const source of [relative(process.cwd(), TINY), pathToFileURL(TINY), pathToFileURL(TINY).href, handle]) {
    const other = await Starling.load(source, { threads: 1 });
    assert.equal((await other.generate("Once upon a time", story).result).text, text, String(source));
    other.dispose();
  }
  await handle.close();
  await assert.rejects(Starling.load("/no/such.gguf"), (e) => e.code === "network" && /\/no\/such\.gguf/.test(e.message));
  for (const name of ["hf:nope", "hf:owner/repo", "hf:owner/repo/"])
    await assert.rejects(Starling.load(name), refused(/expected hf:owner\/repo\/file\.gguf/), name);
});

test("options with another name or type are refused, and the right name is told", async () => {
  for (const [options, message] of [
    [{ max_tokens: 3 }, /no option max_tokens, did you mean maxTokens\?/],
    [{ temp: 1 }, /no option temp, did you mean temperature\?/],
    [{ top_k: 1 }, /did you mean topK\?/],
    [{ repetition_penalty: 1 }, /did you mean repeatPenalty\?/],
    [{ temprature: 1 }, /did you mean temperature\?/],
    [{ colour: "red" }, /no option colour; the options are logitBias, /],
    [{ maxTokens: "3" }, /maxTokens is "3", expected a whole number/],
    [{ stop: 3 }, /stop is 3, expected a text or an array/],
  ])
    await assert.rejects(model.generate("a", options).result, refused(message), JSON.stringify(options));
  await assert.rejects(model.chat("a", { chat_template: "" }).result, refused(/did you mean template\?/));
  await assert.rejects(model.applyTemplate("a", { tool: [] }), refused(/did you mean tools\?/));
  await assert.rejects(Starling.load(TINY, { contextLenght: 3 }), refused(/did you mean contextLength\?/));
  await assert.rejects(Starling.load(TINY, { n_ctx: 3 }), refused(/did you mean contextLength\?/));
  await assert.rejects(Starling.load(TINY, { kvCache: { maxBytes: "1" } }), refused(/kvCache\.maxBytes/));
  assert.equal((await model.generate("Once upon a time", { ...story, topK: undefined }).result).text, text);
});

test("an answer that is no longer read is a part", async () => {
  const answer = model.generate("Once upon a time", { ...story, maxTokens: 400, ignoreEos: true });
  let read = "";
  for await (const piece of answer) if ((read += piece).length > 20) break;
  const { finishReason, text: part, tokens, usage } = await answer.result;
  assert.equal(finishReason, "cancelled");
  assert.ok(part.startsWith(read) && text.startsWith(read));
  assert.deepEqual([tokens.length, usage.promptTokens > 0], [usage.completionTokens, true]);
  const abort = new AbortController();
  const aborted = model.generate("Once", { signal: abort.signal });
  abort.abort(new Error("enough"));
  await assert.rejects(aborted.result, /enough/);
});

test("a text is a message of the user", async () => {
  const messages = [{ role: "user", content: "Who are you?" }];
  assert.deepEqual(await model.applyTemplate("Who are you?"), await model.applyTemplate(messages));
  assert.equal((await model.chat("Who are you?", story).result).text, (await model.chat(messages, story).result).text);
});

test("a limit above the context is cut to it", async () => {
  const { finishReason, usage } = await model.generate("Once", { maxTokens: 5000, ignoreEos: true, seed: 1 }).result;
  assert.equal(finishReason, "length");
  assert.equal(usage.promptTokens + usage.completionTokens, model.info.contextLength + 1);
});

test("a seed is random, and told", async () => {
  const options = { maxTokens: 40, temperature: 1 };
  const [one, two] = await Promise.all([1, 2].map(() => model.generate("Once", options).result));
  assert.notEqual(one.seed, two.seed);
  assert.equal((await model.generate("Once", { ...options, seed: one.seed }).result).text, one.text);
  const ask = (body) => model.chat.completions.create({ messages: [{ role: "user", content: "Hi" }], max_tokens: 20, ...body });
  const first = await ask({});
  assert.notEqual(first.seed, (await ask({})).seed);
  const [choice] = (await ask({ seed: first.seed })).choices;
  assert.equal(choice.message.content, first.choices[0].message.content);
});

test("a draft model changes no byte", async () => {
  const draftModel = fixture("starling-tiny/starling-tiny-q4_0.gguf");
  const progress = [];
  const onProgress = ({ loaded, total }) => progress.push([loaded, total]);
  const drafting = await Starling.load(TINY, { draftMax: 8, draftModel, onProgress });
  const sizes = await Promise.all([TINY, draftModel].map(async (file) => (await stat(file)).size));
  const all = sizes[0] + sizes[1];
  assert.deepEqual(progress.at(-1), [all, all]);
  let drafted = 0;
  for (const options of [{ temperature: 0 }, { seed: 5, temperature: 1 }]) {
    const ask = (m) => m.generate("The little robot", { maxTokens: 120, ignoreEos: true, ...options }).result;
    const [want, found] = [await ask(model), await ask(drafting)];
    assert.deepEqual([found.text, found.tokens], [want.text, want.tokens]);
    drafted += found.usage.draftTokens;
  }
  assert.ok(drafted > 0, "no token was drafted");
  drafting.dispose();
});

test("what cannot draft is refused", async () => {
  const load = (options) => Starling.load(TINY, { draftMax: 8, ...options });
  await assert.rejects(load({ draftMtp: true }), /expected a layer for multi-token prediction/);
  await assert.rejects(load({ draftMtp: true, draftModel: TINY }), /expected one of them/);
  await assert.rejects(load({ draftModel: fixture("reference/mistral-hd32-f16.gguf") }), /vocabulary of \d+ tokens, expected/);
});

test("drafts change no byte", async () => {
  const plain = await Starling.load(TINY, { draftMax: 0, receipts: true });
  const drafting = await Starling.load(TINY, { draftMax: 8, receipts: true });
  const prompt = "The dog ran and the cat sat. ".repeat(6);
  let drafted = 0;
  for (const options of [
    { temperature: 0 },
    { seed: 5 },
    { seed: 6, temperature: 1.5, topK: 0, topP: 1, minP: 0 },
    { temperature: 0, repeatPenalty: 1.3, logprobs: 2 },
    { seed: 7, structure: { regex: "(The (dog|cat) [a-z ]{3,9}\\. ){5}" } },
    { seed: 8, stop: "ran", receipt: true },
  ]) {
    const [want, found] = await Promise.all(
      [plain, drafting].map((m) => m.generate(prompt, { maxTokens: 60, ignoreEos: true, ...options }).result),
    );
    assert.deepEqual([found.text, found.tokens, found.receipt], [want.text, want.tokens, want.receipt]);
    assert.equal(want.usage.draftTokens, 0);
    drafted += found.usage.draftTokens;
  }
  assert.ok(drafted > 0, "no token was drafted");
  plain.dispose();
  drafting.dispose();
});
