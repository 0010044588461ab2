// Options of callers as the module takes them.

import { StarlingError } from "./errors.js";
import type { ChatMessage, GenerateOptions, SamplingOptions, TemplateOptions } from "./types.js";

/** All tokens of the sequence, where the module counts them. */
const ALL_TOKENS = 2 ** 32 - 1;

const lastN = (n: number | undefined) => (n === -1 ? ALL_TOKENS : n);

/** What a request continues. */
export type Prompt = { prompt: string } | { ids: number[] } | { chat: unknown };

/**
 * JSON of a value. Half a surrogate pair, which UTF-8 cannot say, becomes U+FFFD, as `TextEncoder` has it: JSON.stringify
 * escapes it, and nothing else that begins with those letters.
 */
export const json = (value: unknown) =>
  JSON.stringify(value).replace(/\\(ud[89a-f]..|.)/g, (escape, what: string) => (what.length > 1 ? "\ufffd" : escape));

/** Parses JSON; numbers stay as they were written, beyond 2^53 too, where the JavaScript engine tells how that was. */
export const parseExact = (text: string): unknown => JSON.parse(text, asWritten);

const asWritten = (_: string, value: unknown, context?: { source?: string }) =>
  typeof value === "number" && context?.source !== undefined && rawJSON ? rawJSON(context.source) : value;

const { rawJSON } = JSON as { rawJSON?: (text: string) => unknown };

/** Text of bytes that may be a part of a character: U+FFFD for what is none. */
export const lossy = new TextDecoder("utf-8", { ignoreBOM: true });

/** A request in JSON. */
export function requestJson(prompt: Prompt, options: GenerateOptions): string {
  const { stop } = options;
  const request = {
    sampling: sampling(options),
    ...prompt,
    max_tokens: options.maxTokens,
    stop: typeof stop === "string" ? [stop] : stop,
    stop_tokens: options.stopTokens,
    ignore_eos: options.ignoreEos,
    parse_special: options.parseSpecial,
    sequence: options.sequence,
    receipt: options.receipt,
    dry_breakers: options.dry?.breakers?.filter((breaker) => typeof breaker === "string"),
  };
  // the seed has 64 bits, more than a number holds; sampling comes first, so this is the only place it can be
  return json(request).replace('"seed":"@"', `"seed":${seed(options.seed)}`);
}

function seed(seed: number | bigint = 0): string {
  const valid = typeof seed === "bigint" ? seed >= 0n && seed < 1n << 64n : Number.isSafeInteger(seed) && seed >= 0;
  if (!valid)
    throw new StarlingError("request", `seed is ${seed}, expected a whole number from 0, as a BigInt if above 2^53`);
  return String(seed);
}

function sampling(o: SamplingOptions & Pick<GenerateOptions, "logprobs" | "logprobsOf">) {
  const bias = Array.isArray(o.logitBias)
    ? o.logitBias
    : Object.entries(o.logitBias ?? {}).map(([id, bias]) => [Number(id), bias]);
  const logprobs = o.logprobs !== undefined && o.logprobs !== false;
  return {
    seed: "@",
    logit_bias: bias,
    repeat_penalty: o.repeatPenalty,
    repeat_last_n: lastN(o.repeatLastN),
    frequency_penalty: o.frequencyPenalty,
    presence_penalty: o.presencePenalty,
    penalty_scope: o.penaltyScope,
    dry: o.dry && {
      multiplier: o.dry.multiplier,
      base: o.dry.base ?? 1.75,
      allowed_length: o.dry.allowedLength ?? 2,
      last_n: lastN(o.dry.lastN ?? -1),
      breakers: o.dry.breakers?.filter((breaker) => typeof breaker !== "string"),
    },
    top_k: o.topK,
    typical_p: o.typicalP,
    top_p: o.topP,
    min_p: o.minP,
    temperature: o.temperature,
    logprobs: logprobs ? (o.logprobsOf ?? "raw") : undefined,
    top_logprobs: typeof o.logprobs === "number" ? o.logprobs : undefined,
  };
}

/** A conversation in JSON. */
export function chatJson(messages: ChatMessage[], options: TemplateOptions) {
  const now = options.now ?? new Date();
  return {
    messages,
    tools: options.tools,
    variables: options.variables,
    template: options.template,
    add_generation_prompt: options.addGenerationPrompt,
    continue_final_message: options.continueFinalMessage,
    // local time
    now: Math.floor(now.getTime() / 1000) - now.getTimezoneOffset() * 60,
  };
}
