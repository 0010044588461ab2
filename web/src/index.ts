// The public interface of the package.

import { inWorker, inline } from "./backend.js";
import { modelCache } from "./cache.js";
import { StarlingError } from "./errors.js";
import { capacityOf } from "./capacity.js";
import { type WasmSource, compile, compileGrammar, features, threadsFor } from "./features.js";
import { Generation } from "./generation.js";
import { Messages } from "./messages.js";
import { Completions } from "./openai.js";
import { Responses } from "./responses.js";
export type { ToolCall } from "./tools.js";
import { type Backend, type Choice, type CompletionHost, type CoreEvent, isLast, type Receiver } from "./protocol.js";
import { clearKvStores, kvCacheOf } from "./kv-store.js";
import {
  CHAT_OPTIONS,
  GENERATE_OPTIONS,
  LOAD_OPTIONS,
  type OptionTypes,
  TEMPLATE_OPTIONS,
  checkOptions,
} from "./options.js";
import { isMemory64 } from "./module.js";
import { type Prompt, chatJson, json, randomSeed, requestJson } from "./request.js";
import { hasClock, hasOwnThread } from "./runtime.js";
import { unlessAborted } from "./signal.js";
import { type Source, parts } from "./source.js";
import { type Wanted, ofOption } from "./structure.js";
import type {
  ChatMessage,
  GenerateOptions,
  LoadOptions,
  MemoryReport,
  ModelInfo,
  TemplateOptions,
  Verification,
} from "./types.js";

export { type CacheEntry, type CacheUsage } from "./cache.js";
export { type ErrorCode, StarlingError } from "./errors.js";
export { type Features, type Isa, type WasmSource, features } from "./features.js";
export type { Generation } from "./generation.js";
export type {
  ChatCompletion,
  ChatCompletionChunk,
  ChatCompletionRequest,
  ChatLogprob,
  Completions,
  CompletionUsage,
} from "./openai.js";
export type { Message, MessageBlock, MessageEvent, MessageRequest, MessageUsage, Messages } from "./messages.js";
export type {
  Response,
  ResponseEvent,
  ResponseInputItem,
  ResponseOutputItem,
  ResponseRequest,
  Responses,
} from "./responses.js";
export type { Source } from "./source.js";
export type { Structure } from "./structure.js";
export type * from "./types.js";

/** Maximum draft tokens of a step by default. */
const DRAFT_MAX = 4;
/** Milliseconds after which a model without a worker yields to the event loop. */
const INLINE_STEP_MS = 20;

/** {@link Starling.chat}: a function that is also an object, as in OpenAI's client. */
export interface Chat {
  /** Answers a conversation, by the model's chat template; a text is a message of the user. */
  (messages: string | ChatMessage[], options?: GenerateOptions & TemplateOptions): Generation;
  /** The form of OpenAI's client: `chat.completions.create({ messages, stream: true })`. */
  readonly completions: Completions;
}

/** A loaded model. */
export class Starling {
  /** The model, and how it runs. */
  readonly info: ModelInfo;
  readonly chat: Chat;
  /** The form of OpenAI's client: `responses.create({ input, stream: true })`. */
  readonly responses: Responses;
  /** The form of Anthropic's client: `messages.create({ messages, max_tokens, stream: true })`. */
  readonly messages: Messages;
  #backend: Backend;
  #receivers = new Map<number, Receiver>();
  #nextJob = 0;
  #grammarWasm: WasmSource | undefined;
  #disposed = false;

  /** Detects the WebAssembly features of this runtime. */
  static readonly features = features;
  /** The cache of downloaded models. */
  static readonly cache = modelCache;
  /** The KV pages that {@link LoadOptions.kvCache} keeps. */
  static readonly kvCache = {
    /** Removes the pages of all models that are not loaded; returns the number of bytes. */
    clear: clearKvStores,
  };

