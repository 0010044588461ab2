// A workerd service that continues a prompt: `workerd serve workerd.capnp`, then GET /?prompt=Once+upon+a+time, with
// &regex=[a-z]+ for a constrained answer. A worker has 128 MB: enough for a model of about 50 MB, since both the file and the
// packed weights are in memory.

import { Starling } from "starling-web";
import bytes from "model.gguf";
import grammarWasm from "grammar.wasm";
import wasm from "starling.wasm";

let model;

export default {
  async fetch(request) {
    const ask = new URL(request.url).searchParams;
    // a failed load is retried by the next request
    model ??= Starling.load(bytes, { wasm, grammarWasm }).catch((e) => {
      model = undefined;
      throw e;
    });
    const options = {
      maxTokens: Number(ask.get("n") ?? 64),
      temperature: Number(ask.get("temperature") ?? 0),
      signal: request.signal,
      ...(ask.has("regex") && { structure: { regex: ask.get("regex") } }),
    };
    const pieces = (await model).generate(ask.get("prompt") ?? "Once upon a time", options);
    const encoder = new TextEncoder();
    const stream = new ReadableStream({
      async start(controller) {
        for await (const piece of pieces) controller.enqueue(encoder.encode(piece));
        controller.close();
      },
    });
    return new Response(stream, { headers: { "content-type": "text/plain; charset=utf-8" } });
  },
};
