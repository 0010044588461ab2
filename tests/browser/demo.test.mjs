// The page that people see, used as people use it: `node --test tests/browser/demo.test.mjs` after web/build.sh.
// STARLING is the native command whose text must be the same, by default target/release/starling.

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";

import { native, open } from "./browser.mjs";

const root = fileURLToPath(new URL("../../", import.meta.url));

let b;
before(async () => (b = await open()));
after(() => b.close());

const ready = (page) => page.waitForFunction(() => /is ready/.test(document.getElementById("status").textContent));
/** Does something that makes the model write, and waits until it has. */
async function written(page, act) {
  await page.evaluate(() => (document.getElementById("status").textContent = ""));
  await act();
  await page.waitForFunction(() => /tokens: /.test(document.getElementById("status").textContent));
}

/** The page with a model, at a tab. */
async function demo(tab, options) {
  const page = await b.page("/web/demo/index.html", options);
  await ready(page);
  // no conversation of the test before
  await page.evaluate(() => localStorage.clear());
  await page.reload();
  await ready(page);
  await page.click(`#tab-${tab}`);
  await set(page, { seed: 0 });
  return page;
}

/** Loads a model of the panel. */
async function choose(page, source, fill) {
  await page.click("#model-button");
  await page.check(`input[value="${source}"]`);
  await fill();
  await page.click("#load");
}

/** A text as Markdown shows plain prose. */
const shown = (text) => text.replace(/\s+/g, " ").trim();

async function set(page, options) {
  for (const [name, value] of Object.entries(options)) {
    await page.locator(`#option-${name}`).evaluate((input, v) => (input.value = v), String(value));
  }
}

test("a prompt typed into the page gives the bytes of `starling run`", async () => {
  const page = await demo("write");
  for (const [prompt, seed] of [
    ["Once upon a time", 7],
    ["Zoë said: \u201chello\u201d. The fox", 123456],
  ]) {
    await page.fill("#prompt", prompt);
    await set(page, { seed, maxTokens: 60 });
    const seen = page.evaluate(() => {
      // how the text grew
      const lengths = [];
      new MutationObserver(() => lengths.push(document.getElementById("answer").textContent.length)).observe(
        document.getElementById("answer"),
        { childList: true, subtree: true },
      );
      return new Promise((resolve) => setTimeout(() => resolve(lengths), 3000));
    });
    await written(page, () => page.click("#write"));
    const text = await page.locator("#answer .body").textContent();
    assert.equal(text, native(prompt, "--seed", String(seed), "-n", "60"));
    assert.ok(new Set(await seen).size > text.length / 10, "the text did not stream");
  }
  await page.close();
});

test("an answer that has a form is that of `starling run`, and a wrong form is said", async () => {
  const page = await demo("write");
  await page.fill("#prompt", "A cat: ");
  await page.click("#options-button");
  const text = () => page.locator("#answer .body").textContent();
  for (const [kind, flag] of [
    ["json", "--json-schema"],
    ["regex", "--regex"],
  ]) {
    await page.selectOption("#option-form", kind);
    const form = await page.inputValue("#option-form-text");
    await written(page, () => page.click("#write"));
    assert.equal(await text(), native("A cat: ", flag, form, "-n", "200", "--seed", "0"));
    assert.equal(await page.isVisible("#write-receipt"), false);
  }
  await page.fill("#option-form-text", "[a-z");
  await page.click("#write");
  await page.waitForFunction(() => /unclosed character class/.test(document.getElementById("status").textContent));
  await page.selectOption("#option-form", "");
  await written(page, () => page.click("#write"));
  assert.equal(await page.isVisible("#write-receipt"), true);
  await page.close();
});

test("a stopped answer stops, and the same seed gives it again", async () => {
  const page = await demo("write");
  await set(page, { seed: 3, maxTokens: 400 });
  await page.evaluate(() => {
    const answer = document.getElementById("answer");
    const stop = (_, observer) => {
      if (answer.textContent.length < 60) return;
      observer.disconnect();
      document.getElementById("write-stop").click();
    };
    new MutationObserver(stop).observe(answer, { childList: true, subtree: true });
  });
  await page.click("#write");
  await page.waitForFunction(() => document.getElementById("status").textContent === "Stopped");
  const part = await page.locator("#answer .body").textContent();
  await set(page, { maxTokens: 100 });
  await written(page, () => page.click("#write"));
  const whole = await page.locator("#answer .body").textContent();
  assert.ok(whole.startsWith(part) || part.startsWith(whole));
  await page.close();
});

