// The package: `Starling.load` and what it gives.

import { inWorker, inline } from "./backend.js";
import { modelCache } from "./cache.js";
import { StarlingError } from "./errors.js";
import { type WasmSource, compile, compileGrammar, features, threadsFor } from "./features.js";
import { Generation } from "./generation.js";
import { Completions } from "./openai.js";
export type { ToolCall } from "./tools.js";
import type { Backend, CoreEvent } from "./protocol.js";
import { type Prompt, chatJson, json, requestJson } from "./request.js";
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
export type { Source } from "./source.js";
export type { Structure } from "./structure.js";
export type * from "./types.js";

/** {@link Starling.chat}: a function that is also an object, as in OpenAI's client. */
export interface Chat {
  /** Answers a conversation, by the model's chat template. */
  (messages: ChatMessage[], options?: GenerateOptions & TemplateOptions): Generation;
  /** The form of OpenAI's client: `chat.completions.create({ messages, stream: true })`. */
  readonly completions: Completions;
}

/** A loaded model. */
export class Starling {
  /** What is known of the model, and how it runs. */
  readonly info: ModelInfo;
  readonly chat: Chat;
  #backend: Backend;
  #generations = new Map<number, Generation>();
  #nextJob = 0;
  #grammarWasm: WasmSource | undefined;
  #disposed = false;

  /** What this runtime can do. */
  static readonly features = features;
  /** The models that were downloaded before. */
  static readonly cache = modelCache;

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
        const generation = this.#generations.get(event.job);
        // before it is told: there is nothing to cancel any more
        if (event.type === "done" || event.type === "failed") this.#generations.delete(event.job);
        generation?.receive(event);
      }
    });
    const chat = (messages: ChatMessage[], options: GenerateOptions & TemplateOptions = {}, wanted?: Wanted) =>
      this.#start({ chat: chatJson(messages, options) }, options, wanted);
    const { name, architecture, chatTemplate } = this.info;
    this.chat = Object.assign(chat, { completions: new Completions(chat, name ?? architecture, chatTemplate ?? "") });
  }

  /**
   * Loads a model: downloads it or takes it from the cache, and packs the weights as they come.
   *
   * @throws {StarlingError} with what is wrong; the reason of `signal` if it is aborted
   */
  static async load(source: Source, options: LoadOptions = {}): Promise<Starling> {
    const { sha256 } = options;
    const apart = options.worker ?? typeof document !== "undefined";
    // the page's own thread may not wait for others
    const threads = apart ? threadsFor(options.threads) : 1;
    const core = {
      parts: parts(source, options.size),
      cache: options.cache ?? "reuse",
      sha256: typeof sha256 === "string" ? [sha256] : sha256,
      headers: options.headers ?? {},
      receipts: options.receipts ?? false,
      module: await unlessAborted(compile(options.isa, threads > 1, options.wasm), options.signal),
      threads,
      isa: options.isa,
      session: {
        n_ctx: options.contextLength,
        max_seqs: options.sequences,
        batch_tokens: options.batchTokens,
        working_memory: options.workingMemory,
        kv_type: options.kvType,
      },
    };
    if (core.sha256 && core.sha256.length !== core.parts.length) {
      throw new StarlingError("request", `${core.sha256.length} SHA-256 given for ${core.parts.length} files`);
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

  /** Continues a prompt, a text or token ids. Generations run at once as far as `sequences` allows; others wait. */
  generate(prompt: string | number[], options: GenerateOptions = {}): Generation {
    return this.#start(typeof prompt === "string" ? { prompt } : { ids: prompt }, options);
  }

  #start(prompt: Prompt, options: GenerateOptions, wanted?: Wanted): Generation {
    const job = this.#nextJob++;
    const cancel = () => {
      if (this.#generations.delete(job)) this.#backend.cancel(job);
    };
    const logprobs = options.logprobs !== undefined && options.logprobs !== false;
    const generation = new Generation(options.signal, cancel, logprobs);
    if (options.signal?.aborted) return generation;
    if (this.#disposed) {
      generation.fail(new StarlingError("disposed", "the model was disposed"));
      return generation;
    }
    this.#generations.set(job, generation);
    this.#submit(job, prompt, options, wanted).catch((e: unknown) => generation.fail(e));
    return generation;
  }

  async #submit(job: number, prompt: Prompt, options: GenerateOptions, asked: Wanted | undefined) {
    const wanted = asked ?? ofOption(options.structure);
    const request = requestJson(prompt, options);
    const form = wanted && { ...wanted, module: await compileGrammar(this.#grammarWasm) };
    if (this.#generations.has(job)) this.#backend.submit(job, request, form);
  }

  /** Token ids of a text, and the bytes of its UTF-8 that each stands for. */
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

  /** The text that the model's chat template makes of a conversation, and its token ids. */
  applyTemplate(messages: ChatMessage[], options: TemplateOptions = {}): Promise<{ text: string; ids: number[] }> {
    return this.#backend.call("render", json(chatJson(messages, options)));
  }

  /** The vector of a text, of length 1, pooled as the file says. */
  async embed(text: string | number[], { signal }: { signal?: AbortSignal } = {}): Promise<Float32Array> {
    signal?.throwIfAborted();
    const ids = typeof text === "string" ? (await this.tokenize(text)).ids : text;
    return unlessAborted(this.#backend.call("embed", ids), signal);
  }

  /** Replays the answer of a receipt, at the speed of a prompt; the model must have been loaded with `receipts`. */
  async verify(receipt: string, { signal }: { signal?: AbortSignal } = {}): Promise<Verification> {
    signal?.throwIfAborted();
    return unlessAborted(this.#backend.call("verify", receipt), signal);
  }

  /** SHA-256 of the logits after each of the tokens: what tests compare between machines. */
  logitsSha256(ids: number[]): Promise<string> {
    return this.#backend.call("logitsSha256", ids);
  }

  /**
   * Keys and values of a prompt, for {@link restoreCache}: a long prompt that many visits begin with is processed once,
   * and then kept where you like. Whole pages of 16 tokens; those that are not cached are processed first. The model must
   * have been loaded with `receipts`, whose digest tells models apart.
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
   * Takes what {@link saveCache} gave, for the same file and `kvType`: prompts that begin with its tokens need not process them.
   * Returns how many. Bytes that are damaged have the code `checksum`, those of another model `request`.
   */
  restoreCache(bytes: Uint8Array): Promise<number> {
    return this.#backend.call("restoreCache", bytes);
  }

  /** Bytes in use. */
  memory(): Promise<MemoryReport> {
    return this.#backend.call("memory");
  }

  /** Stops all generations and frees the memory. */
  dispose(): void {
    if (this.#disposed) return;
    this.#disposed = true;
    const error = new StarlingError("disposed", "the model was disposed");
    for (const generation of [...this.#generations.values()]) generation.fail(error);
    this.#backend.dispose();
  }

  /** @internal Crashes the engine, to test what happens then. */
  crash(thread = false): Promise<void> {
    return this.#backend.call("crash", thread);
  }
}
