// A service in workerd that continues the prompt it is asked for: `workerd serve workerd.capnp`, then
// GET /?prompt=Once+upon+a+time, and &regex=[a-z]+ for an answer that an expression matches. A worker there has 128 MB:
// room for a model of some 50 MB, whose bytes are there beside the packed weights.

import { Starling } from "starling-web";
import bytes from "model.gguf";
import grammarWasm from "grammar.wasm";
import wasm from "starling.wasm";

let model;

export default {
  async fetch(request) {
    const ask = new URL(request.url).searchParams;
    // one that could not be loaded is tried again
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
