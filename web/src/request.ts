// Requests in the JSON of the module.

import { StarlingError } from "./errors.js";
import type { ChatMessage, GenerateOptions, SamplingOptions, TemplateOptions } from "./types.js";

/** For the module: look back at all tokens of the sequence. */
const ALL_TOKENS = 2 ** 32 - 1;

const lastN = (n: number | undefined) => (n === -1 ? ALL_TOKENS : n);

export type Prompt = { prompt: string } | { ids: number[] } | { chat: unknown };

/**
 * JSON of a value. A lone surrogate, which UTF-8 cannot encode, becomes U+FFFD as in `TextEncoder`: JSON.stringify escapes only
 * these as `\\ud…`.
 */
export const json = (value: unknown) =>
  JSON.stringify(value).replace(/\\(ud[89a-f]..|.)/g, (escape, what: string) => (what.length > 1 ? "\ufffd" : escape));

/** Parses JSON; keeps numbers as they are written, also beyond 2^53, if the JavaScript engine exposes the source text. */
export const parseExact = (text: string): unknown => JSON.parse(text, asWritten);

const asWritten = (_: string, value: unknown, context?: { source?: string }) =>
  typeof value === "number" && context?.source !== undefined && rawJSON ? rawJSON(context.source) : value;

const { rawJSON } = JSON as { rawJSON?: (text: string) => unknown };

/** Decodes UTF-8; U+FFFD for incomplete characters. */
export const lossy = new TextDecoder("utf-8", { ignoreBOM: true });

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
  // a seed has 64 bits, more than a JSON number in JavaScript; `sampling` comes first, so the first match is its seed
  return json(request).replace('"seed":"@"', `"seed":${seed(options.seed)}`);
}

/** A seed for a request without one: short enough to type. */
export const randomSeed = (): number => crypto.getRandomValues(new Uint32Array(1))[0]!;

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

export function chatJson(conversation: string | ChatMessage[], options: TemplateOptions) {
  const messages = typeof conversation === "string" ? [{ role: "user", content: conversation }] : conversation;
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
