// Types of the public interface.

import type { Isa, WasmSource } from "./features.js";
import type { Source } from "./source.js";
import type { Structure } from "./structure.js";

/** Progress of loading. */
export interface Progress {
  /** Source of the bytes. */
  from: "network" | "cache" | "local";
  /** Bytes loaded of all files. */
  loaded: number;
  /** Bytes of all files; `Infinity` while the length of a file is not known. */
  total: number;
  /** Bytes per second, averaged over 2 seconds. */
  rate: number;
  /** Seconds left at that rate; `Infinity` while the total is not known. */
  remaining: number;
}

/** Options of {@link Starling.load}. */
export interface LoadOptions {
  /** Called at most ten times a second while loading, and at the end. */
  onProgress?: (progress: Progress) => void;
  /** Aborts loading. Incomplete files are removed from the cache. */
  signal?: AbortSignal;
  /**
   * Use of the cache for URLs:
   *
   * - `reuse`, the default: a cached file is used without a request
   * - `revalidate`: a cached file is used if the server reports the same ETag, date and size, or cannot be reached
   * - `reload`: the file is downloaded and replaces the cached one
   * - `none`: the cache is neither read nor written
   */
  cache?: "reuse" | "revalidate" | "reload" | "none";
  /** HTTP headers for downloads, such as `{ authorization: "Bearer …" }` for a private model. */
  headers?: Record<string, string>;
  /** Expected SHA-256 in hexadecimal, one for each file of a split model. A cached file with another is downloaded again. */
  sha256?: string | string[];
  /** Length of a stream in bytes. Without it, the stream is buffered before loading starts. */
  size?: number;
  /** Computes the SHA-256 of the files, which receipts, {@link Starling.verify} and {@link Starling.saveCache} need. */
  receipts?: boolean;
  /** Context length in tokens, prompt and answer; by default that of training, at most 4096. */
  contextLength?: number;
  /** Generations that run at once, 1 by default; others are queued. Each needs memory for a context. */
  sequences?: number;
  /** Prompt tokens of a batch, 64 by default. An abort takes effect after the running batch. */
  batchTokens?: number;
  /** Limit of working memory in bytes; by default 2 GiB, or the size of the weights if that is more. */
  workingMemory?: number;
  /**
   * Keeps the KV cache in the origin private file system, at most `maxBytes` for all models (`true`: 512 MiB), so that a
   * conversation goes on after a reload without computing its prompt again. The file has the tokens of the conversations. Off by
   * default; without effect where there is no such storage, or without a worker.
   */
  kvCache?: { maxBytes: number } | boolean;
  /**
   * Maximum number of draft tokens in a step, guessed from the prompt and the answer so far; 4 by default, 0 is off. They are
   * used as far as their measured cost pays, and change no byte of an answer.
   */
  draftMax?: number;
  /** A smaller model with the same vocabulary, which drafts tokens that prompt and answer do not predict. */
  draftModel?: Source;
  /**
   * Draft with the layer of the model's file for multi-token prediction (MTP, NextN), in place of a draft model. A file without
   * one is an error.
   */
  draftMtp?: boolean;
  /** Type of the KV cache, `f16` by default. Answers differ between types. */
  kvType?: "f32" | "f16" | "k8" | "q8";
  /**
   * Maximum number of threads; by default about the number of cores in pages, and one in Deno and Bun. One in Node, without
   * shared memory (a page must be cross-origin isolated) or without a worker; {@link ModelInfo.threads} is the number in use.
   */
  threads?: number;
  /** Run in a dedicated worker; by default in pages, Node, Deno and Bun, which stay responsive. */
  worker?: boolean;
  /** Instruction set; by default the fastest of this runtime. All give the same bytes. */
  isa?: Isa;
  /**
   * Use a module with 64-bit addresses (memory64): slower, with room for 15.5 GB of weights instead of 3.6 GB. By default for
   * models that need it, where the runtime has it; with `false` those are refused.
   */
  memory64?: boolean;
  /** The WebAssembly module or its URL, for runtimes that cannot fetch it relative to the script. */
  wasm?: WasmSource;
  /** The grammar module or its URL; fetched for the first request with a structure. */
  grammarWasm?: WasmSource;
}

/** A model, and how it runs. */
export interface ModelInfo {
  /** `general.name` of the file. */
  name: string | null;
  /** `general.architecture` of the file. */
  architecture: string;
  /** Size of the vocabulary. */
  vocabulary: number;
  /** Number of layers. */
  layers: number;
  /** Width of an embedding. */
  embedding: number;
  /** Context length in tokens, here and in training. */
  contextLength: number;
  trainedContextLength: number;
  /** False for encoders, which only embed. */
  generates: boolean;
  /** Chat template in Jinja. */
  chatTemplate: string | null;
  /** SHA-256 that identifies it in receipts, if it was computed. */
  sha256: string | null;
  /** Instruction set in use. */
  isa: string;
  /** Whether its module has 64-bit addresses. */
  memory64: boolean;
  /** Threads in use. */
  threads: number;
  /** Whether it runs in a worker. */
  worker: boolean;
  /** Version of the numerics: answers of two versions may differ. */
  numerics: number;
}

/** Bytes in use. */
export interface MemoryReport {
  /** Packed weights. */
  weights: number;
  /** KV cache: reserved, allocated, used by generations, and kept for prompts with the same prefix. */
  kvReserved: number;
  kvCommitted: number;
  kvInUse: number;
  kvCached: number;
  /** Bytes of the KV cache on disk ({@link LoadOptions.kvCache}), and pages of it that were damaged and removed. */
  kvStored: number;
  kvRefused: number;
  /** All of the memory of the model's module. */
  module: number;
}

