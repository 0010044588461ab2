// The pinned results in headless Chromium, through the package, in every build on one thread: after web/build.sh.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { TINY, blank, native, open } from "./browser.mjs";
import { checkCases, checkEmbeddings } from "./goldens.mjs";

let b;
before(async () => (b = await open()));
after(() => b.close());

for (const build of [
  { isa: "simd128" },
  { isa: "relaxed-simd" },
  { isa: "relaxed-i16" },
  { isa: "simd128", memory64: true },
]) {
  for (const worker of [true, false]) {
    const name = `${build.isa}${build.memory64 ? " with memory64" : ""}`;
    test(`${name}, ${worker ? "in a worker" : "inline"}`, { timeout: 300_000 }, async () => {
      const page = await blank(b);
      await checkCases(page, { ...build, worker }, { ...build, threads: 1 });
      if (worker) await checkEmbeddings(page, build);
      await page.close();
    });
  }
}

test("a service worker generates too", async () => {
  const page = await blank(b);
  const text = await page.evaluate(async (url) => {
    const registration = await navigator.serviceWorker.register("service.js", { type: "module" });
    const worker = registration.installing ?? registration.waiting ?? registration.active;
    const { port1, port2 } = new MessageChannel();
    worker.postMessage({ url: new URL(url, location.href).href, port: port2 }, [port2]);
    const { data } = await new Promise((resolve) => (port1.onmessage = resolve));
    await registration.unregister();
    return data;
  }, TINY);
  assert.equal(text, native("Once upon a time", "-n20"));
  await page.close();
});
