// A server's page with scripted answers, for states that a small model does not reach.

import { readFile } from "node:fs/promises";
import { createServer } from "node:http";
import { extname } from "node:path";
import { fileURLToPath } from "node:url";

const demo = fileURLToPath(new URL("../../web/demo/", import.meta.url));
const types = { ".html": "text/html", ".js": "text/javascript", ".css": "text/css" };

const sampling = { temperature: 0.7, top_k: 20, top_p: 0.8, min_p: 0, repetition_penalty: 1 };
const loaded = {
  max_model_len: 32768,
  vocab_size: 151936,
  embedding_length: 2048,
  generates: true,
  chat_sampling: sampling,
};
export const model = (id, value, more = loaded) => ({
  id,
  object: "model",
  created: 0,
  owned_by: "starling",
  aliases: [],
  status: { value },
  ...more,
});

/** A number from 0 to 1 for a position, the same in every run. */
const draw = (i) => Math.abs(Math.sin(i * 12.9898) * 43758.5453) % 1;

/** The chunks of an answer of `{ reasoning, text, calls }`, a word each. */
function* chunksOf({ reasoning = "", text = "", calls, finish = "stop" }) {
  let n = 0;
  const head = {
    id: "chatcmpl-1",
    object: "chat.completion.chunk",
    created: 0,
    model: "m",
    system_fingerprint: "fp_1",
  };
  const chunk = (choices, usage = null) => ({ ...head, choices, usage, seed: 4231 });
  const logprobs = (token) => {
    const p = 1 - 0.8 * draw(++n) ** 3;
    const top = [token, " the", " a", ",", "."].map((other, i) => ({
      token: other,
      logprob: Math.log(i === 0 ? p : (1 - p) / 2 ** i),
      bytes: [...Buffer.from(other)],
    }));
    return { content: [{ ...top[0], top_logprobs: top }] };
  };
  const delta = (delta, token) =>
    chunk([{ index: 0, delta, logprobs: token ? logprobs(token) : null, finish_reason: null }]);
  const words = (all) => all.match(/\s*\S{1,7}|\s+$/g) ?? [];
  yield delta({ role: "assistant", content: "" });
  for (const word of words(reasoning)) yield delta({ reasoning_content: word }, word);
  for (const word of words(text)) yield delta({ content: word }, word);
  for (const [index, { name, args }] of (calls ?? []).entries()) {
    yield delta({ tool_calls: [{ index, id: `call_${index}`, type: "function", function: { name, arguments: "" } }] });
    for (const word of words(args)) yield delta({ tool_calls: [{ index, function: { arguments: word } }] }, word);
  }
  const receipt = { format: "starling-receipt/1", request: { sampling: { seed: "SEED" } }, output: [] };
  yield chunk([{ index: 0, delta: {}, logprobs: null, finish_reason: finish, receipt }]);
  const usage = {
    prompt_tokens: 61,
    completion_tokens: n,
    total_tokens: 61 + n,
    prompt_tokens_details: { cached_tokens: 32 },
  };
  yield chunk([], usage);
}

/**
 * Serves the page. The returned object is what it answers with, and can be changed: `models`, `key`, `answers` (a list; the last
 * one stays), `delay` in ms between chunks, `pull` (lines of a download), `failure` as `{ status, message }`. `bodies` are the requests for answers.
 */
