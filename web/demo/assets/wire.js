// Requests and responses in the form of OpenAI's API, which both back ends have.

/** Tokens at most of a text that is continued, if the settings name no number. */
const WRITE_TOKENS = 200;
/** Alternatives shown for each token. */
const ALTERNATIVES = 5;

/** Names of options in the API. */
export const NAMES = {
  maxTokens: "max_tokens",
  temperature: "temperature",
  topK: "top_k",
  topP: "top_p",
  minP: "min_p",
  typicalP: "typical_p",
  repeatPenalty: "repetition_penalty",
  repeatLastN: "repeat_last_n",
  frequencyPenalty: "frequency_penalty",
  presencePenalty: "presence_penalty",
  stop: "stop",
  seed: "seed",
  tools: "tools",
};

/** Fields that say what the answer has to be. */
function structureOf({ json, regex }) {
  return json
    ? { response_format: { type: "json_schema", json_schema: { name: "answer", schema: json } } }
    : { structured_outputs: { regex } };
}

/** The body of a request with `messages` or a `prompt`. */
export function bodyOf({ messages, prompt, options }) {
  const known = Object.entries(options).filter(([name]) => NAMES[name]);
  return {
    ...(messages ? { messages } : { prompt, max_tokens: WRITE_TOKENS }),
    ...Object.fromEntries(known.map(([name, value]) => [NAMES[name], value])),
    // as `starling run` and llama.cpp count
    penalty_scope: "all",
    stream: true,
    stream_options: { include_usage: true },
    ...(messages ? { logprobs: true, top_logprobs: ALTERNATIVES } : { logprobs: ALTERNATIVES }),
    ...(options.structure ? structureOf(options.structure) : { receipt: true }),
  };
}

/** Options of `generate` in the package for the same request. */
export const generateOptions = ({ tools, ...options }) => ({
  ...options,
  maxTokens: options.maxTokens ?? WRITE_TOKENS,
  logprobs: ALTERNATIVES,
  // answers with a structure have no receipt
  receipt: options.structure === undefined,
});

/**
 * What a chunk brings: `{ text, reasoning, calls, tokens, finish, receipt, usage, seed }`. Tokens are
 * `{ text, bytes?, logprob, top }`, calls the new parts of tool calls.
 */
export function eventOf({ choices, usage, seed }) {
  const [choice] = choices;
  const event = { usage: usage ?? undefined, seed, tokens: [] };
  if (!choice) return event;
  const { delta, text, logprobs } = choice;
  if (logprobs?.content) {
    event.tokens = logprobs.content.map(({ token, bytes, logprob, top_logprobs: top }) => ({
      text: token,
      bytes,
      logprob,
      top: top.map((other) => ({ text: other.token, logprob: other.logprob })),
    }));
  } else if (logprobs?.tokens) {
    event.tokens = logprobs.tokens.map((token, i) => ({
      text: token,
      logprob: logprobs.token_logprobs[i],
      top: Object.entries(logprobs.top_logprobs[i] ?? {})
        .map(([other, logprob]) => ({ text: other, logprob }))
        .sort((a, b) => b.logprob - a.logprob),
    }));
  }
  return {
    ...event,
    text: delta ? delta.content : text,
    reasoning: delta?.reasoning_content,
    calls: delta?.tool_calls,
    finish: choice.finish_reason ?? undefined,
    receipt: choice.receipt,
  };
}

/** An object of a JSON text, verbatim: `JSON.parse` would round the 64-bit numbers in it. */
function verbatim(json, start) {
  let depth = 0;
  let isString = false;
  for (let i = start; i < json.length; i++) {
    const c = json[i];
    if (isString) {
      if (c === "\\") i += 1;
      else if (c === '"') isString = false;
    } else if (c === '"') isString = true;
    else if (c === "{") depth += 1;
    else if (c === "}" && --depth === 0) return json.slice(start, i + 1);
  }
  return undefined;
}

/** A chunk as the server sends it, with the whole seed, and the receipt as a text. */
export function parseChunk(json) {
  const chunk = JSON.parse(json);
  const [choice] = chunk.choices ?? [];
  // only the last chunk of a choice has one, and no text of the model
  if (choice?.receipt) choice.receipt = verbatim(json, json.indexOf('"receipt":') + '"receipt":'.length);
  const seed = json.slice(json.lastIndexOf('"seed":') + '"seed":'.length).match(/^\d+/)?.[0];
  if (seed && !Number.isSafeInteger(chunk.seed)) chunk.seed = BigInt(seed);
  return chunk;
}

/** A body as JSON; a seed may have 64 bits. */
export function jsonOf({ seed, ...body }) {
  const json = JSON.stringify(body);
  return seed === undefined ? json : `{"seed":${seed},${json.slice(1)}`;
}

/** The complete parts of a streamed text, each followed by `separator`. */
export async function* partsOf(body, separator) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split(separator);
      rest = parts.pop();
      yield* parts;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The data of server-sent events. */
export async function* eventsOf(body) {
  for await (const event of partsOf(body, "\n\n")) {
    const data = event
      .split("\n")
      .filter((line) => line.startsWith("data:"))
      .map((line) => line.slice(5).trimStart())
      .join("\n");
    if (data !== "" && data !== "[DONE]") yield data;
  }
}
