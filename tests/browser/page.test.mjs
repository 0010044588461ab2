// The page of a server: with scripted answers, and that of the command. `node --test tests/browser/page.test.mjs`.

import assert from "node:assert/strict";
import { readFile, readdir } from "node:fs/promises";
import { createRequire } from "node:module";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import { brotliCompressSync, gzipSync } from "node:zlib";

import { chromium } from "playwright-core";

import { startServer } from "../node/command.mjs";
import { TINY, executablePath } from "./browser.mjs";
import { CALLING, RICH, mock, model } from "./mock.mjs";

const root = fileURLToPath(new URL("../../", import.meta.url));
let browser;
before(async () => (browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] })));
after(() => browser.close());

/** A page of an origin; errors of scripts, of the content policy and requests to other origins fail `close`. */
async function visit(origin, options = {}) {
  const context = await browser.newContext({ permissions: ["clipboard-read", "clipboard-write"], ...options });
  const page = await context.newPage();
  const errors = [];
  page.on("pageerror", (e) => errors.push(e.stack ?? e.message));
  page.on("console", (m) => m.type() === "error" && /policy|Uncaught/i.test(m.text()) && errors.push(m.text()));
  page.on("request", (r) => {
    if (!r.url().startsWith(origin) && !/^(blob|data):/.test(r.url())) errors.push(`asks for ${r.url()}`);
  });
  await page.goto(origin);
  const close = async () => {
    await context.close();
    assert.deepEqual(errors, []);
  };
  return { page, close };
}

