// Takes the picture of the demo page in README.md: `node tests/browser/screenshot.mjs` after web/build.sh.

import { fileURLToPath } from "node:url";

import { open } from "./browser.mjs";

const b = await open();
const page = await b.page("/web/demo/index.html", {
  viewport: { width: 920, height: 640 },
  deviceScaleFactor: 1.5,
  colorScheme: "light",
});
const status = (text) =>
  page.waitForFunction((text) => document.getElementById("status").textContent.includes(text), text);
await status("is ready");
await page.check("#show-tokens");
await page.locator("#option-seed").evaluate((input) => (input.value = "7"));
await page.locator("#option-maxTokens").evaluate((input) => (input.value = "60"));
await page.click("#write");
await status("tokens: ");
await page.screenshot({ path: fileURLToPath(new URL("../../web/demo/demo.png", import.meta.url)) });
await b.close();