export async function mock(start = {}) {
  const state = {
    models: [model("qwen3-4b-q4_k_m", "loaded")],
    key: "",
    answers: [],
    delay: 0,
    failure: undefined,
    bodies: [],
    ...start,
  };
  const server = createServer(async (request, response) => {
    const { pathname } = new URL(request.url, "http://localhost");
    const json = (status, value) =>
      response.writeHead(status, { "content-type": "application/json" }).end(JSON.stringify(value));
    if (pathname === "/" || pathname.startsWith("/assets/")) {
      const name = pathname === "/" ? "index.html" : pathname.slice(1);
      const file = name === "assets/backend.js" ? "assets/backend-server.js" : name;
      const text = await readFile(demo + file).catch(() => undefined);
      if (!text) return response.writeHead(404).end();
      return response.writeHead(200, { "content-type": types[extname(file)] }).end(text);
    }
    let body = "";
    for await (const part of request) body += part;
    if (state.key && request.headers.authorization !== `Bearer ${state.key}`)
      return json(401, { error: { message: "expected an API key in `Authorization: Bearer KEY`" } });
    if (pathname === "/v1/models") return json(200, { object: "list", data: state.models });
    if (/^\/models\/(un)?load$/.test(pathname)) {
      const { model: id } = JSON.parse(body);
      const found = state.models.find((other) => other.id === id);
      Object.assign(found, loaded, { status: { value: pathname === "/models/load" ? "loading" : "unloaded" } });
      setTimeout(() => pathname === "/models/load" && (found.status = { value: "loaded" }), state.loadTime ?? 300);
      return json(200, { success: true });
    }
    if (pathname === "/api/pull") {
      response.writeHead(200, { "content-type": "application/x-ndjson" });
      for (const line of state.pull) {
        response.write(`${JSON.stringify(line)}\n`);
        await new Promise((resolve) => setTimeout(resolve, 200));
      }
      state.models.push(model(JSON.parse(body).model, "unloaded", {}));
      return response.end();
    }
    if (pathname === "/v1/verify") return json(200, { verified: true, tokens: 3, digest: "", reason: null });
    if (pathname !== "/v1/chat/completions") return json(404, { error: { message: `no such path: ${pathname}` } });
    state.bodies.push(JSON.parse(body));
    if (state.failure) return json(state.failure.status, { error: { message: state.failure.message } });
    response.writeHead(200, { "content-type": "text/event-stream" });
    const answer = state.answers.length > 1 ? state.answers.shift() : state.answers[0];
    for (const chunk of chunksOf(answer)) {
      if (response.destroyed) return;
      // a seed that a JSON number of JavaScript does not have
      response.write(`data: ${JSON.stringify(chunk).replace('"SEED"', "18446744073709551615")}\n\n`);
      if (state.delay) await new Promise((resolve) => setTimeout(resolve, state.delay));
    }
    response.end("data: [DONE]\n\n");
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  state.origin = `http://127.0.0.1:${server.address().port}`;
  state.close = () => {
    server.closeAllConnections();
    return new Promise((resolve) => server.close(resolve));
  };
  return state;
}

const FENCE = "```";

/** An answer with all that Markdown has. */
export const RICH = {
  reasoning:
    "The user wants a function that reverses a linked list. The iterative way needs three references and no recursion, so long lists do not overflow the stack. I will show it in Python, explain the steps, and compare it with recursion.",
  text: `Walk through the list once and turn each link around. Three references are enough: the node **before**, the **current** one, and the one that comes **next**.

${FENCE}python
class Node:
    def __init__(self, value, next=None):
        self.value = value
        self.next = next

def reverse(head):
    """Reverse a linked list in place."""
    before = None
    while head is not None:
        # the link is turned around, then both move on
        head.next, before, head = before, head, head.next
    return before
${FENCE}

### How it compares

| Way | Time | Memory | Long lists |
|---|---|---|---|
| Iterative | O(n) | O(1) | fine |
| Recursive | O(n) | O(n) | may overflow the stack |

1. \`before\` begins as \`None\`, which becomes the end of the new list.
2. Each step moves one node from the old list to the new one.
3. When the old list is empty, \`before\` is the new head.

> The right side of an assignment is evaluated first, so no temporary name is needed.`,
};

/** An answer that calls a tool. */
export const CALLING = {
  text: "I will look that up.",
  calls: [{ name: "get_weather", args: '{"city": "Reykjavík", "days": 3, "unit": "celsius"}' }],
  finish: "tool_calls",
};
