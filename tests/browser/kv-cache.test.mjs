// Conversations survive a reload: KV pages in the origin private file system, in Chromium. After web/build.sh.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { blank, open } from "./browser.mjs";

const MODEL = "/fixtures/starling-tiny/starling-tiny-q8_0.gguf";
const OTHER = "/fixtures/starling-tiny/starling-tiny-q4_0.gguf";
const RECURRENT = "/fixtures/reference/qwen35-f32.gguf";
const FIRST = "Tell me a story of a fox and a bird that live in a tree by the river. ".repeat(4);

let b;
before(async () => (b = await open()));
after(() => b.close());

const load = (page, options = {}, model = MODEL) =>
  page.evaluate(
    async ([model, options]) => {
      globalThis.model = await globalThis.Starling.load(model, { kvCache: true, ...options });
    },
    [model, options],
  );

/** Answers a conversation greedily, or as a chat completion. */
const answer = (page, messages, form = "chat") =>
  page.evaluate(
    async ([messages, form]) => {
      if (form === "chat") {
        const { text, usage } = await model.chat(messages, { maxTokens: 40, temperature: 0 }).result;
        return { text, cached: usage.cachedTokens, prompt: usage.promptTokens };
      }
      const { choices, usage } = await model.chat.completions.create({ messages, max_tokens: 40, temperature: 0 });
      const { cached_tokens: cached } = usage.prompt_tokens_details;
      return { text: choices[0].message.content, cached, prompt: usage.prompt_tokens };
    },
    [messages, form],
  );

/** Waits until all new pages are stored. */
const stored = (page) =>
  page.evaluate(async () => {
    let before = -1;
    for (;;) {
      const { kvStored } = await model.memory();
      if (kvStored > 0 && kvStored === before) return kvStored;
      before = kvStored;
      await new Promise((resolve) => setTimeout(resolve, 100));
    }
  });

async function reload(page) {
  await page.reload();
  await page.waitForFunction(() => globalThis.Starling);
}

const user = (content) => ({ role: "user", content });
const assistant = (content) => ({ role: "assistant", content });

/** A second turn whose first was answered before, and its answer without a cache. */
async function conversation(page) {
  await load(page, { kvCache: false });
  const first = await answer(page, [user(FIRST)]);
  const messages = [user(FIRST), assistant(first.text), user("Go on.")];
  const want = await answer(page, messages);
  assert.equal((await page.evaluate(() => model.memory())).kvStored, 0);
  await page.evaluate(() => model.dispose());
  await page.evaluate(async () => globalThis.Starling.kvCache.clear());
  return { messages, want };
}

/** Overwrites bytes in the middle of every slot but the first. */
const damage = (page) =>
  page.evaluate(async () => {
    const directory = await (await navigator.storage.getDirectory()).getDirectoryHandle("starling-kv");
    for await (const handle of directory.values()) {
      const { size } = await handle.getFile();
      const stream = await handle.createWritable({ keepExistingData: true });
      for (let at = size / 3; at < size; at += 1000) await stream.write({ type: "write", position: at, data: "damage" });
      await stream.close();
    }
  });

for (const form of ["chat", "completions"]) {
  test(`the next turn after a reload takes the conversation from disk: ${form}`, async () => {
    const page = await blank(b);
    const { messages, want } = await conversation(page);
    await load(page);
    assert.deepEqual((await answer(page, messages.slice(0, 1), form)).text, messages[1].content);
    const bytes = await stored(page);
    assert.ok(bytes > 0);
    await reload(page);
    await load(page);
    const { text, cached } = await answer(page, messages, form);
    assert.equal(text, want.text);
    assert.ok(cached > want.prompt / 2, `${cached} of ${want.prompt} prompt tokens were cached`);
    // and again, with the pages of this turn
    await stored(page);
    await reload(page);
    await load(page);
    const again = await answer(page, messages, form);
    assert.equal(again.text, want.text);
    assert.equal(again.cached, Math.floor((want.prompt - 1) / 16) * 16);
    assert.equal((await page.evaluate(() => model.memory())).kvRefused, 0);
    await page.evaluate(async () => {
      model.dispose();
      await globalThis.Starling.kvCache.clear();
    });
    await page.close();
  });
}