test("chat: send, edit, ask again with the same seed, export", async () => {
  const page = await demo("chat");
  await set(page, { maxTokens: 30 });
  await page.fill("#message", "Who are you?");
  await written(page, () => page.press("#message", "Enter"));
  const answer = () => page.locator(".message.assistant .text").last().textContent();
  const first = await answer();
  assert.ok(first.length > 5);
  assert.equal(shown(first), shown(native("Who are you?", "--chat", "-n", "30", "--seed", "0")));
  await written(page, () => page.getByRole("button", { name: "Again, same seed" }).click());
  assert.equal(await answer(), first);
  await page.getByRole("button", { name: "Edit" }).click();
  await page.getByLabel("Edited message").fill("What is the capital of France?");
  await written(page, () => page.locator(".message").getByRole("button", { name: "Send" }).click());
  const want = native("What is the capital of France?", "--chat", "-n", "30", "--seed", "0");
  assert.equal(shown(await answer()), shown(want));
  const [download] = await Promise.all([page.waitForEvent("download"), page.click("#export")]);
  const saved = JSON.parse(await readFile(await download.path(), "utf8"));
  assert.deepEqual(
    saved.messages.map((m) => m.role),
    ["user", "assistant"],
  );
  assert.equal(saved.messages[0].content, "What is the capital of France?");
  assert.equal(saved.messages[1].content, want);
  assert.equal(saved.messages[1].receipt.format, "starling-receipt/1");
  assert.equal(saved.messages[1].sampling.maxTokens, 30);
  await page.close();
});

test("conversations survive a reload, with the prompt in the cache, and can be removed", async () => {
  const page = await demo("chat");
  await set(page, { maxTokens: 30, seed: "" });
  await page.fill("#message", "Tell me a story of a fox and a bird. ".repeat(8));
  await written(page, () => page.press("#message", "Enter"));
  const answers = () => page.locator(".message.assistant .text").allTextContents();
  const [first] = await answers();
  // a random seed is told, and gives the answer again
  await written(page, () => page.getByRole("button", { name: "Again, same seed" }).click());
  assert.deepEqual(await answers(), [first]);
  await page.click("#clear");
  await page.fill("#message", "Who are you?");
  await written(page, () => page.press("#message", "Enter"));
  await page.waitForTimeout(500);
  await page.reload();
  await ready(page);
  assert.match(await page.locator(".message.user .text").textContent(), /^Who are you/);
  assert.equal(await page.locator("#conversation-list .open").count(), 2);
  await page.locator("#conversation-list .open").nth(1).click();
  assert.deepEqual(await answers(), [first]);
  await set(page, { maxTokens: 10, seed: 0 });
  await page.fill("#message", "Go on.");
  await written(page, () => page.press("#message", "Enter"));
  const [, cached, prompt] = /(\d+) of (\d+) prompt tokens cached/.exec(await page.locator("#speed").textContent());
  assert.ok(Number(cached) > Number(prompt) / 2, `${cached} of ${prompt}`);
  for (const n of [1, 0]) {
    await page.locator("#conversation-list").getByRole("button", { name: /^Remove/ }).first().click();
    assert.equal(await page.locator("#conversation-list .open").count(), n);
  }
  assert.equal(await page.evaluate(() => localStorage.length), 0);
  await page.close();
});