  private constructor(
    backend: Backend,
    grammarWasm: WasmSource | undefined,
    listen: (emit: (events: CoreEvent[]) => void) => void,
  ) {
    this.#backend = backend;
    this.#grammarWasm = grammarWasm;
    this.info = backend.info;
    listen((events) => {
      for (const event of events) {
        const receiver = this.#receivers.get(event.job);
        // before `receive`, which would cancel it
        if (isLast(event)) this.#receivers.delete(event.job);
        receiver?.receive(event);
      }
    });
    const chat = (messages: string | ChatMessage[], options: GenerateOptions & TemplateOptions = {}) =>
      this.#start({ chat: chatJson(messages, options) }, options, CHAT_OPTIONS);
    const host: CompletionHost = {
      open: (body, page) => this.#backend.call("openCompletion", body, page),
      // a model that has failed has no completions
      close: (completion) => void this.#backend.call("closeCompletion", completion).catch(() => {}),
      start: (choice, wanted, receiver) => this.#startChoice(choice, wanted, receiver),
    };
    this.chat = Object.assign(chat, { completions: new Completions(host) });
    this.responses = new Responses(host);
    this.messages = new Messages(host);
  }

  /**
   * Loads a model from the network, the cache or memory; weights are packed as they arrive.
   *
   * @throws {StarlingError} if the file or an option is wrong; the reason of `signal` if it is aborted
   */
  static async load(source: Source, options: LoadOptions = {}): Promise<Starling> {
    checkOptions(options, LOAD_OPTIONS);
    const { sha256, isa, memory64, wasm } = options;
    const apart = options.worker ?? hasOwnThread();
    // the main thread of a page may not block
    const threads = apart ? threadsFor(options.threads) : 1;
    const build = { isa, threads: threads > 1, memory64: memory64 ?? false };
    const module = await unlessAborted(compile(build, wasm), options.signal);
    const core = {
      parts: parts(source, options.size),
      draftParts: options.draftModel === undefined ? [] : parts(options.draftModel, undefined),
      draftMtp: options.draftMtp ?? false,
      cache: options.cache ?? "reuse",
      sha256: typeof sha256 === "string" ? [sha256] : sha256,
      headers: options.headers ?? {},
      receipts: options.receipts ?? false,
      kvCache: kvCacheOf(options.kvCache),
      module,
      capacity: capacityOf({
        isMemory64: isMemory64(module),
        isOwn: wasm !== undefined,
        memory64,
        isSupported: features().memory64,
      }),
      threads,
      isa,
      session: {
        n_ctx: options.contextLength,
        max_seqs: options.sequences,
        batch_tokens: options.batchTokens,
        working_memory: options.workingMemory,
        kv_type: options.kvType,
        draft_max: options.draftMax ?? (hasClock() ? DRAFT_MAX : 0),
        max_step_ms: apart ? undefined : INLINE_STEP_MS,
      },
    };
    if (core.draftMtp && core.draftParts.length > 0)
      throw new StarlingError("request", "draftMtp and draftModel are given, expected one of them");
    if (core.sha256 && core.sha256.length !== core.parts.length) {
      const counts = `sha256 has ${core.sha256.length} digests, expected ${core.parts.length}, one for each file`;
      throw new StarlingError("request", counts);
    }
    let emit: (events: CoreEvent[]) => void = () => {};
    const backend = await (apart ? inWorker : inline)({
      core,
      onProgress: options.onProgress ?? (() => {}),
      signal: options.signal,
      emit: (events) => emit(events),
    });
    return new Starling(backend, options.grammarWasm, (listener) => (emit = listener));
  }

  /** Continues a prompt: text or token ids. `sequences` generations run at once, others are queued. */
  generate(prompt: string | number[], options: GenerateOptions = {}): Generation {
    return this.#start(typeof prompt === "string" ? { prompt } : { ids: prompt }, options, GENERATE_OPTIONS);
  }

  #start(prompt: Prompt, given: GenerateOptions, known: OptionTypes): Generation {
    const options = { ...given, seed: given.seed ?? randomSeed() };
    const job = this.#nextJob++;
    const cancel = () => {
      if (this.#receivers.delete(job)) this.#backend.cancel(job);
    };
    const generation = new Generation(options, cancel);
    if (options.signal?.aborted) return generation;
    if (this.#disposed) {
      generation.fail(new StarlingError("disposed", "the model was disposed"));
      return generation;
    }
    this.#receivers.set(job, generation);
    const request = async () => {
      checkOptions(given, known);
      const wanted = ofOption(options.structure);
      await this.#submit(job, requestJson(prompt, options), wanted);
    };
    request().catch((e: unknown) => generation.fail(e));
    return generation;
  }