/** Sampling options, in the order in which they are applied. Defaults are those of llama.cpp's server. */
export interface SamplingOptions {
  /** Added to logits, by token id. */
  logitBias?: Record<number, number> | [number, number][];
  /** Repetition penalty; 1, the default, is off. */
  repeatPenalty?: number;
  /** Tokens that the penalties look back at, 64 by default; -1 for all. */
  repeatLastN?: number;
  /** Penalty for each occurrence of a token; 0, the default, is off. */
  frequencyPenalty?: number;
  /** Penalty of a token that occurred; 0, the default, is off. */
  presencePenalty?: number;
  /** Whether these two count the tokens of the prompt and of the answer, so by default, or of the answer only. */
  penaltyScope?: "all" | "answer";
  /**
   * DRY repetition penalty: `multiplier * base ** (length - allowedLength)`, by default with 1.75 and 2, over the last `lastN`
   * tokens, by default all. Repetitions end at `breakers`, texts or token ids; by default line ends, colons, quotes, asterisks.
   */
  dry?: { multiplier: number; base?: number; allowedLength?: number; lastN?: number; breakers?: (string | number[])[] };
  /** Keeps the `topK` most probable tokens, 40 by default; 0 is off. */
  topK?: number;
  /** Keeps the most typical tokens up to this probability mass; 1, the default, is off. */
  typicalP?: number;
  /** Keeps the most probable tokens up to this probability mass, 0.95 by default; 1 is off. */
  topP?: number;
  /** Keeps tokens with at least this fraction of the highest probability, 0.05 by default; 0 is off. */
  minP?: number;
  /** 0.8 by default; 0 is greedy. */
  temperature?: number;
  /** The same seed gives the same text; by default it is random, and {@link Completion.seed} tells it. */
  seed?: number | bigint;
}

/** Options of a generation. */
export interface GenerateOptions extends SamplingOptions {
  /** Maximum number of tokens to generate, cut to what the context has left; by default until an end token or its end. */
  maxTokens?: number;
  /** Stop texts, which are not part of the answer. */
  stop?: string | string[];
  /** Token ids that end the answer, besides the model's end tokens. */
  stopTokens?: number[];
  /** Continue after an end token. */
  ignoreEos?: boolean;
  /** Constrains the answer to a schema or grammar; not with `receipt`. */
  structure?: Structure;
  /** Return log-probabilities of tokens, and of this number of alternatives (`true`: none). */
  logprobs?: boolean | number;
  /** The distribution of log-probabilities: that of the model (`raw`, the default), or after sampling options (`final`). */
  logprobsOf?: "raw" | "final";
  /** Index of the answer, to draw several answers to a prompt with one seed. */
  sequence?: number;
  /** Return a receipt; needs {@link LoadOptions.receipts}. */
  receipt?: boolean;
  /** Parse special tokens in the prompt. */
  parseSpecial?: boolean;
  /** Aborts the generation after the running batch. */
  signal?: AbortSignal;
}

/** A message of a conversation. */
export interface ChatMessage {
  role: string;
  /** A text, or any value that the template takes; may be missing beside tool calls. */
  content?: unknown;
  [field: string]: unknown;
}

/** Options of a chat template. */
export interface TemplateOptions {
  /** Tools that the model may call, as JSON schemas. */
  tools?: unknown[];
  /** More variables of the template. */
  variables?: Record<string, unknown>;
  /** Jinja in place of the model's own template. */
  template?: string;
  /** End with the start of an assistant message; true by default. */
  addGenerationPrompt?: boolean;
  /** End inside the last message, which must be the assistant's, so that the answer continues it. */
  continueFinalMessage?: boolean;
  /** Local time for the template; now by default. */
  now?: Date;
}

/** A token of an answer. */
export interface Token {
  id: number;
  /** Text completed by the token; empty while a character or a possible stop text is incomplete. */
  text: string;
  /** Natural logarithm of its probability, if requested. */
  logprob?: number;
  /** Its bytes, possibly a part of a character; if log-probabilities are requested. */
  bytes?: number[];
  /** The most probable tokens, if requested. */
  top?: { id: number; text: string; bytes: number[]; logprob: number }[];
}

/** A complete answer. */
export interface Completion {
  text: string;
  /** The sampled tokens, without the end token. */
  tokens: Token[];
  /**
   * `stop`: end token or stop text; `length`: `maxTokens` or end of the context; `not_finite`: NaN or infinite logits;
   * `cancelled`: the loop over the answer was left, so the text is a part.
   */
  finishReason: "stop" | "length" | "not_finite" | "cancelled";
  /** The seed that gives this answer again. */
  seed: number | bigint;
  /** The end token, if one ended the answer. */
  stopToken?: number;
  usage: Usage;
  timings: Timings;
  /** Receipt of the answer in JSON, if requested. */
  receipt?: string;
}

/** Token counts. */
export interface Usage {
  promptTokens: number;
  /** Prompt tokens that were in the KV cache. */
  cachedTokens: number;
  /** With the end token. */
  completionTokens: number;
  /** Draft tokens, and those of them that are in the answer. */
  draftTokens: number;
  acceptedDraftTokens: number;
}

/** Durations in milliseconds, and rates. */
export interface Timings {
  /** In the queue. */
  queuedMs: number;
  /** Prefill. */
  promptMs: number;
  /** Decode. */
  generationMs: number;
  /** Tokens per second: of the prompt without cached tokens, and of the answer. */
  promptPerSecond: number;
  generationPerSecond: number;
}

/** Result of {@link Starling.verify}. */
export type Verification =
  | { verified: true; tokens: number }
  /** `step` is the index of the first token that differs; null if nothing was recomputed. */
  | { verified: false; step: number | null; reason: string };