test("while the model writes nothing else makes it write, and the answer goes on where it is seen", async () => {
  const page = await demo("chat");
  await set(page, { maxTokens: 200 });
  await page.fill("#message", "Tell me a story.");
  await written(page, () => page.press("#message", "Enter"));
  const button = (name) => page.locator(".message").getByRole("button", { name });
  assert.equal(await button("Again, same seed").isDisabled(), false);
  const before = await page.locator(".message.assistant .text").textContent();
  for (const meddle of ["tokens", "edit"]) {
    const seen = await page.evaluate(async (meddle) => {
      const button = (name) => [...document.querySelectorAll(".message button")].find((b) => b.textContent === name);
      const messages = document.getElementById("messages");
      const lengths = [];
      const text = () => messages.querySelector(".assistant .text")?.textContent ?? "";
      new MutationObserver(() => lengths.push(text().length)).observe(messages, { childList: true, subtree: true });
      document.getElementById("status").textContent = "";
      button("Again, same seed").click();
      const disabled = [button("Again, same seed").disabled];
      if (meddle === "tokens") document.getElementById("show-tokens").click();
      else {
        button("Edit").click();
        disabled.push(button("Send").disabled);
        button("Cancel").click();
      }
      while (!/tokens: /.test(document.getElementById("status").textContent))
        await new Promise((resolve) => setTimeout(resolve, 20));
      return { disabled, lengths: new Set(lengths).size };
    }, meddle);
    assert.ok(seen.disabled.every(Boolean), meddle);
    // Markdown is drawn once a frame
    assert.ok(seen.lengths > 4, `${meddle}: the text did not stream`);
    assert.equal(shown(await page.locator(".message.assistant .text").textContent()), shown(before), meddle);
  }
  // what is edited stays when an answer ends
  await page.evaluate(() => {
    const button = (name) => [...document.querySelectorAll(".message button")].find((b) => b.textContent === name);
    document.getElementById("status").textContent = "";
    button("Again, same seed").click();
    button("Edit").click();
  });
  await page.waitForFunction(() => /tokens: /.test(document.getElementById("status").textContent));
  assert.equal(await page.getByLabel("Edited message").inputValue(), "Tell me a story.");
  await page.waitForFunction(() => !document.querySelector(".message .writes").disabled);
  await button("Cancel").click();
  // and without a model there is nothing to ask
  await choose(page, "url", () => page.fill("#url", "/nothing.gguf"));
  await page.waitForFunction(() => /404/.test(document.getElementById("status").textContent));
  assert.equal(await button("Again, same seed").isDisabled(), true);
  await page.close();
});

test("a conversation goes on to the end of the context, says that it is reached, and can begin anew", async () => {
  const page = await demo("chat");
  // the second answer has no room for so many tokens
  await set(page, { maxTokens: 200 });
  for (const message of ["Tell me a story of a fox. ".repeat(30), "Go on."]) {
    await page.fill("#message", message);
    await written(page, () => page.press("#message", "Enter"));
  }
  await page.fill("#message", "Tell me another. ".repeat(100));
  await page.press("#message", "Enter");
  await page.waitForFunction(() => /context 512: begin a new/.test(document.getElementById("status").textContent));
  assert.equal(await page.locator(".message.assistant").count(), 2);
  await page.getByRole("button", { name: "Edit" }).last().click();
  await page.getByLabel("Edited message").fill("Who are you?");
  await page.locator(".message").getByRole("button", { name: "Send" }).click();
  await page.click("#clear");
  assert.equal(await page.locator(".message").count(), 0);
  await page.waitForFunction(() => document.getElementById("chat-stop").disabled);
  await page.close();
});

test("a seed of 64 bits is that seed, in the answer and in what is exported", async () => {
  const page = await demo("chat");
  const seed = "18446744073709551615";
  await set(page, { seed, maxTokens: 30 });
  await page.fill("#message", "Who are you?");
  await written(page, () => page.press("#message", "Enter"));
  const text = await page.locator(".message.assistant .text").textContent();
  assert.equal(shown(text), shown(native("Who are you?", "--chat", "--seed", seed, "-n", "30")));
  const [download] = await Promise.all([page.waitForEvent("download"), page.click("#export")]);
  const saved = await readFile(await download.path(), "utf8");
  assert.equal(JSON.parse(saved).messages[1].sampling.seed, seed);
  assert.ok(saved.includes(`"seed":${seed}`), "the receipt's");
  await set(page, { seed: "1.5" });
  await page.getByRole("button", { name: "Again", exact: true }).click();
  await page.waitForFunction(() => /seed: .*1\.5/.test(document.getElementById("status").textContent));
  await page.close();
});

test("tokens show their probabilities and alternatives, by pointer and by keys", async () => {
  const page = await demo("write");
  await set(page, { maxTokens: 12 });
  await written(page, () => page.click("#write"));
  const text = await page.locator("#answer .body").textContent();
  await page.check("#show-tokens");
  assert.equal(await page.locator("#answer .token").count(), 12);
  assert.equal(await page.locator("#answer .body").textContent(), text);
  await page.locator("#answer .token").nth(3).hover();
  assert.match(await page.locator("#tip").textContent(), /id \d+: [\d.]+ %/);
  await page.locator("#answer .token").first().focus();
  await page.keyboard.press("ArrowRight");
  assert.equal(await page.evaluate(() => document.activeElement.dataset.index), "1");
  assert.equal(await page.locator("#tip tr").count(), 5);
  await page.close();
});

