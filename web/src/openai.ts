// Chat completions in the form of OpenAI's client.

import { StarlingError } from "./errors.js";
import type { Generation } from "./generation.js";
import { type StructureRequest, type Wanted, ofRequest, wanted } from "./structure.js";
import { type Divided, Divider, type ToolCall, checkedCalls, told } from "./tools.js";
import type { ChatMessage, Completion, GenerateOptions, TemplateOptions, Token } from "./types.js";

/**
 * What OpenAI's clients send, with the names and the defaults of `starling serve`: the answer is that of the server to the
 * same body, but that the seed is 0 unless it is given.
 */
export interface ChatCompletionRequest extends StructureRequest {
  messages: ChatMessage[];
  /** Ignored: there is one model. */
  model?: string;
  stream?: boolean;
  stream_options?: { include_usage?: boolean } | null;
  max_tokens?: number | null;
  max_completion_tokens?: number | null;
  /** 1 by default; 0 takes the most probable token. */
  temperature?: number | null;
  /** 1, the default, is off; 0 takes the most probable token. */
  top_p?: number | null;
  n?: number | null;
  stop?: string | string[] | null;
  seed?: number | bigint | null;
  frequency_penalty?: number | null;
  presence_penalty?: number | null;
  /** Whether these two count the tokens of the answer only, so by default, or those of the prompt too. */
  penalty_scope?: "all" | "answer" | null;
  logit_bias?: Record<string, number> | null;
  logprobs?: boolean | null;
  top_logprobs?: number | null;
  /** Functions that the model may call, where its chat template tells of them; those that are `strict` by their schemas. */
  tools?: unknown[] | null;
  /** `none` does not tell the model of them; `required` makes the answer nothing but calls, a function one call of it. */
  tool_choice?: "auto" | "none" | "required" | { type: "function"; function: { name: string } } | null;
  /** Whether an answer that is made to call may do so more than once: so by default. */
  parallel_tool_calls?: boolean | null;
  /** Ignored, as are the server's names for who is served first and what its cache keeps apart. */
  user?: string | null;
  priority?: unknown;
  cache_salt?: string | null;
  /** 0 or -1, the default, is off. */
  top_k?: number | null;
  /** 0, the default, is off. */
  min_p?: number | null;
  typical_p?: number | null;
  repetition_penalty?: number | null;
  /** The same. */
  repeat_penalty?: number | null;
  /** Tokens the penalties look back at, all by default; the server always takes all. */
  repeat_last_n?: number | null;
  /** 0, the default, is off. */
  dry_multiplier?: number | null;
  dry_base?: number | null;
  dry_allowed_length?: number | null;
  dry_penalty_last_n?: number | null;
  dry_sequence_breakers?: string[] | null;
  stop_token_ids?: number[] | null;
  ignore_eos?: boolean | null;
  /** Whether answers come with a receipt, which is a text here. */
  receipt?: boolean | null;
  /** Continue the last message, which must be the assistant's, instead of starting a new one. Default: false. */
  continue_final_message?: boolean | null;
  /** Append the generation prompt of the chat template. Default: true, unless the last message is continued. */
  add_generation_prompt?: boolean | null;
  chat_template_kwargs?: Record<string, unknown> | null;
  /** Jinja in place of the model's own template. */
  chat_template?: string | null;
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
    /** Without text where there is none beside calls. */
    message: { role: "assistant"; content: string | null; tool_calls?: ToolCall[] };
    logprobs: { content: ChatLogprob[] } | null;
    finish_reason: "stop" | "length" | "tool_calls";
    /** If asked for. */
    receipt?: string;
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
    /** Calls come whole. */
    delta: { role?: "assistant"; content?: string; tool_calls?: ToolCall[] };
    logprobs: { content: ChatLogprob[] } | null;
    finish_reason: "stop" | "length" | "tool_calls" | null;
    /** If asked for, in the last piece. */
    receipt?: string;
  }[];
  usage?: CompletionUsage | null;
}

