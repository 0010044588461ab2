// Checks option names and types at run time, for callers without TypeScript.

import { StarlingError } from "./errors.js";
import type { GenerateOptions, LoadOptions, TemplateOptions } from "./types.js";

/** What an option takes: names of `typeof`, `array`, or `whole` for whole numbers from 0. */
type Kind = "boolean" | "number" | "bigint" | "string" | "object" | "array" | "function" | "whole" | "any";

/** Options by name, and what each takes, separated by `|`. */
export type OptionTypes = Record<string, string>;

const SAMPLING = {
  logitBias: "object|array",
  repeatPenalty: "number",
  repeatLastN: "number",
  frequencyPenalty: "number",
  presencePenalty: "number",
  penaltyScope: "string",
  dry: "object",
  topK: "number",
  typicalP: "number",
  topP: "number",
  minP: "number",
  temperature: "number",
  seed: "number|bigint",
};

export const GENERATE_OPTIONS: OptionTypes = {
  ...SAMPLING,
  maxTokens: "whole",
  stop: "string|array",
  stopTokens: "array",
  ignoreEos: "boolean",
  structure: "object",
  logprobs: "boolean|whole",
  logprobsOf: "string",
  sequence: "whole",
  receipt: "boolean",
  parseSpecial: "boolean",
  signal: "object",
} satisfies Record<keyof GenerateOptions, string>;

export const TEMPLATE_OPTIONS: OptionTypes = {
  tools: "array",
  variables: "object",
  template: "string",
  addGenerationPrompt: "boolean",
  continueFinalMessage: "boolean",
  now: "object",
} satisfies Record<keyof TemplateOptions, string>;

export const CHAT_OPTIONS: OptionTypes = { ...GENERATE_OPTIONS, ...TEMPLATE_OPTIONS };

export const LOAD_OPTIONS: OptionTypes = {
  onProgress: "function",
  signal: "object",
  cache: "string",
  headers: "object",
  sha256: "string|array",
  size: "whole",
  receipts: "boolean",
  contextLength: "whole",
  sequences: "whole",
  batchTokens: "whole",
  workingMemory: "whole",
  kvCache: "object|boolean",
  draftMax: "whole",
  draftModel: "any",
  draftMtp: "boolean",
  kvType: "string",
  threads: "any",
  worker: "boolean",
  isa: "string",
  memory64: "boolean",
  wasm: "any",
  grammarWasm: "any",
} satisfies Record<keyof LoadOptions, string>;

/** Names in llama.cpp, OpenAI's API and transformers.js that are not found by likeness. */
const OTHER_NAMES: Record<string, string> = {
  temp: "temperature",
  n: "maxTokens",
  npredict: "maxTokens",
  maxnewtokens: "maxTokens",
  maxcompletiontokens: "maxTokens",
  maxlength: "maxTokens",
  nctx: "contextLength",
  ctxsize: "contextLength",
  contextsize: "contextLength",
  numctx: "contextLength",
  nthreads: "threads",
  parallel: "sequences",
  progresscallback: "onProgress",
  repetitionpenalty: "repeatPenalty",
  stopsequences: "stop",
  stoptokenids: "stopTokens",
  responseformat: "structure",
  jsonschema: "structure",
  grammar: "structure",
  toplogprobs: "logprobs",
  randomseed: "seed",
  abortsignal: "signal",
  chattemplate: "template",
};

/** Throws if an option has no known name or another type; `undefined` is as good as missing. */
export function checkOptions(options: object, known: OptionTypes): void {
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined) continue;
    if (!Object.hasOwn(known, name)) throw new StarlingError("request", unknown(name, known));
    const kinds = known[name]!.split("|") as Kind[];
    if (!kinds.some((kind) => isOf(kind, value)))
      throw new StarlingError("request", `${name} is ${shown(value)}, expected ${kinds.map((kind) => KINDS[kind]).join(" or ")}`);
  }
}

const KINDS: Record<Kind, string> = {
  boolean: "true or false",
  number: "a number",
  bigint: "a BigInt",
  string: "a text",
  object: "an object",
  array: "an array",
  function: "a function",
  whole: "a whole number",
  any: "a value",
};

function isOf(kind: Kind, value: unknown): boolean {
  if (kind === "any") return true;
  if (kind === "array") return Array.isArray(value);
  if (kind === "object") return typeof value === "object" && value !== null && !Array.isArray(value);
  if (kind === "whole") return Number.isSafeInteger(value) && (value as number) >= 0;
  return typeof value === kind;
}

const shown = (value: unknown) => (typeof value === "string" ? JSON.stringify(value) : Array.isArray(value) ? "an array" : String(value));

function unknown(name: string, known: OptionTypes): string {
  const plain = (name: string) => name.toLowerCase().replace(/[^a-z0-9]/g, "");
  const other = OTHER_NAMES[plain(name)];
  const near = (candidate: string) => distance(plain(candidate), plain(name));
  const [nearest] = Object.keys(known).sort((a, b) => near(a) - near(b));
  const isNear = nearest !== undefined && near(nearest) <= Math.max(1, name.length / 4);
  const meant = other !== undefined && Object.hasOwn(known, other) ? other : isNear ? nearest : undefined;
  return `there is no option ${name}${meant === undefined ? `; the options are ${Object.keys(known).join(", ")}` : `, did you mean ${meant}?`}`;
}

/** Levenshtein distance. */
function distance(a: string, b: string): number {
  let row = Array.from({ length: b.length + 1 }, (_, j) => j);
  for (let i = 1; i <= a.length; i++) {
    const next = [i];
    for (let j = 1; j <= b.length; j++)
      next.push(Math.min(row[j]! + 1, next[j - 1]! + 1, row[j - 1]! + Number(a[i - 1] !== b[j - 1])));
    row = next;
  }
  return row[b.length]!;
}