test("a model with recurrent layers continues from a snapshot on disk", async () => {
  const page = await blank(b);
  const generate = (prompt) =>
    page.evaluate(async (prompt) => {
      const { text, usage } = await model.generate(prompt, { maxTokens: 20, temperature: 0 }).result;
      return { text, cached: usage.cachedTokens, prompt: usage.promptTokens };
    }, prompt);
  await load(page, { kvCache: false }, RECURRENT);
  const want = await generate(`${FIRST} Go on.`);
  await page.evaluate(() => model.dispose());
  await load(page, {}, RECURRENT);
  const first = await generate(FIRST);
  await stored(page);
  for (const isDamaged of [false, true]) {
    await reload(page);
    if (isDamaged) await damage(page);
    await load(page, {}, RECURRENT);
    const { text, cached } = await generate(`${FIRST} Go on.`);
    assert.equal(text, want.text);
    if (!isDamaged) assert.ok(cached + 32 > first.prompt, `${cached} of ${first.prompt} prompt tokens were cached`);
    else assert.equal(cached, 0);
    await stored(page);
  }
  await page.evaluate(async () => {
    model.dispose();
    await globalThis.Starling.kvCache.clear();
  });
  await page.close();
});

test("damaged pages, foreign files and other models' pages change no text", async () => {
  const page = await blank(b);
  const { messages, want } = await conversation(page);
  await load(page);
  await answer(page, messages);
  await stored(page);
  await reload(page);
  await damage(page);
  await page.evaluate(async () => {
    const directory = await (await navigator.storage.getDirectory()).getDirectoryHandle("starling-kv");
    await directory.getDirectoryHandle("folder", { create: true });
    const stream = await (await directory.getFileHandle("notes.txt", { create: true })).createWritable();
    await stream.write("not a page");
    await stream.close();
  });
  await load(page);
  const damaged = await answer(page, messages);
  assert.equal(damaged.text, want.text);
  const { kvRefused } = await page.evaluate(() => model.memory());
  assert.ok(kvRefused > 0, "no page was refused");
  const names = await page.evaluate(async () => {
    const directory = await (await navigator.storage.getDirectory()).getDirectoryHandle("starling-kv");
    return Array.fromAsync(directory.keys());
  });
  assert.ok(names.length === 1 && /^[0-9a-f]{64}\.pages$/.test(names[0]), names.join());
  // what was damaged was written anew
  await stored(page);
  await reload(page);
  await load(page);
  const again = await answer(page, messages);
  assert.deepEqual([again.text, again.cached], [want.text, Math.floor((want.prompt - 1) / 16) * 16]);
  // the file of one model under the name of another
  await page.evaluate(() => model.dispose());
  await load(page, {}, OTHER);
  const other = await answer(page, messages);
  await page.evaluate(() => model.dispose());
  await reload(page);
  await page.evaluate(async () => {
    const directory = await (await navigator.storage.getDirectory()).getDirectoryHandle("starling-kv");
    const handles = await Array.fromAsync(directory.values());
    const bytes = await Promise.all(handles.map(async (handle) => (await handle.getFile()).arrayBuffer()));
    for (const [i, handle] of handles.entries()) {
      const stream = await handle.createWritable();
      await stream.write(bytes[(i + 1) % bytes.length]);
      await stream.close();
    }
  });
  await load(page, {}, OTHER);
  assert.equal((await answer(page, messages)).text, other.text);
  await page.evaluate(() => model.dispose());
  await load(page);
  assert.equal((await answer(page, messages)).text, want.text);
  await page.evaluate(async () => {
    model.dispose();
    await globalThis.Starling.kvCache.clear();
  });
  await page.close();
});

test("the quota holds, a second tab works without the pages, and they can be removed", async () => {
  const page = await blank(b);
  const { messages, want } = await conversation(page);
  await load(page);
  await answer(page, messages);
  const all = await stored(page);
  await reload(page);
  const maxBytes = Math.floor(all / 3);
  await load(page, { kvCache: { maxBytes } });
  assert.equal((await answer(page, messages)).text, want.text);
  assert.equal((await answer(page, [user("Who are you?")])).text.length > 0, true);
  assert.ok((await stored(page)) <= maxBytes);
  const second = await blank(b);
  await load(second);
  const beside = await answer(second, messages);
  assert.deepEqual([beside.text, beside.cached], [want.text, 0]);
  assert.equal((await second.evaluate(() => model.memory())).kvStored, 0);
  await second.close();
  await page.evaluate(() => model.clearKvCache());
  assert.equal((await page.evaluate(() => model.memory())).kvStored, 0);
  await page.evaluate(() => model.dispose());
  // without the storage
  await page.evaluate(() => delete FileSystemFileHandle.prototype.createSyncAccessHandle);
  await load(page, { worker: false, threads: 1 });
  assert.equal((await answer(page, messages)).text, want.text);
  await page.close();
});