/** A request whose answer comes in pieces, or whole. */
type Streamed<S> = Omit<ChatCompletionRequest, "stream"> & (S extends true ? { stream: true } : { stream?: false });

type Chat = (
  messages: ChatMessage[],
  options: GenerateOptions & TemplateOptions,
  wanted: Wanted | undefined,
) => Generation;

const KNOWN = new Set(
  (
    "messages model stream stream_options max_tokens max_completion_tokens temperature top_p n stop seed " +
    "frequency_penalty presence_penalty penalty_scope continue_final_message add_generation_prompt logit_bias logprobs top_logprobs tools tool_choice parallel_tool_calls user " +
    "top_k min_p typical_p repetition_penalty repeat_penalty repeat_last_n stop_token_ids ignore_eos receipt " +
    "dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers priority cache_salt " +
    "chat_template_kwargs chat_template response_format json_schema grammar structured_outputs guided_json " +
    "guided_regex guided_choice guided_grammar"
  ).split(" "),
);

/** Answers to a request, at most: as the server has it. */
const MOST_ANSWERS = 128;

export class Completions {
  #chat: Chat;
  #model: string;
  #template: string;
  #next = 0;
  #calls = 0;

  /** @internal */
  constructor(chat: Chat, model: string, template: string) {
    this.#chat = chat;
    this.#model = model;
    this.#template = template;
  }