const readAxe = () => readFile(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");

const said = (page, text) =>
  page.waitForFunction((text) => document.getElementById("status").textContent.includes(text), text);

async function ask(page, text, end = "tokens: ") {
  await page.evaluate(() => (document.getElementById("status").textContent = ""));
  await page.fill("#message", text);
  await page.press("#message", "Enter");
  await said(page, end);
}

/** Visits a page with scripted answers. */
async function scripted(start, options) {
  const server = await mock(start);
  const { page, close } = await visit(server.origin, options);
  return {
    server,
    page,
    close: async () => {
      await close();
      await server.close();
    },
  };
}

const body = (page) => page.locator(".message.assistant .text").last();
const press = (page, name) => page.locator(".message").getByRole("button", { name, exact: true }).last().click();

test("an answer is shown with its reasoning folded, code that can be copied, its seed and speed", async () => {
  const { page, server, close } = await scripted({ answers: [RICH] });
  await said(page, "is ready");
  await ask(page, "Reverse a list.");
  assert.equal(await page.locator(".reasoning").evaluate((details) => details.open), false);
  await page.click(".reasoning summary");
  assert.match(await page.locator(".reasoning").textContent(), /three references/);
  assert.equal(await page.locator(".code .k").first().textContent(), "class");
  await page.locator(".code").getByRole("button", { name: "Copy" }).click();
  const copied = await page.evaluate(() => navigator.clipboard.readText());
  assert.match(copied, /^class Node:\n {4}def __init__/);
  await page.locator(".message.assistant > .actions").getByRole("button", { name: "Copy" }).click();
  assert.equal(await page.evaluate(() => navigator.clipboard.readText()), RICH.text);
  assert.match(await page.locator(".message .facts").textContent(), /\d+ tokens.*tokens\/s.*seed 4231/);
  // what the server was asked for
  const { messages, temperature, top_k, receipt, stream, model: asked } = server.bodies[0];
  assert.deepEqual(messages, [{ role: "user", content: "Reverse a list." }]);
  assert.deepEqual(
    { temperature, top_k, receipt, stream, asked },
    { temperature: 0.7, top_k: 20, receipt: true, stream: true, asked: "qwen3-4b-q4_k_m" },
  );
  // numbers of 64 bits in a receipt are those that the server sent
  const [download] = await Promise.all([page.waitForEvent("download"), press(page, "Save receipt")]);
  assert.match(await readFile(await download.path(), "utf8"), /"seed":18446744073709551615\b/);
  await close();
});

test("answers and edits are branches, which stay after a reload", async () => {
  const answers = ["one", "two", "three"].map((text) => ({ text }));
  const { page, server, close } = await scripted({ answers });
  await said(page, "is ready");
  await ask(page, "Count.");
  const number = () => page.locator(".branches .numbers").last().textContent();
  await press(page, "Again");
  await page.waitForFunction(() => /two/.test(document.getElementById("messages").textContent));
  assert.equal(await number(), "2/2");
  await press(page, "Branch before");
  assert.equal((await body(page).textContent()).trim(), "one");
  await press(page, "Edit");
  await page.getByLabel("Edited message").fill("Count on.");
  await press(page, "Send");
  await page.waitForFunction(() => /three/.test(document.getElementById("messages").textContent));
  await said(page, "tokens: ");
  assert.deepEqual(server.bodies.at(-1).messages, [{ role: "user", content: "Count on." }]);
  assert.equal(await number(), "2/2");
  await page.reload();
  await said(page, "is ready");
  assert.equal((await body(page).textContent()).trim(), "three");
  // the other question, with its newest answer
  await press(page, "Branch before");
  assert.equal((await body(page).textContent()).trim(), "two");
  assert.equal(await page.locator("#conversation-list .open").count(), 1);
  await close();
});

test("an answer can be stopped by its button and by Escape, and is kept as far as it got", async () => {
  const { page, close } = await scripted({ answers: [RICH], delay: 20 });
  await said(page, "is ready");
  for (const stop of [() => page.click("#chat-stop"), () => page.keyboard.press("Escape")]) {
    await page.fill("#message", "Go.");
    await page.press("#message", "Enter");
    await page.waitForFunction(() => /Walk/.test([...document.querySelectorAll(".assistant")].at(-1)?.textContent));
    await stop();
    await said(page, "Stopped");
    assert.match(await body(page).textContent(), /Walk/);
    assert.match(await page.locator(".message .facts").last().textContent(), /seed 4231.*stopped/);
  }
  await close();
});

test("an answer that is left stays as far as it got, and one that is removed does not come back", async () => {
  const { page, close } = await scripted({ answers: [RICH], delay: 20 });
  await said(page, "is ready");
  const kept = () => page.evaluate(() => JSON.parse(localStorage.getItem("starling-conversations") ?? "[]"));
  const begin = async () => {
    await page.fill("#message", "Go.");
    await page.press("#message", "Enter");
    await page.waitForFunction(() => /Walk/.test(document.querySelector(".assistant")?.textContent));
  };
  await begin();
  assert.deepEqual(
    (await kept())[0].nodes.map(({ role }) => role),
    ["user"],
  );
  await page.click("#clear");
  await said(page, "Stopped");
  assert.match((await kept())[0].nodes[1].content, /^Walk/);
  await begin();
  await page.locator("#conversation-list li").first().hover();
  await page
    .getByRole("button", { name: /^Remove/ })
    .first()
    .click();
  await said(page, "Stopped");
  assert.equal((await kept()).length, 1);
  assert.equal(await page.locator(".message").count(), 0);
  await close();
});

test("conversations of the first version are read, and what is not one is left out", async () => {
  const { page, close } = await scripted({ answers: [{ text: "Hi." }] });
  await said(page, "is ready");
  await page.evaluate(() => {
    const messages = [
      { role: "user", content: "Old question" },
      { role: "assistant", content: "Old answer" },
    ];
    const broken = { id: "c", title: "Broken", nodes: [{ role: "user", content: "x", parent: 5 }], leaf: 0 };
    const all = [{ id: "a", title: "Old", messages }, broken, null, { id: 3 }];
    localStorage.setItem("starling-conversations", JSON.stringify(all));
  });
  await page.reload();
  await said(page, "is ready");
  assert.deepEqual(await page.locator("#conversation-list .open").allTextContents(), ["Old"]);
  assert.equal((await body(page).textContent()).trim(), "Old answer");
  await close();
});

test("tool calls are folded, and their results go to the model", async () => {
  const { page, server, close } = await scripted({ answers: [CALLING, { text: "It is cold." }] });
  await said(page, "is ready");
  await page.click("#options-button");
  await page.click("#options details summary");
  await page.fill("#option-tools", '[{"type": "function", "function": {"name": "get_weather"}}]');
  await page.fill("#option-system", "Be brief.");
  await page.click("#options-close");
  await ask(page, "Weather?", "calls a tool");
  assert.equal(server.bodies[0].tools[0].function.name, "get_weather");
  assert.equal(server.bodies[0].messages[0].content, "Be brief.");
  assert.equal(await page.locator(".call").evaluate((details) => details.open), false);
  await page.click(".call summary");
  assert.match(await page.locator(".call pre").textContent(), /"city": "Reykjavík"/);
  await page.getByLabel("Result of get_weather").fill("-3 °C");
  await press(page, "Send results");
  await page.waitForFunction(() => /It is cold/.test(document.getElementById("messages").textContent));
  const [, , call, result] = server.bodies[1].messages;
  assert.deepEqual(JSON.parse(call.tool_calls[0].function.arguments).days, 3);
  assert.deepEqual(result, { role: "tool", content: "-3 °C", name: "get_weather", tool_call_id: "call_0" });
  await close();
});

test("tokens of an answer can be seen with their alternatives", async () => {
  const { page, close } = await scripted({ answers: [{ text: "Zoë saw a fox 🦊 there." }] });
  await said(page, "is ready");
  await ask(page, "Go.");
  await page.check("#show-tokens");
  assert.equal(await body(page).textContent(), "Zoë saw a fox 🦊 there.");
  await page.locator(".message .token").nth(1).hover();
  assert.match(await page.locator("#tip").textContent(), /" saw": [\d.]+ %/);
  await page.uncheck("#show-tokens");
  assert.equal(await page.locator(".message .token").count(), 0);
  // from the beginning too
  await page.check("#show-tokens");
  await press(page, "Again");
  await page.waitForFunction(() => document.querySelector(".branches"));
  await said(page, "tokens: ");
  assert.equal(await body(page).textContent(), "Zoë saw a fox 🦊 there.");
  assert.equal(await page.locator(".waiting").count(), 0);
  await close();
});

test("the key is asked for, kept for the tab, and asked for again if it is wrong", async () => {
  const { page, server, close } = await scripted({ answers: [{ text: "Hi." }], key: "sesame" });
  const form = page.locator("#key-form");
  await form.waitFor({ state: "visible" });
  await page.fill("#key", "wrong");
  await page.press("#key", "Enter");
  await page.waitForFunction(() => /does not accept/.test(document.getElementById("key-text").textContent));
  await page.fill("#key", "sesame");
  await page.press("#key", "Enter");
  await said(page, "is ready");
  assert.equal(await form.isVisible(), false);
  await ask(page, "Hello.");
  await page.reload();
  await said(page, "is ready");
  // the server gets another key while the page is open
  server.key = "other";
  await page.fill("#message", "Hello again.");
  await page.press("#message", "Enter");
  await form.waitFor({ state: "visible" });
  assert.equal(await page.evaluate(() => localStorage.getItem("starling-key")), null);
  await page.fill("#key", "other");
  await page.press("#key", "Enter");
  await said(page, "is ready");
  await close();
});

test("models are listed with their states, loaded, unloaded, and remembered", async () => {
  const models = [model("first", "loaded"), model("second", "unloaded", {}), model("third", "failed", {})];
  models[2].status.error = "third.gguf: not a GGUF file";
  const { page, close } = await scripted({ answers: [{ text: "Hi." }], models, loadTime: 900 });
  await said(page, "first is ready");
  await page.click("#model-button");
  const list = page.locator("#model-list");
  assert.match(await list.textContent(), /third.*not a GGUF file/);
  await list.getByRole("button", { name: /second/ }).click();
  await page.locator("#loading").waitFor({ state: "visible" });
  assert.equal(await page.locator("#send").isDisabled(), true);
  await said(page, "second is ready");
  assert.equal(await page.locator("#loading").isVisible(), false);
  await page.reload();
  await said(page, "second is ready");
  await page.click("#model-button");
  await page.getByRole("button", { name: "Unload second" }).click();
  await said(page, "second is loaded when you ask it");
  await close();
});

test("a model is downloaded to the server, with its progress", async () => {
  const pull = [
    { status: "pulling manifest" },
    { status: "downloading", completed: 1.5e9, total: 2e9 },
    { status: "success" },
  ];
  const { page, server, close } = await scripted({ answers: [{ text: "Hi." }], pull });
  await said(page, "is ready");
  const download = async () => {
    await page.click("#model-button");
    await page.fill("#pull", "hf:a/b:Q4_K_M");
    await page.press("#pull", "Enter");
  };
  await download();
  await page.waitForFunction(() => /^1.50 GB of 2.00 GB/.test(document.getElementById("progress-text").textContent));
  assert.equal(await page.locator("#progress").evaluate(({ value }) => value), 0.75);
  await page.locator("#loading").waitFor({ state: "hidden" });
  await page.click("#model-button");
  await page
    .locator("#model-list")
    .getByRole("button", { name: /hf:a\/b/ })
    .waitFor();
  await page.keyboard.press("Escape");
  server.pull = [{ error: "no such repository" }];
  await download();
  await said(page, "No such repository");
  await close();
});

test("errors say what to do, and the question can be asked again", async () => {
  const failure = { status: 503, message: "the queue is full" };
  const { page, server, close } = await scripted({ answers: [{ text: "Hi." }], failure });
  await said(page, "is ready");
  await ask(page, "Hello.", "The queue is full");
  server.failure = undefined;
  await page.locator("#notice").getByRole("button", { name: "Try again" }).click();
  await said(page, "tokens: ");
  assert.equal((await body(page).textContent()).trim(), "Hi.");
  await server.close();
  await ask(page, "Still there?", "cannot be reached");
  // the question is not lost
  assert.match(await page.locator(".message.user").last().textContent(), /Still there/);
  await close().catch((e) => assert.match(String(e), /not running/i));
});

test("the page can be used with the keyboard alone", async () => {
  const { page, close } = await scripted({ answers: ["one", "two"].map((text) => ({ text })) });
  await said(page, "is ready");
  await page.keyboard.press("/");
  await page.keyboard.type("Hello.");
  await page.keyboard.press("Enter");
  await said(page, "tokens: ");
  await page.keyboard.press("Alt+r");
  await page.waitForFunction(() => /two/.test(document.getElementById("messages").textContent));
  await said(page, "tokens: ");
  await page.keyboard.press("ArrowUp");
  assert.equal(await page.evaluate(() => document.activeElement.value), "Hello.");
  await page.keyboard.press("Escape");
  await page.keyboard.press("Alt+n");
  assert.equal(await page.locator(".message").count(), 0);
  assert.equal(await page.evaluate(() => document.activeElement.id), "message");
  // the theme is remembered
  for (const theme of ["light", "dark"]) {
    await page.focus("#theme-button");
    await page.keyboard.press("Enter");
    await page.reload();
    assert.equal(await page.evaluate(() => document.documentElement.dataset.theme), theme);
  }
  await close();
});

test("the end of an answer stays in view, unless the user scrolls up", async () => {
  const { page, close } = await scripted({ answers: [RICH], delay: 6 }, { viewport: { width: 900, height: 500 } });
  await said(page, "is ready");
  const toEnd = () =>
    page.locator("#scroller").evaluate((s) => Math.round(s.scrollHeight - s.scrollTop - s.clientHeight));
  await ask(page, "Go.");
  await page.waitForTimeout(100);
  assert.ok((await toEnd()) < 5, `${await toEnd()}`);
  await page.fill("#message", "Again.");
  await page.press("#message", "Enter");
  await page.waitForFunction(() => document.querySelectorAll(".message.assistant .code").length > 1);
  await page.locator("#scroller").hover();
  await page.mouse.wheel(0, -600);
  await said(page, "tokens: ");
  assert.ok((await toEnd()) > 300, `${await toEnd()}`);
  await page.click("#latest");
  assert.ok((await toEnd()) < 5);
  await close();
});

test("an answer is not drawn slower when it is long", async () => {
  const { page, close } = await scripted({ answers: [RICH] });
  await said(page, "is ready");
  const times = await page.evaluate(async (part) => {
    const { showMarkdown } = await import("/assets/markdown.js");
    const text = `${part}\n\n`.repeat(40);
    const host = document.createElement("div");
    document.getElementById("messages").append(host);
    const times = [];
    for (let n = 0; n < text.length; n += 50) {
      const start = performance.now();
      showMarkdown(host, text.slice(0, n));
      host.getBoundingClientRect();
      times.push(performance.now() - start);
    }
    return times;
  }, RICH.text);
  const median = (all) => all.toSorted((a, b) => a - b)[all.length >> 1];
  const [short, long] = [median(times.slice(0, 300)), median(times.slice(-300))];
  console.log(
    `drawing: ${short.toFixed(2)} ms, ${long.toFixed(2)} ms at the end of ${RICH.text.length * 40} characters`,
  );
  assert.ok(long < 3 * short + 2, `${short} ms, then ${long} ms`);
  await close();
});

test("an answer of 250 tokens a second is drawn at 60 frames a second", async () => {
  const { page, close } = await scripted({ answers: [{ text: `${RICH.text}\n\n`.repeat(4) }], delay: 4 });
  await said(page, "is ready");
  await page.evaluate(() => {
    globalThis.frames = [];
    let last = performance.now();
    const next = (now) => {
      frames.push(now - last);
      last = now;
      requestAnimationFrame(next);
    };
    requestAnimationFrame(next);
  });
  await ask(page, "Go.");
  const frames = (await page.evaluate(() => frames)).sort((a, b) => a - b);
  const [median, most] = [0.5, 0.95].map((share) => frames[Math.floor(frames.length * share)]);
  console.log(`${frames.length} frames: ${median.toFixed(1)} ms, 95 % within ${most.toFixed(1)} ms`);
  assert.ok(median < 20, `${median} ms`);
  await close();
});

test("blocks drawn as they grow are those of the whole text", async () => {
  const { page, close } = await scripted({ answers: [RICH] });
  await said(page, "is ready");
  const texts = [
    RICH.text,
    "- a\n- b\n\n  more of b\n\n- c\n\nend",
    "Title\n=====\n\ntext\n---\n\n1. x\n\n\n2. y\n\n> q\nlazy\n\n    code\n\n| a |\n|---|\n| 1 |\n\nlast",
    "```\nopen\n\n# no title",
    "a\r\n\r\nb\rc",
  ];
  const differ = await page.evaluate(async (texts) => {
    const { showMarkdown } = await import("/assets/markdown.js");
    const draw = (steps) => {
      const host = document.createElement("div");
      for (const text of steps) showMarkdown(host, text);
      return host.innerHTML;
    };
    return texts.filter((text) => {
      const steps = Array.from(text, (_, i) => text.slice(0, i + 1));
      return draw(steps) !== draw([text]);
    });
  }, texts);
  assert.deepEqual(differ, []);
  await close();
});

for (const [colorScheme, viewport] of [
  ["light", { width: 1200, height: 800 }],
  ["dark", { width: 1200, height: 800 }],
  ["light", { width: 390, height: 844 }],
  ["dark", { width: 390, height: 844 }],
]) {
  test(`accessible and fitting: ${colorScheme}, ${viewport.width} px`, async () => {
    const models = [model("first", "loaded"), model("second", "failed", {})];
    models[1].status.error = "second.gguf: not a GGUF file";
    const { page, server, close } = await scripted(
      { answers: [RICH, RICH, CALLING], models },
      { colorScheme, viewport },
    );
    await said(page, "is ready");
    const axe = await readAxe();
    await page.evaluate(axe);
    const check = async (state) => {
      const { violations } = await page.evaluate(() =>
        axe.run({ runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"] }),
      );
      const found = violations.map(({ id, nodes }) => [id, nodes.map((n) => `${n.html} ${n.failureSummary}`)]);
      assert.deepEqual(found, [], state);
      const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
      assert.ok(wide <= 0, `${state} is ${wide} px too wide`);
    };
    await check("empty");
    await ask(page, "Reverse a list.");
    await page.click(".reasoning summary");
    await check("answered");
    await press(page, "Again");
    await said(page, "tokens: ");
    await page.check("#show-tokens");
    await check("tokens");
    await page.uncheck("#show-tokens");
    await ask(page, "Weather?");
    await page.locator(".call summary").click();
    await check("tool call");
    await page.click("#model-button");
    await check("models");
    await page.keyboard.press("Escape");
    await page.click("#options-button");
    await check("settings");
    await page.click("#options-close");
    if (await page.isVisible("#sidebar-button")) {
      await page.click("#sidebar-button");
      await page.waitForTimeout(300);
      await check("conversations");
      await page.click("#sidebar-close");
      await page.waitForTimeout(300);
    }
    server.failure = { status: 503, message: "the queue is full" };
    await ask(page, "Hello.", "queue is full");
    await check("error");
    server.key = "sesame";
    await page.reload();
    await page.locator("#key-form").waitFor({ state: "visible" });
    await page.evaluate(axe);
    await check("key");
    await close();
  });
}

test("all files of the page have less than 150 kB when they are compressed", async () => {
  const directory = `${root}web/demo/assets/`;
  const names = (await readdir(directory)).map((name) => directory + name);
  const files = await Promise.all([`${root}web/demo/index.html`, ...names].map((name) => readFile(name)));
  const sum = (compress) => files.reduce((n, file) => n + compress(file).length, 0);
  console.log(`page: ${sum(gzipSync)} bytes with gzip, ${sum(brotliCompressSync)} with brotli`);
  assert.ok(sum(gzipSync) < 150_000);
});

test("the page of the command chats, writes, and verifies", async () => {
  const server = await startServer(root + TINY, "--api-key", "sesame");
  try {
    const { page, close } = await visit(server.origin);
    await page.locator("#key-form").waitFor({ state: "visible" });
    await page.fill("#key", "sesame");
    await page.press("#key", "Enter");
    await said(page, "is ready");
    await page.evaluate(() => {
      document.getElementById("option-maxTokens").value = "20";
      document.getElementById("option-seed").value = "18446744073709551615";
    });
    await ask(page, "Tell me a story of a fox.");
    const first = await body(page).textContent();
    assert.ok(first.length > 10);
    assert.match(await page.locator(".message .facts").textContent(), /^20 tokens.*seed 18446744073709551615/);
    await page.evaluate(() => (document.getElementById("option-seed").value = ""));
    await press(page, "Again, same seed");
    await page.waitForFunction(() => document.querySelector(".branches"));
    await said(page, "tokens: ");
    assert.equal(await body(page).textContent(), first);
    await page.check("#show-tokens");
    assert.equal(await page.locator(".message .token").count(), 20);
    await page.uncheck("#show-tokens");
    await press(page, "Verify");
    await page.waitForFunction(() => /^Verified/.test(document.getElementById("verdict").textContent));
    assert.equal(await page.locator("#steps .ok").count(), 20);
    const receipt = JSON.parse(await page.inputValue("#receipt"));
    receipt.output[11] = (receipt.output[11] + 1) % 2048;
    await page.fill("#receipt", JSON.stringify(receipt).replace(/"seed":\d+/, '"seed":18446744073709551615'));
    await page.click("#verify");
    await page.waitForFunction(() => /^Not verified/.test(document.getElementById("verdict").textContent));
    assert.equal(await page.locator("#steps .wrong").count(), 1);
    await page.click("#tab-write");
    await page.fill("#prompt", "Once upon a time");
    await page.press("#prompt", "Enter");
    await page.waitForFunction(() => /20 tokens · seed \d/.test(document.getElementById("write-facts").textContent));
    assert.match(await page.locator("#answer").textContent(), /^Once upon a time./);
    await page.check("#show-tokens");
    assert.equal(await page.locator("#answer .token").count(), 20);
    assert.equal(await page.isVisible("#write-receipt"), true);
    // the reference
    for (const colorScheme of ["light", "dark"]) {
      await page.emulateMedia({ colorScheme });
      await page.goto(`${server.origin}/docs`);
      await page.locator("details").first().click();
      await page.evaluate(await readAxe());
      const { violations } = await page.evaluate(() => axe.run());
      assert.deepEqual(
        violations.map(({ id, nodes }) => [id, nodes.map((n) => n.html)]),
        [],
      );
    }
    await close();
  } finally {
    server.stop();
  }
});
