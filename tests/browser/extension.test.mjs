// The example of a browser extension, put together as its users do, in the browser: its page, whose engine has a worker,
// and its service worker, where the engine runs inline. After web/build.sh.

import assert from "node:assert/strict";
import { cp, mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";

import { chromium } from "playwright-core";

import { TINY, executablePath, native } from "./browser.mjs";

const root = fileURLToPath(new URL("../../", import.meta.url));
let directory;
let browser;
let page;

before(async () => {
  directory = await mkdtemp(join(tmpdir(), "starling-extension-"));
  const extension = join(directory, "extension");
  await cp(join(root, "web/examples/extension"), extension, { recursive: true });
  for (const part of ["dist", "wasm"])
    await cp(join(root, "web", part), join(extension, "starling-web", part), { recursive: true });
  await cp(join(root, TINY), join(extension, "model.gguf"));
  browser = await chromium.launchPersistentContext(join(directory, "profile"), {
    executablePath,
    ignoreDefaultArgs: ["--disable-extensions"],
    args: ["--no-sandbox", `--disable-extensions-except=${extension}`, `--load-extension=${extension}`],
  });
  const background = browser.serviceWorkers()[0] ?? (await browser.waitForEvent("serviceworker"));
  page = await browser.newPage();
  await page.goto(new URL("popup.html", background.url()).href);
});
after(async () => {
  await browser?.close();
  await rm(directory, { recursive: true, force: true });
});

test("its page writes as the program does", async () => {
  const prompt = "The little bird";
  await page.getByLabel("Begin with").fill(prompt);
  await page.getByRole("button").click();
  await page.waitForFunction(() => !document.querySelector("button").disabled);
  const text = await page.locator("output").evaluate((output) => output.value);
  assert.equal(text, prompt + native(prompt, "--temp", "0", "-n", "64"));
});

test("its service worker answers messages", async () => {
  const ask = (message) => page.evaluate((message) => chrome.runtime.sendMessage(message), message);
  const prompt = "Once upon a time";
  assert.deepEqual(await ask({ prompt, options: { maxTokens: 20, seed: 7 } }), {
    text: native(prompt, "--seed", "7", "-n", "20"),
  });
  const { error } = await ask({ prompt, options: { topP: 7 } });
  assert.match(error, /^request: .*top_p/);
});
