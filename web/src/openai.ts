// Chat completions in the form of OpenAI's client.

import { StarlingError } from "./errors.js";
import type { Generation } from "./generation.js";
import type { ChatMessage, Completion, GenerateOptions, TemplateOptions, Token } from "./types.js";

/** What OpenAI's clients send. Options of sampling beyond OpenAI's have the names that llama.cpp's server gives them. */
export interface ChatCompletionRequest {
  messages: ChatMessage[];
  /** Ignored: there is one model. */
  model?: string;
  stream?: boolean;
  stream_options?: { include_usage?: boolean } | null;
  max_tokens?: number | null;
  max_completion_tokens?: number | null;
  temperature?: number | null;
  top_p?: number | null;
  n?: number | null;
  stop?: string | string[] | null;
  seed?: number | bigint | null;
  frequency_penalty?: number | null;
  presence_penalty?: number | null;
  logit_bias?: Record<string, number> | null;
  logprobs?: boolean | null;
  top_logprobs?: number | null;
  tools?: unknown[];
  /** Ignored. */
  user?: string;
  top_k?: number;
  min_p?: number;
  typical_p?: number;
  repeat_penalty?: number;
  repeat_last_n?: number;
  chat_template_kwargs?: Record<string, unknown>;
}

export interface ChatLogprob {
  token: string;
  logprob: number;
  bytes: number[];
  top_logprobs: { token: string; logprob: number; bytes: number[] }[];
}

export interface CompletionUsage {
  prompt_tokens: number;
  completion_tokens: number;
  total_tokens: number;
  prompt_tokens_details: { cached_tokens: number };
}

export interface ChatCompletion {
  id: string;
  object: "chat.completion";
  created: number;
  model: string;
  choices: {
    index: number;
    message: { role: "assistant"; content: string };
    logprobs: { content: ChatLogprob[] } | null;
    finish_reason: "stop" | "length";
  }[];
  usage: CompletionUsage;
}

export interface ChatCompletionChunk {
  id: string;
  object: "chat.completion.chunk";
  created: number;
  model: string;
  choices: {
    index: number;
    delta: { role?: "assistant"; content?: string };
    logprobs: { content: ChatLogprob[] } | null;
    finish_reason: "stop" | "length" | null;
  }[];
  usage?: CompletionUsage | null;
}

/** A request whose answer comes in pieces, or whole. */
type Streamed<S> = Omit<ChatCompletionRequest, "stream"> & (S extends true ? { stream: true } : { stream?: false });

type Chat = (messages: ChatMessage[], options: GenerateOptions & TemplateOptions) => Generation;

const KNOWN = new Set(
  (
    "messages model stream stream_options max_tokens max_completion_tokens temperature top_p n stop seed frequency_penalty presence_penalty " +
    "logit_bias logprobs top_logprobs tools user top_k min_p typical_p repeat_penalty repeat_last_n chat_template_kwargs"
  ).split(" "),
);

export class Completions {
  #chat: Chat;
  #model: string;
  #next = 0;

  /** @internal */
  constructor(chat: Chat, model: string) {
    this.#chat = chat;
    this.#model = model;
  }

