// Takes the picture of the page in README.md: `node tests/browser/screenshot.mjs` after web/build.sh. With a directory as its
// argument, takes pictures of the states of the page into it instead, of all or of those that are named after it.

import { fileURLToPath } from "node:url";

import { open } from "./browser.mjs";
import { CALLING, RICH, mock, model } from "./mock.mjs";

const [directory, ...chosen] = process.argv.slice(2);
const b = await open();
const status = (page, text) =>
  page.waitForFunction((text) => document.getElementById("status").textContent.includes(text), text);

if (!directory) {
  const page = await b.page("/web/demo/index.html", {
    viewport: { width: 1100, height: 680 },
    deviceScaleFactor: 1.5,
    colorScheme: "light",
  });
  await status(page, "is ready");
  await page.click("#tab-write");
  await page.check("#show-tokens");
  await page.locator("#option-seed").evaluate((input) => (input.value = "7"));
  await page.locator("#option-maxTokens").evaluate((input) => (input.value = "120"));
  await page.click("#write");
  await status(page, "tokens: ");
  await page.locator("#answer .token").nth(4).hover();
  await page.screenshot({ path: fileURLToPath(new URL("../../web/demo/demo.png", import.meta.url)) });
  await page.context().close();
}

const MODELS = [
  model("qwen3-4b-q4_k_m", "loaded"),
  model("gemma-3-1b-it-q8_0", "unloaded", {}),
  model("nomic-embed-text", "loaded", { max_model_len: 2048, generates: false }),
];
const QUESTION = "Write a function that reverses a linked list, and say why it works.";

/** States by name: what the server answers with, and what the user does. */
const states = {
  empty: [{}, async () => {}],
  loading: [{ models: [model("qwen3-4b-q4_k_m", "loading", {})] }, async () => {}, "Loading"],
  answering: [
    { delay: 30 },
    async (page) => {
      await page.fill("#message", QUESTION);
      await page.press("#message", "Enter");
      await page.waitForFunction(() => document.querySelectorAll(".code").length > 0);
      await page.waitForTimeout(900);
    },
  ],
  answered: [
    {},
    async (page) => {
      await ask(page, QUESTION);
      await page.click(".reasoning summary");
      await page.locator("#scroller").evaluate((scroller) => scroller.scrollTo(0, 0));
    },
  ],
  branches: [
    {},
    async (page) => {
      await ask(page, QUESTION);
      await page.getByRole("button", { name: "Again", exact: true }).click();
      await page.waitForFunction(() => /2\/2/.test(document.getElementById("messages").textContent));
      await status(page, "tokens: ");
    },
  ],
  tool: [
    { answers: [CALLING] },
    async (page) => {
      await ask(page, "What is the weather in Reykjavík?");
      await page.click(".call summary");
    },
  ],
  tokens: [
    {},
    async (page) => {
      await ask(page, QUESTION);
      await page.check("#show-tokens");
      await page.locator("#scroller").evaluate((scroller) => scroller.scrollTo(0, 0));
      await page.locator(".token").nth(21).hover();
    },
  ],
  error: [
    { failure: { status: 503, message: "the queue is full (64 requests): try again in 2 s" } },
    async (page) => {
      await page.fill("#message", QUESTION);
      await page.press("#message", "Enter");
      await page.waitForSelector("#status.bad");
    },
  ],
  key: [{ key: "sesame" }, async (page) => page.waitForSelector("#key-form:not([hidden])"), ""],
  models: [{}, async (page) => page.click("#model-button")],
  settings: [{}, async (page) => page.click("#options-button")],
  verify: [{}, async (page) => page.click("#tab-verify")],
  list: [
    {},
    async (page) => {
      for (const text of ["Compare bread and rice in a table.", "Explain how a rainbow forms.", QUESTION]) {
        await ask(page, text);
        await page.evaluate(() => document.getElementById("clear").click());
      }
      if (await page.isVisible("#sidebar-button")) await page.click("#sidebar-button");
    },
  ],
};

async function ask(page, text) {
  await page.fill("#message", text);
  await page.press("#message", "Enter");
  await status(page, "tokens: ");
}

if (directory) {
  const looks = { "light": [1200, 800], "dark": [1200, 800], "phone": [390, 844], "phone-dark": [390, 844] };
  for (const [name, [start, act, ready = "is ready"]] of Object.entries(states)) {
    if (chosen.length > 0 && !chosen.includes(name)) continue;
    for (const [look, [width, height]] of Object.entries(looks)) {
      const server = await mock({ models: structuredClone(MODELS), answers: [RICH], delay: 3, ...start });
      const context = await b.browser.newContext({
        viewport: { width, height },
        deviceScaleFactor: width < 500 ? 2 : 1,
        hasTouch: width < 500,
        colorScheme: look.endsWith("dark") ? "dark" : "light",
      });
      const page = await context.newPage();
      await page.goto(server.origin);
      if (ready) await status(page, ready);
      await act(page);
      await page.waitForTimeout(250);
      await page.screenshot({ path: `${directory}/${name}-${look}.png` });
      await context.close();
      await server.close();
    }
  }
}
await b.close();