  /** Queues a choice of a completion; returns a function that cancels it. */
  #startChoice(choice: Choice, wanted: Wanted | undefined, receiver: Receiver): () => void {
    const job = this.#nextJob++;
    this.#receivers.set(job, receiver);
    this.#submit(job, choice, wanted).catch((e: unknown) => receiver.fail(e));
    return () => {
      if (this.#receivers.delete(job)) this.#backend.cancel(job);
    };
  }

  async #submit(job: number, request: string | Choice, wanted: Wanted | undefined) {
    const constraint = wanted && { ...wanted, module: await compileGrammar(this.#grammarWasm) };
    if (this.#receivers.has(job)) this.#backend.submit(job, request, constraint);
  }

  /** Token ids of a text, and the range of its UTF-8 bytes that each token covers. */
  tokenize(
    text: string,
    { addSpecial = true, parseSpecial = false } = {},
  ): Promise<{ ids: number[]; offsets: [number, number][] }> {
    return this.#backend.call("tokenize", text, addSpecial, parseSpecial);
  }

  /** The text of token ids. */
  detokenize(ids: number[]): Promise<string> {
    return this.#backend.call("detokenize", ids);
  }

  /** Renders a conversation with the chat template; returns the text and its token ids. */
  async applyTemplate(
    messages: string | ChatMessage[],
    options: TemplateOptions = {},
  ): Promise<{ text: string; ids: number[] }> {
    checkOptions(options, TEMPLATE_OPTIONS);
    return this.#backend.call("render", json(chatJson(messages, options)));
  }

  /** The embedding of a text, normalised to length 1, with the pooling that the model file names. */
  async embed(text: string | number[], { signal }: { signal?: AbortSignal } = {}): Promise<Float32Array> {
    signal?.throwIfAborted();
    const ids = typeof text === "string" ? (await this.tokenize(text)).ids : text;
    return unlessAborted(this.#backend.call("embed", ids), signal);
  }

  /** Verifies a receipt by recomputing its answer at prefill speed; needs {@link LoadOptions.receipts}. */
  async verify(receipt: string, { signal }: { signal?: AbortSignal } = {}): Promise<Verification> {
    signal?.throwIfAborted();
    return unlessAborted(this.#backend.call("verify", receipt), signal);
  }

  /** SHA-256 of the logits after each token, for comparing machines. */
  logitsSha256(ids: number[]): Promise<string> {
    return this.#backend.call("logitsSha256", ids);
  }

  /**
   * Exports the KV cache of a prompt for {@link restoreCache}, so that a prompt which many visits share is processed once.
   * Exports whole pages of 16 tokens, and processes those that are not cached. Needs {@link LoadOptions.receipts}: the digest
   * of the model is part of the export.
   */
  async saveCache(
    prompt: string | number[],
    options: { signal?: AbortSignal } = {},
  ): Promise<Uint8Array<ArrayBuffer>> {
    const ids = typeof prompt === "string" ? (await this.tokenize(prompt)).ids : prompt;
    await this.generate(ids, { ...options, maxTokens: 1 }).result;
    return this.#backend.call("saveCache", ids);
  }

  /**
   * Imports a KV cache from {@link saveCache} of the same file and `kvType`; prompts with this prefix skip its tokens. Returns
   * the number of tokens.
   *
   * @throws {StarlingError} `checksum` if the bytes are damaged, `request` if they are of another model
   */
  restoreCache(bytes: Uint8Array): Promise<number> {
    return this.#backend.call("restoreCache", bytes);
  }

  /** Removes the KV pages that {@link LoadOptions.kvCache} keeps of this model. */
  clearKvCache(): Promise<void> {
    return this.#backend.call("clearKvCache");
  }

  /** Bytes in use. */
  memory(): Promise<MemoryReport> {
    return this.#backend.call("memory");
  }

  /** Aborts all generations and frees the memory. */
  dispose(): void {
    if (this.#disposed) return;
    this.#disposed = true;
    const error = new StarlingError("disposed", "the model was disposed");
    for (const receiver of [...this.#receivers.values()]) receiver.fail(error);
    this.#backend.dispose();
  }

  /** @internal Crashes the engine: for tests. */
  crash(thread = false): Promise<void> {
    return this.#backend.call("crash", thread);
  }
}