  /** Answers a conversation; with `stream`, piece by piece. */
  create(request: Streamed<true>, options?: { signal?: AbortSignal }): Promise<AsyncIterable<ChatCompletionChunk>>;
  create(request: Streamed<false | undefined>, options?: { signal?: AbortSignal }): Promise<ChatCompletion>;
  async create(
    request: ChatCompletionRequest,
    { signal }: { signal?: AbortSignal } = {},
  ): Promise<ChatCompletion | AsyncIterable<ChatCompletionChunk>> {
    const unknown = Object.keys(request).find((name) => !KNOWN.has(name));
    if (unknown !== undefined) throw new StarlingError("request", `unknown parameter ${unknown}`);
    const options = given({
      maxTokens: request.max_completion_tokens ?? request.max_tokens,
      temperature: request.temperature,
      topP: request.top_p,
      topK: request.top_k,
      minP: request.min_p,
      typicalP: request.typical_p,
      repeatPenalty: request.repeat_penalty,
      repeatLastN: request.repeat_last_n,
      frequencyPenalty: request.frequency_penalty,
      presencePenalty: request.presence_penalty,
      logitBias: request.logit_bias,
      seed: request.seed,
      stop: request.stop,
      logprobs: request.logprobs ? (request.top_logprobs ?? true) : undefined,
      tools: request.tools,
      variables: request.chat_template_kwargs,
      signal,
    });
    const generations = Array.from({ length: request.n ?? 1 }, (_, sequence) =>
      this.#chat(request.messages, { ...options, sequence }),
    );
    const head = { id: `chatcmpl-${++this.#next}`, created: Math.floor(Date.now() / 1000), model: this.#model };
    if (request.stream)
      return chunks(
        generations,
        { ...head, object: "chat.completion.chunk" },
        request.stream_options?.include_usage ?? false,
      );
    // one that fails leaves the others without a reader
    const results = await Promise.all(generations.map(({ result }) => result)).finally(() => giveUp(generations));
    const choices = results.map(({ text, tokens, finishReason }, index) => ({
      index,
      message: { role: "assistant" as const, content: text },
      logprobs: request.logprobs ? { content: tokens.map(logprob) } : null,
      finish_reason: reason(finishReason),
    }));
    return { ...head, object: "chat.completion" as const, choices, usage: usage(results) };
  }
}

function given(options: Record<string, unknown>): GenerateOptions & TemplateOptions {
  return Object.fromEntries(Object.entries(options).filter(([, value]) => value !== undefined && value !== null));
}

function reason(finish: Completion["finishReason"]): "stop" | "length" {
  if (finish === "not_finite")
    throw new StarlingError("model", "the model's numbers are not finite: a fault of its weights with this prompt");
  return finish;
}

function usage(results: Completion[]): CompletionUsage {
  const sum = (of: (r: Completion) => number) => results.reduce((total, r) => total + of(r), 0);
  // a prompt is counted once, however many answers it has
  const prompt_tokens = results[0]?.usage.promptTokens ?? 0;
  const completion_tokens = sum((r) => r.usage.completionTokens);
  const cached_tokens = results[0]?.usage.cachedTokens ?? 0;
  return {
    prompt_tokens,
    completion_tokens,
    total_tokens: prompt_tokens + completion_tokens,
    prompt_tokens_details: { cached_tokens },
  };
}

const bytes = (text: string) => Array.from(new TextEncoder().encode(text));

function logprob(token: Token): ChatLogprob {
  const top = (token.top ?? []).map(({ text, logprob }) => ({ token: text, logprob, bytes: bytes(text) }));
  return { token: token.text, logprob: token.logprob ?? 0, bytes: bytes(token.text), top_logprobs: top };
}

/** Stops those that have not ended. */
function giveUp(generations: Generation[]): void {
  const reason = new DOMException("nobody reads the answer any more", "AbortError");
  for (const generation of generations) generation.fail(reason);
}

async function* chunks(
  generations: Generation[],
  head: Pick<ChatCompletionChunk, "id" | "object" | "created" | "model">,
  includeUsage: boolean,
): AsyncGenerator<ChatCompletionChunk, void> {
  const chunk = (choice: ChatCompletionChunk["choices"][number]) => ({
    ...head,
    choices: [choice],
    ...(includeUsage && { usage: null }),
  });
  const streams = generations.map((generation) => generation.tokens());
  const next = async (index: number) => ({ index, piece: await streams[index]!.next() });
  const open = new Set(streams.keys());
  const waiting = new Map<number, ReturnType<typeof next>>();
  try {
    for (const index of open) {
      yield chunk({ index, delta: { role: "assistant", content: "" }, logprobs: null, finish_reason: null });
    }
    while (open.size > 0) {
      // asked only now: nobody would see what becomes of it if the caller left at a `yield`
      for (const index of open) if (!waiting.has(index)) waiting.set(index, next(index));
      // whichever has a token next
      const { index, piece } = await Promise.race(waiting.values());
      waiting.delete(index);
      if (piece.done) {
        open.delete(index);
        const { finishReason } = await generations[index]!.result;
        yield chunk({ index, delta: {}, logprobs: null, finish_reason: reason(finishReason) });
        continue;
      }
      const { value: token } = piece;
      const logprobs = token.logprob === undefined ? null : { content: [logprob(token)] };
      if (token.text !== "" || logprobs)
        yield chunk({ index, delta: { content: token.text }, logprobs, finish_reason: null });
    }
    if (includeUsage) {
      yield { ...head, choices: [], usage: usage(await Promise.all(generations.map(({ result }) => result))) };
    }
  } finally {
    giveUp(generations);
  }
}
