// What callers pass and get.

import type { Isa, WasmSource } from "./features.js";
import type { Structure } from "./structure.js";

/** How far loading is. */
export interface Progress {
  /** Where bytes come from. */
  from: "network" | "cache" | "local";
  /** Bytes so far, of all files. */
  loaded: number;
  /** Bytes of all files; `Infinity` while that is not known, as a server or a stream does not say. */
  total: number;
  /** Bytes a second, lately. */
  rate: number;
  /** Seconds left at that rate; `Infinity` where the total is. */
  remaining: number;
}

/** Options of {@link Starling.load}. */
export interface LoadOptions {
  /** Called while loading, ten times a second at most, and at the end. */
  onProgress?: (progress: Progress) => void;
  /** Stops loading, at every stage; nothing is left in the cache, unless the file was complete already. */
  signal?: AbortSignal;
  /**
   * What the cache is for, where the source is a URL:
   *
   * - `reuse`, the default: a cached file is used without asking the network
   * - `revalidate`: the server is asked whether its ETag, date or size have changed; a cached file is used if not, or
   *   if the server cannot be reached
   * - `reload`: the file is downloaded and cached anew
   * - `none`: nothing is read from the cache or written to it
   */
  cache?: "reuse" | "revalidate" | "reload" | "none";
  /** Headers of requests for files, as `{ authorization: "Bearer …" }` for a model that not everybody may have. */
  headers?: Record<string, string>;
  /** SHA-256 that the file must have, in hexadecimal; of a split model one for each file. A cached file with another is replaced. */
  sha256?: string | string[];
  /** Bytes of a stream. Without it, a stream is read to its end before loading starts. */
  size?: number;
  /** Makes the file's SHA-256, which answers with receipts and {@link Starling.verify} need. */
  receipts?: boolean;
  /** Tokens of a sequence, prompt and answer; by default what the model was made for, at most 4096. */
  contextLength?: number;
  /** Generations at once, 1 by default; more wait their turn. Each takes memory for a context. */
  sequences?: number;
  /** Tokens of a prompt that are processed at a time, 64 by default: how long an abort may take. */
  batchTokens?: number;
  /** Bytes of working memory that batches may have, at most; by default 2 GiB, or what the weights take if that is more. */
  workingMemory?: number;
  /** How keys and values are kept; `f16` by default. Changes numbers. */
  kvType?: "f32" | "f16" | "k8";
  /**
   * Threads, at most; by default about as many as there are cores. There is one only where memory cannot be shared
   * (a page must be cross-origin isolated) and without a worker: {@link ModelInfo.threads} says how many are used.
   */
  threads?: number;
  /** Whether to run in a worker of its own; by default where there is a document, so that the page stays responsive. */
  worker?: boolean;
  /** The instruction set to use; by default the fastest of this runtime. All give the same bytes. */
  isa?: Isa;
  /** The WebAssembly module, or where it is, for runtimes that cannot fetch it from beside the script. */
  wasm?: WasmSource;
  /** The same for the module that reads schemas and grammars, which is fetched when an answer has to follow one. */
  grammarWasm?: WasmSource;
}

/** What is known of a model, and how it runs. */
export interface ModelInfo {
  /** The name in the file. */
  name: string | null;
  /** Its family. */
  architecture: string;
  /** Tokens in the vocabulary. */
  vocabulary: number;
  /** Layers. */
  layers: number;
  /** Numbers of an embedding. */
  embedding: number;
  /** Tokens of a sequence here, and in training. */
  contextLength: number;
  trainedContextLength: number;
  /** Whether it generates text; otherwise it embeds only. */
  generates: boolean;
  /** Its chat template, in Jinja. */
  chatTemplate: string | null;
  /** SHA-256 that names it in receipts, if it was made. */
  sha256: string | null;
  /** The instruction set in use. */
  isa: string;
  /** Threads in use. */
  threads: number;
  /** Whether it runs in a worker. */
  worker: boolean;
  /** Version of the numbers: answers of two versions may differ. */
  numerics: number;
}

/** Bytes in use. */
export interface MemoryReport {
  /** Packed weights. */
  weights: number;
  /** Keys and values: what they may take, have taken so far, held by generations, kept for prompts that begin alike. */
  kvReserved: number;
  kvCommitted: number;
  kvInUse: number;
  kvCached: number;
  /** All of the module's memory; inline, all models share it. */
  module: number;
}