  /** Answers a conversation; with `stream`, piece by piece. */
  create(request: Streamed<true>, options?: { signal?: AbortSignal }): Promise<AsyncIterable<ChatCompletionChunk>>;
  create(request: Streamed<false | undefined>, options?: { signal?: AbortSignal }): Promise<ChatCompletion>;
  create(
    request: ChatCompletionRequest,
    options?: { signal?: AbortSignal },
  ): Promise<ChatCompletion | AsyncIterable<ChatCompletionChunk>>;
  async create(
    request: ChatCompletionRequest,
    { signal }: { signal?: AbortSignal } = {},
  ): Promise<ChatCompletion | AsyncIterable<ChatCompletionChunk>> {
    const unknown = Object.entries(request).find(([name, value]) => !KNOWN.has(name) && (value ?? null) !== null);
    if (unknown) throw new StarlingError("request", `${unknown[0]} is not supported in the page`);
    if (!Array.isArray(request.messages)) throw new StarlingError("request", "messages is not a list");
    const n = request.n ?? 1;
    if (!(Number.isSafeInteger(n) && n >= 1 && n <= MOST_ANSWERS))
      throw new StarlingError("request", `n is ${n}, expected a whole number from 1 to ${MOST_ANSWERS}`);
    const { tools, calls, isBound, isForced } = told(request, request.chat_template ?? this.#template);
    const form = ofRequest(request);
    if (form && isForced)
      throw new StarlingError("request", `${form.param} is given, but tool_choice asks for a call`);
    const asked = form && calls ? calls(form) : form ? wanted(form) : isBound ? calls?.() : undefined;
    const name = () => `call_${++this.#calls}`;
    const messages = request.messages.map(plain);
    const isGreedy = request.top_p === 0;
    const options = given({
      maxTokens: request.max_completion_tokens ?? request.max_tokens,
      temperature: isGreedy ? 0 : (request.temperature ?? 1),
      topP: isGreedy ? 1 : (request.top_p ?? 1),
      topK: Math.max(request.top_k ?? 0, 0),
      minP: request.min_p ?? 0,
      typicalP: request.typical_p,
      repeatPenalty: request.repetition_penalty ?? request.repeat_penalty,
      repeatLastN: request.repeat_last_n ?? -1,
      frequencyPenalty: request.frequency_penalty,
      presencePenalty: request.presence_penalty,
      // a scope that changes nothing is left out, so that receipts are those of the server
      penaltyScope: request.frequency_penalty || request.presence_penalty ? (request.penalty_scope ?? "answer") : "all",
      dry: dry(request),
      logitBias: request.logit_bias,
      seed: seed(request.seed),
      stop: request.stop,
      stopTokens: request.stop_token_ids,
      ignoreEos: request.ignore_eos,
      receipt: request.receipt,
      logprobs: request.logprobs ? (request.top_logprobs ?? true) : undefined,
      tools,
      template: request.chat_template,
      variables: request.chat_template_kwargs,
      ...opening(request),
      signal,
    });
    const generations = Array.from({ length: n }, (_, sequence) =>
      this.#chat(messages, { ...options, sequence }, asked),
    );
    // without tools nothing in an answer is a call
    const dividers = generations.map(() => new Divider(tools && name, form !== undefined));
    const head = { id: `chatcmpl-${++this.#next}`, created: Math.floor(Date.now() / 1000), model: this.#model };
    if (request.stream)
      return chunks(
        generations,
        dividers,
        { ...head, object: "chat.completion.chunk" },
        request.stream_options?.include_usage ?? false,
      );
    // one that fails leaves the others without a reader
    const results = await Promise.all(generations.map(({ result }) => result)).finally(() => giveUp(generations));
    const choices = results.map(({ text, tokens, finishReason, receipt }, index) => ({
      index,
      message: message(text, dividers[index]!, isCut(results[index]!)),
      logprobs: request.logprobs ? { content: tokens.map(logprob) } : null,
      finish_reason: reason(finishReason, dividers[index]!),
      ...(receipt !== undefined && { receipt }),
    }));
    return { ...head, object: "chat.completion" as const, choices, usage: usage(results) };
  }
}

/** The options that are not null. */
function given<T extends object>(options: T): { [name in keyof T]?: NonNullable<T[name]> } {
  return Object.fromEntries(Object.entries(options).filter(([, value]) => value !== undefined && value !== null)) as T;
}

function dry(request: ChatCompletionRequest): GenerateOptions["dry"] {
  const { dry_multiplier: multiplier } = request;
  if (!multiplier) return undefined;
  return {
    multiplier,
    ...given({
      base: request.dry_base,
      allowedLength: request.dry_allowed_length,
      lastN: request.dry_penalty_last_n,
      breakers: request.dry_sequence_breakers,
    }),
  };
}

/** Seeds have 64 bits, of which OpenAI's clients may take one for the sign. */
function seed(seed: ChatCompletionRequest["seed"]): number | bigint | undefined {
  const negative = (typeof seed === "bigint" || Number.isSafeInteger(seed)) && seed! < 0 && seed! >= -(2n ** 63n);
  return negative ? BigInt.asUintN(64, BigInt(seed!)) : (seed ?? undefined);
}

/** A message as the server gives it to the template: parts as one text, the arguments of earlier calls as data. */
function plain(message: ChatMessage, i: number): ChatMessage {
  if (message === null || typeof message !== "object") return message;
  const { tool_calls: calls, ...rest } = message;
  const { role, content } = rest;
  return {
    ...rest,
    content: Array.isArray(content) ? content.map(text).join("\n") : role === "assistant" ? (content ?? "") : content,
    ...((calls ?? null) !== null && { tool_calls: checkedCalls(calls, `messages[${i}].tool_calls`) }),
  };
}

/** How the text of a conversation ends: as the server has it. */
function opening(
  { continue_final_message: continued, add_generation_prompt: begun }: ChatCompletionRequest,
): { addGenerationPrompt: boolean; continueFinalMessage: boolean } {
  if (continued === true && begun === true)
    throw new StarlingError(
      "request",
      "continue_final_message and add_generation_prompt are both true, expected one of them",
    );
  const continueFinalMessage = continued === true;
  return { addGenerationPrompt: !continueFinalMessage && begun !== false, continueFinalMessage };
}

function text(part: { type?: unknown; text?: unknown } | null): string {
  if (part?.type === "text" && typeof part.text === "string") return part.text;
  throw new StarlingError("request", `a part of content is ${JSON.stringify(part?.type)}, expected "text" with a text`);
}

/** Whether an answer that ended so may have been in the middle of something. */
const isCut = ({ finishReason, stopToken }: Completion) => finishReason !== "stop" || stopToken === undefined;

function message(text: string, divider: Divider, cut: boolean): ChatCompletion["choices"][number]["message"] {
  const parts = [divider.push(text), divider.finish(cut)];
  const said = parts.map((part) => part.said).join("");
  const calls = parts.flatMap((part) => part.calls);
  return { role: "assistant", content: said, ...(calls.length > 0 && { content: said || null, tool_calls: calls }) };
}

/** Why an answer ended; a divider has seen all of it. */
function reason(finish: Completion["finishReason"], { calls }: Divider): "stop" | "length" | "tool_calls" {
  if (finish === "not_finite")
    throw new StarlingError("model", "the model's numbers are not finite: a fault of its weights with this prompt");
  return finish === "stop" && calls > 0 ? "tool_calls" : finish;
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

/** Bytes as text; where they are none, `\\x` and each of them in hexadecimal. */
function named(bytes: number[]): string {
  try {
    return strict.decode(Uint8Array.from(bytes));
  } catch {
    return bytes.map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("");
  }
}

const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/** A token by what it stands for, not by the text that has become certain with it. */
function logprob(token: Token): ChatLogprob {
  const { logprob = 0, bytes = [] } = token;
  const top = (token.top ?? []).map(({ bytes, logprob }) => ({ token: named(bytes), logprob, bytes }));
  return { token: named(bytes), logprob, bytes, top_logprobs: top };
}

/** Stops those that have not ended. */
function giveUp(generations: Generation[]): void {
  const reason = new DOMException("nobody reads the answer any more", "AbortError");
  for (const generation of generations) generation.fail(reason);
}

async function* chunks(
  generations: Generation[],
  dividers: Divider[],
  head: Pick<ChatCompletionChunk, "id" | "object" | "created" | "model">,
  includeUsage: boolean,
): AsyncGenerator<ChatCompletionChunk, void> {
  const chunk = (choice: ChatCompletionChunk["choices"][number]) => ({
    ...head,
    choices: [choice],
    ...(includeUsage && { usage: null }),
  });
  const piece = (index: number, { said, calls }: Divided, logprobs: { content: ChatLogprob[] } | null) => {
    if (said === "" && calls.length === 0 && !logprobs) return [];
    const delta = {
      ...((said !== "" || calls.length === 0) && { content: said }),
      ...(calls.length > 0 && { tool_calls: calls }),
    };
    return [chunk({ index, delta, logprobs, finish_reason: null })];
  };
  const streams = generations.map((generation) => generation.tokens());
  const next = async (index: number) => ({ index, token: await streams[index]!.next() });
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
      const { index, token } = await Promise.race(waiting.values());
      waiting.delete(index);
      const divider = dividers[index]!;
      if (token.done) {
        open.delete(index);
        const result = await generations[index]!.result;
        const { finishReason, receipt } = result;
        yield* piece(index, divider.finish(isCut(result)), null);
        yield chunk({
          index,
          delta: {},
          logprobs: null,
          finish_reason: reason(finishReason, divider),
          ...(receipt !== undefined && { receipt }),
        });
        continue;
      }
      const { text, logprob: known } = token.value;
      const logprobs = known === undefined ? null : { content: [logprob(token.value)] };
      yield* piece(index, divider.push(text), logprobs);
    }
    if (includeUsage) {
      yield { ...head, choices: [], usage: usage(await Promise.all(generations.map(({ result }) => result))) };
    }
  } finally {
    giveUp(generations);
  }
}
