// Headless Chromium on pages of a server of our own.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { existsSync } from "node:fs";
import { fileURLToPath } from "node:url";

import { chromium } from "playwright-core";

import { command } from "../node/command.mjs";
import { serve } from "./server.mjs";

export const executablePath =
  process.env.STARLING_CHROMIUM ?? ["/usr/bin/chromium", "/usr/bin/google-chrome"].find(existsSync);

/** A browser and a server; `page(path)` opens a page whose errors fail the test that closes it. */
export async function open(headers) {
  const [server, browser] = await Promise.all([
    serve(undefined, headers),
    chromium.launch({ executablePath, args: ["--no-sandbox", "--js-flags=--expose-gc"] }),
  ]);
  const context = await browser.newContext();
  const errors = [];
  const page = async (path, options) => {
    const target = options ? await (await browser.newContext(options)).newPage() : await context.newPage();
    target.on("pageerror", (e) => errors.push(e.stack ?? e.message));
    target.on("request", (r) => {
      if (!r.url().startsWith(server.origin) && !/^(blob|data):/.test(r.url())) errors.push(`asks for ${r.url()}`);
    });
    await target.goto(server.origin + path);
    return target;
  };
  const close = async () => {
    await browser.close();
    await server.close();
    assert.deepEqual(errors, []);
  };
  return { server, browser, page, close };
}

/** A page with nothing in it but `Starling`, and a function to load the bundled model. */
export async function blank({ page }) {
  const target = await page("/tests/browser/blank.html");
  await target.waitForFunction(() => globalThis.Starling);
  return target;
}

/** Overwrites the beginning of every model that is cached. */
export const damageCache = (page) =>
  page.evaluate(async () => {
    const directory = await (await navigator.storage.getDirectory()).getDirectoryHandle("starling-models");
    for await (const handle of directory.values()) {
      if (!handle.name.endsWith(".gguf")) continue;
      const stream = await handle.createWritable({ keepExistingData: true });
      await stream.write({ type: "write", position: 0, data: "<html>" });
      await stream.close();
    }
  });

const root = fileURLToPath(new URL("../../", import.meta.url));

/** Runs the native command, whose text must be the same; with seed 0 unless another is given. */
export function native(...args) {
  // the page's own mode and seed, unless the caller names others
  const mode = args.includes("--chat") ? [] : ["--raw"];
  const seed = args.some((arg) => arg.startsWith("--seed")) ? [] : ["--seed", "0"];
  const text = execFileSync(command, ["run", "--model", root + TINY, ...mode, ...seed, "--quiet", ...args], {
    encoding: "utf8",
    stdio: ["ignore", "pipe", "ignore"],
  });
  // the line ends after the text
  return text.slice(0, -1);
}

export const TINY = "/fixtures/starling-tiny/starling-tiny-q8_0.gguf";