test("Markdown of answers is rendered, and nothing in it is run or fetched", async () => {
  const page = await demo("chat");
  const hostile = [
    "# Title",
    "Some *text* with `code`, <b>HTML</b>.",
    "<think>not at the beginning</think>",
    "<script>globalThis.hacked = 1</script><img src=x onerror='globalThis.hacked = 2'>",
    "![picture](https://tracker.example/pixel.png)",
    "[link](javascript:globalThis.hacked=3) [safe](https://example.com/)",
    '<svg onload="globalThis.hacked = 4"><style>body { display: none }</style>',
    "```js\nlet a = '</code><script>globalThis.hacked = 5</script>';\n```",
    "| a | b |\n|---|---|\n| 1 | 2 |",
    "- [x] done",
  ].join("\n\n");
  const seen = await page.evaluate(async (text) => {
    const { showMarkdown } = await import("/web/demo/assets/markdown.js");
    const host = document.createElement("div");
    document.body.append(host);
    // every beginning, as it is streamed
    for (let n = 0; n <= text.length; n++) showMarkdown(host, text.slice(0, n));
    const all = [...host.querySelectorAll("*")];
    // without the page's own icons
    const theirs = all.filter((node) => !node.closest("button svg"));
    const names = new Set(theirs.map((node) => node.localName));
    const attributes = new Set(theirs.flatMap((node) => node.getAttributeNames()));
    const links = [...host.querySelectorAll("a")].map((a) => [a.textContent, a.getAttribute("href"), a.rel]);
    const shown = { text: host.textContent, code: host.querySelector("pre").textContent };
    showMarkdown(host, "<think>First, I think.</think>The answer.");
    const folded = host.querySelector("details.reasoning");
    const reasoning = [folded.open, folded.textContent, host.textContent.trim().endsWith("The answer.")];
    await new Promise((resolve) => setTimeout(resolve, 200));
    host.remove();
    return { names: [...names], attributes: [...attributes], links, ...shown, reasoning, hacked: globalThis.hacked };
  }, hostile);
  assert.equal(seen.hacked, undefined);
  for (const name of ["script", "img", "svg", "style", "iframe"]) assert.ok(!seen.names.includes(name), name);
  for (const name of ["table", "pre", "em", "code", "li"]) assert.ok(seen.names.includes(name), name);
  assert.ok(seen.attributes.every((name) => !/^on|^src|^style/.test(name)), seen.attributes.join());
  assert.deepEqual(
    seen.links.filter(([, href]) => href),
    [["safe", "https://example.com/", "noopener noreferrer"]],
  );
  assert.match(seen.text, /<b>HTML<\/b>.*<script>.*!\[picture\]\(https:/s);
  assert.equal(seen.code, "let a = '</code><script>globalThis.hacked = 5</script>';\n");
  assert.deepEqual(seen.reasoning, [false, "ReasoningFirst, I think.\n", true]);
  await page.close();
});

test("a receipt verifies, one that was changed does not, and the page says where", async () => {
  const page = await demo("write");
  await set(page, { maxTokens: 20, seed: 5 });
  await written(page, () => page.click("#write"));
  const [download] = await Promise.all([page.waitForEvent("download"), page.click("#write-receipt")]);
  const receipt = await readFile(await download.path(), "utf8");
  await page.click("#tab-verify");
  await page.setInputFiles("#receipt-file", {
    name: "receipt.json",
    mimeType: "application/json",
    buffer: Buffer.from(receipt),
  });
  await page.waitForFunction(() =>
    /^Verified: .* these 20 tokens/.test(document.getElementById("verdict").textContent),
  );
  assert.equal(await page.locator("#steps .ok").count(), 20);
  const changed = JSON.parse(receipt);
  changed.output[11] = (changed.output[11] + 1) % 2048;
  await page.fill("#receipt", JSON.stringify(changed));
  await page.click("#verify");
  await page.waitForFunction(() => /^Not verified/.test(document.getElementById("verdict").textContent));
  assert.equal(await page.locator("#steps .ok").count(), 11);
  assert.equal(await page.locator("#steps .wrong").count(), 1);
  // an id that no token has
  changed.output[11] = 1_000_000;
  await page.fill("#receipt", JSON.stringify(changed));
  await page.click("#verify");
  await page.waitForFunction(() => /^(Not verified|This cannot)/.test(document.getElementById("verdict").textContent));
  assert.match(await page.locator("#verdict").textContent(), /^Not verified/);
  // dropped anywhere; twice at once is once
  await page.click("#tab-write");
  await page.evaluate((text) => {
    for (let i = 0; i < 2; i++) {
      const dataTransfer = new DataTransfer();
      dataTransfer.items.add(new File([text], "receipt.json", { type: "application/json" }));
      document.body.dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
    }
  }, receipt);
  await page.waitForFunction(() => /^Verified: .* these 20/.test(document.getElementById("verdict").textContent));
  assert.equal(await page.locator("#steps .ok").count(), 20);
  assert.equal(await page.locator("#panel-verify").isVisible(), true);
  await page.fill("#receipt", "no receipt");
  await page.click("#verify");
  await page.waitForFunction(() => /cannot be checked/.test(document.getElementById("verdict").textContent));
  await page.close();
});

test("a download of unknown length says how far it is", async () => {
  const model = encodeURIComponent("/fixtures/starling-tiny/starling-tiny-q8_0.gguf?nolength&norange&slow=10");
  const page = await b.page(`/web/demo/index.html?model=${model}`);
  const said = await page.waitForFunction(() => /B/.exec(document.getElementById("progress-text").textContent)?.input);
  assert.match(await said.jsonValue(), /^[\d.]+ [kM]B from the network, [\d.]+ [kMG]B\/s$/);
  await ready(page);
  assert.match(await page.locator("#progress-text").textContent(), /^4\.0 MB of 4\.0 MB from the network$/);
  await page.close();
});

test("models from a file and from a URL; what is wrong is said", async () => {
  const page = await demo("chat");
  const other = `${root}fixtures/starling-tiny/starling-tiny-q4_0.gguf`;
  await choose(page, "file", () => page.setInputFiles("#file", other));
  await ready(page);
  await choose(page, "url", () => page.fill("#url", "/web/demo/index.html"));
  await page.waitForFunction(() => /is a web page, not a GGUF/.test(document.getElementById("status").textContent));
  assert.equal(await page.locator("#write").isDisabled(), true);
  await page.close();
});

for (const [colorScheme, viewport] of [
  ["light", { width: 1200, height: 900 }],
  ["dark", { width: 1200, height: 900 }],
  ["light", { width: 360, height: 720 }],
  ["dark", { width: 360, height: 720 }],
]) {
  test(`accessible and fitting: ${colorScheme}, ${viewport.width} px`, async () => {
    const page = await demo("write", { colorScheme, viewport });
    const axe = await readFile(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
    await page.evaluate(axe);
    await set(page, { maxTokens: 8 });
    for (const tab of ["#tab-write", "#tab-chat", "#tab-verify"]) {
      await page.click(tab);
      if (tab === "#tab-chat") {
        await page.uncheck("#show-tokens");
        await page.fill("#message", "Who are you?");
        await written(page, () => page.press("#message", "Enter"));
        await page.evaluate(async () => {
          const { showMarkdown } = await import("/web/demo/assets/markdown.js");
          const text = "<think>Yes.</think>A [link](https://example.com), `code`\n\n> quote\n\n```js\nf();\n```\n\n|a|\n|-|\n|b|";
          showMarkdown(document.querySelector(".message.assistant .markdown"), text);
        });
      }
      if (tab === "#tab-write") {
        await written(page, () => page.click("#write"));
        await page.check("#show-tokens");
      }
      const { violations } = await page.evaluate(() =>
        axe.run({ runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"] }),
      );
      assert.deepEqual(
        violations.map(({ id, nodes }) => [id, nodes.map((n) => n.html + " " + n.failureSummary)]),
        [],
        tab,
      );
      const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
      assert.ok(wide <= 0, `${tab} is ${wide} px too wide`);
      if (process.env.STARLING_SHOTS)
        await page.screenshot({
          path: `${process.env.STARLING_SHOTS}/${colorScheme}${tab.slice(1)}.png`,
          fullPage: true,
        });
    }
    await page.context().close();
  });
}