/** How tokens are picked, in the order in which it is applied. What is not given has the default of llama.cpp's server. */
export interface SamplingOptions {
  /** Added to the logits of tokens, by id. */
  logitBias?: Record<number, number> | [number, number][];
  /** Penalty on tokens seen lately; 1, the default, is off. */
  repeatPenalty?: number;
  /** Tokens the penalties look back at, 64 by default; -1 for all. */
  repeatLastN?: number;
  /** Penalty for each occurrence; 0, the default, is off. */
  frequencyPenalty?: number;
  /** Penalty for having occurred; 0, the default, is off. */
  presencePenalty?: number;
  /** Whether these two count the tokens of the prompt and of the answer, so by default, or of the answer only. */
  penaltyScope?: "all" | "answer";
  /**
   * Penalty on continuing a repetition (DRY): `multiplier * base ** (length - allowedLength)`, by default with 1.75 and 2,
   * over the last `lastN` tokens, by default all. Repetitions do not reach over `breakers`, texts or token ids, by default
   * line ends, colons, quotes and asterisks.
   */
  dry?: { multiplier: number; base?: number; allowedLength?: number; lastN?: number; breakers?: (string | number[])[] };
  /** Keep this many of the most probable tokens, 40 by default; 0 is off. */
  topK?: number;
  /** Keep the most typical tokens of this mass; 1, the default, is off. */
  typicalP?: number;
  /** Keep the most probable tokens of this mass, 0.95 by default; 1 is off. */
  topP?: number;
  /** Keep tokens at least this fraction as probable as the best, 0.05 by default; 0 is off. */
  minP?: number;
  /** 0.8 by default; 0 takes the most probable token. */
  temperature?: number;
  /** The same seed gives the same text; 0 by default. */
  seed?: number | bigint;
}

/** Options of a generation. */
export interface GenerateOptions extends SamplingOptions {
  /** Tokens to generate, at most; by default until the model ends or the context is full. */
  maxTokens?: number;
  /** Texts that end the answer; they are not part of it. */
  stop?: string | string[];
  /** Token ids that end the answer, besides the model's own. */
  stopTokens?: number[];
  /** Go on when the model ends its answer. */
  ignoreEos?: boolean;
  /** What the answer has to be; no receipt can be had with it. */
  structure?: Structure;
  /** Log-probabilities of tokens, and of so many alternatives (`true`: none). */
  logprobs?: boolean | number;
  /** Of which distribution: the model's own (`raw`, the default), or the one drawn from (`final`). */
  logprobsOf?: "raw" | "final";
  /** Which of several answers to a prompt with one seed this is. */
  sequence?: number;
  /** Whether the answer comes with a receipt; the model must have been loaded with `receipts`. */
  receipt?: boolean;
  /** Take special tokens in the prompt for what they say. */
  parseSpecial?: boolean;
  /** Stops within one token. */
  signal?: AbortSignal;
}

/** A message of a conversation. */
export interface ChatMessage {
  role: string;
  /** A text, or what the template takes; none beside an assistant's calls of tools. */
  content?: unknown;
  [field: string]: unknown;
}

/** Options of a chat template. */
export interface TemplateOptions {
  /** Tools the model may call, as JSON schemas. */
  tools?: unknown[];
  /** More variables of the template. */
  variables?: Record<string, unknown>;
  /** Jinja in place of the model's own template. */
  template?: string;
  /** Begin an answer at the end: so by default. */
  addGenerationPrompt?: boolean;
  /** End where the last message, the assistant's, ends, so that the answer continues it. */
  continueFinalMessage?: boolean;
  /** What the template takes for the local time; now by default. */
  now?: Date;
}

/** A token of an answer. */
export interface Token {
  id: number;
  /** Text that is certain with it; may be empty, as characters are given out whole. */
  text: string;
  /** Natural logarithm of its probability, if asked for. */
  logprob?: number;
  /** The bytes it stands for, if its probability is asked for: it may be a part of a character. */
  bytes?: number[];
  /** The most probable tokens, if asked for. */
  top?: { id: number; text: string; bytes: number[]; logprob: number }[];
}

/** A complete answer. */
export interface Completion {
  text: string;
  /** All tokens that were picked, but for one that ended the answer. */
  tokens: Token[];
  /** `stop`: an end token or a stop text; `length`: as many as asked for, or as fit; `not_finite`: a fault of the model. */
  finishReason: "stop" | "length" | "not_finite";
  /** The token that ended the answer, if one did: the last that was picked. */
  stopToken?: number;
  /** Tokens; of the answer with the one that ended it. */
  usage: { promptTokens: number; cachedTokens: number; completionTokens: number };
  timings: Timings;
  /** Proof of the answer in JSON, if asked for. */
  receipt?: string;
}

/** How long an answer took, in milliseconds. */
export interface Timings {
  /** Waiting for its turn. */
  queuedMs: number;
  /** Until the prompt was processed. */
  promptMs: number;
  /** From then to the end. */
  generationMs: number;
  /** Tokens a second of the prompt that were not cached, and of the answer. */
  promptPerSecond: number;
  generationPerSecond: number;
}

/** What became of a receipt. */
export type Verification =
  | { verified: true; tokens: number }
  /** `step` is the first token that differs, null if none was computed. */
  | { verified: false; step: number | null; reason: string };
