// A service worker that answers /story?prompt=… with a stream, so that all tabs share one model. Register it as a module:
// navigator.serviceWorker.register("/service-worker.js", { type: "module" })
// The model runs inline, since service workers cannot start workers, and is loaded again after the browser has stopped the service
// worker; the file comes from the cache then.

import { Starling } from "./starling-web/dist/index.js";

let model;

addEventListener("install", () => skipWaiting());
addEventListener("activate", (event) => event.waitUntil(clients.claim()));
addEventListener("fetch", (event) => {
  const url = new URL(event.request.url);
  if (url.pathname === "/story") event.respondWith(story(url.searchParams.get("prompt") ?? "Once upon a time"));
});

async function story(prompt) {
  // a failed load is retried by the next request
  model ??= Starling.load("/model.gguf").catch((e) => {
    model = undefined;
    throw e;
  });
  let generation;
  try {
    generation = (await model).generate(prompt, { maxTokens: 8, temperature: 0 });
  } catch (e) {
    return new Response(e.message, { status: 500 });
  }
  const pieces = generation[Symbol.asyncIterator]();
  const encoder = new TextEncoder();
  const stream = new ReadableStream({
    async pull(controller) {
      const { done, value } = await pieces.next();
      if (done) controller.close();
      else controller.enqueue(encoder.encode(value));
    },
    // the page no longer reads
    cancel: () => void pieces.return(),
  });
  return new Response(stream, { headers: { "content-type": "text/plain; charset=utf-8" } });
}
