// The step loop: admits requests, runs one batch per step and emits events. It yields to the event loop between batches, so
// that messages and aborts are handled. Runs in a worker or inline.

import { type ErrorCode, StarlingError, toWire } from "./errors.js";
import { GrammarReader } from "./grammar.js";
import { isFatal } from "./instance.js";
import { type Loaded, loadModel, type LoadRequest } from "./load.js";
import type { Choice, CoreEvent, OpenedCompletion, OutputConstraint } from "./protocol.js";
import { lossy } from "./request.js";
import type { Constraint, Model } from "../wasm/starling.js";
import type { MemoryReport, ModelInfo, Progress, Verification } from "./types.js";

/** A request that waits or runs. */
interface Job {
  job: number;
  /** Id in the module, once admitted. */
  id: number | undefined;
  request: string | Choice;
  /** Freed once the module has a fork of it. */
  constraint: Constraint | undefined;
  submitted: number;
  started: number;
  prefilled: number;
  prompt: number;
  /** Draft tokens, and those of them that are in the answer. */
  drafted: number;
  accepted: number;
}

/** An event of the module's `step`. */
type EngineEvent =
  | { type: "prefilled"; id: number; n_prompt: number; n_cached: number }
  | { type: "drafted"; id: number; n_drafted: number; n_accepted: number }
  | { type: "token"; id: number; token: number; text: string; logprob: number | null; top: [number, number][] }
  | {
      type: "done";
      id: number;
      text: string;
      reason: "stop" | "length" | "not_finite" | "no_memory" | "constraint";
      n_tokens: number;
      error?: string;
      stop_token?: number;
      receipt?: string;
    }
  | {
      type: "completion";
      id: number;
      chunks?: object[];
      is_done: boolean;
      response?: object;
      receipts?: Record<number, string>;
      error?: { code: ErrorCode; message: string };
    };

export class Core {
  readonly info: ModelInfo;
  /** Undefined once disposed, so that the instance's memory can be collected. */
  #loaded: Loaded | undefined;
  #emit: (events: CoreEvent[]) => void;
  #waiting: Job[] = [];
  /** Running requests, by their id in the module. */
  #active = new Map<number, Job>();
  /** Number of steps so far. */
  #steps = 0;
  /** The module refused the first waiting request for lack of capacity, and no request has ended since: a retry would tokenise
   * it again. */
  #isFull = false;
  #grammars = new GrammarReader(() => this.#call((m) => m.words()));
  #failure: StarlingError | undefined;
  /** Whether KV pages are kept on disk. */
  #keepsPages: boolean;
  #savesRest = false;

  private constructor(loaded: Loaded, keepsPages: boolean, emit: (events: CoreEvent[]) => void) {
    this.#loaded = loaded;
    this.#keepsPages = keepsPages;
    this.#emit = emit;
    loaded.helpers.onLost = (error) => this.#fail(error);
    const info = JSON.parse(loaded.model.info());
    this.info = {
      name: info.name,
      architecture: info.architecture,
      vocabulary: info.n_vocab,
      layers: info.n_layer,
      embedding: info.n_embd,
      contextLength: info.n_ctx,
      trainedContextLength: info.n_ctx_train,
      generates: info.causal,
      chatTemplate: info.chat_template,
      sha256: info.model_sha256,
      isa: info.isa,
      memory64: loaded.instance.isMemory64,
      threads: info.threads,
      worker: false,
      numerics: info.numerics,
    };
  }

  static async load(
    options: LoadRequest,
    onProgress: (progress: Progress) => void,
    signal: AbortSignal | undefined,
    emit: (events: CoreEvent[]) => void,
  ): Promise<Core> {
    const loaded = await loadModel(options, onProgress, signal);
    const { instance, model } = loaded;
    const maxBytes = options.kvCache?.maxBytes;
    const keepsPages = maxBytes !== undefined && (await instance.run(() => model.openPages(maxBytes)));
    return new Core(loaded, keepsPages, emit);
  }

  /** Queues a request in JSON, or a choice of a completion; its events are emitted. */
  submit(job: number, request: string | Choice, output: OutputConstraint | undefined): void {
    const now = performance.now();
    let constraint: Constraint | undefined;
    try {
      if (output) constraint = this.#grammars.constraint(output);
    } catch (e) {
      return this.#emit([{ type: "failed", job, error: toWire(e) }]);
    }
    const times = { submitted: now, started: now, prefilled: now };
    const counts = { prompt: 0, drafted: 0, accepted: 0 };
    const waiting: Job = { job, id: undefined, request, constraint, ...times, ...counts };
    this.#waiting.push(waiting);
    void this.#drive(waiting);
  }

  /** Cancels a request; a job that has ended is ignored. */
  cancel(job: number): void {
    this.#isFull = false;
    this.#waiting = this.#waiting.filter((w) => {
      if (w.job === job) freeConstraint(w);
      return w.job !== job;
    });
    for (const [id, active] of this.#active) {
      if (active.job !== job) continue;
      this.#active.delete(id);
      this.#release((m) => m.cancel(id));
    }
  }

  /**
   * Runs steps until a job has ended. Each job has a loop and the first to resume runs the step: some servers cancel the timers
   * of a request when its response ends, and the loops of other requests go on.
   */
  async #drive(job: Job): Promise<void> {
    while (this.#waiting.includes(job) || (job.id !== undefined && this.#active.has(job.id))) {
      const steps = this.#steps;
      await yieldToEventLoop();
      if (this.#steps === steps) this.#step();
    }
  }

  #step(): void {
    this.#steps += 1;
    try {
      const events = this.#admit();
      if (this.#active.size > 0) {
        const step = JSON.parse(this.#call((m) => m.step())) as { events: EngineEvent[] };
        for (const event of step.events) {
          const translated = this.#translate(event);
          // an end token is not part of the answer: its event comes right before `done`
          if (translated && event.type === "done" && event.stop_token !== undefined)
            events.splice(
              events.findLastIndex((e) => e.type === "token" && e.job === translated.job),
              1,
            );
          if (translated) events.push(translated);
        }
      }
      if (events.length > 0) this.#emit(events);
      if (this.#active.size === 0) void this.#saveRest();
      else if (this.#keepsPages) this.#call((m) => m.savePages());
    } catch (e) {
      const error = toWire(e);
      const jobs = [...this.#active.values(), ...this.#waiting];
      this.#dropAll();
      this.#emit(jobs.map(({ job }) => ({ type: "failed", job, error })));
    }
  }

  /** Submits waiting requests until the module is full; returns events of those it refused. */
  #admit(): CoreEvent[] {
    const failed: CoreEvent[] = [];
    while (this.#waiting.length > 0 && !this.#isFull) {
      const next = this.#waiting[0]!;
      try {
        const { request, constraint } = next;
        // a fork, because a request that is refused now is submitted again
        next.id = this.#call((m) =>
          typeof request === "string"
            ? m.submit(request, constraint?.fork())
            : m.submitChoice(request.completion, request.index, constraint?.fork()),
        );
        next.started = performance.now();
        this.#active.set(next.id, next);
      } catch (e) {
        if (isFatal(e)) throw e;
        this.#isFull = e instanceof StarlingError && e.code === "capacity" && this.#active.size > 0;
        if (this.#isFull) break;
        failed.push({ type: "failed", job: next.job, error: toWire(e) });
      }
      freeConstraint(next);
      this.#waiting.shift();
    }
    return failed;
  }

  /** The event for the page; `undefined` if the request was cancelled. */
  #translate(event: EngineEvent): CoreEvent | undefined {
    const active = this.#active.get(event.id);
    if (!active) return undefined;
    const { job } = active;
    switch (event.type) {
      case "prefilled":
        active.prefilled = performance.now();
        active.prompt = event.n_prompt - event.n_cached;
        return { type: "prefilled", job, promptTokens: event.n_prompt, cachedTokens: event.n_cached };
      case "drafted":
        active.drafted += event.n_drafted;
        active.accepted += event.n_accepted;
        return undefined;
      case "token": {
        const top = event.top.map(([id, logprob]) => ({ id, logprob, ...this.#piece(id) }));
        return {
          type: "token",
          job,
          token: {
            id: event.token,
            text: event.text,
            ...(event.logprob !== null && { logprob: event.logprob, bytes: this.#piece(event.token).bytes }),
            ...(top.length > 0 && { top }),
          },
        };
      }
      case "completion": {
        const { chunks = [], response, receipts = {}, is_done: isDone, error } = event;
        if (isDone) {
          this.#active.delete(event.id);
          this.#isFull = false;
        }
        if (error) return { type: "failed", job, error: toWire(new StarlingError(error.code, error.message)) };
        return { type: "completion", job, chunks, isDone, response, receipts };
      }
      case "done": {
        this.#active.delete(event.id);
        this.#isFull = false;
        if (event.reason === "no_memory") {
          const error = new StarlingError("memory", "the module's memory cannot grow: no room for more KV pages");
          return { type: "failed", job, error: toWire(error) };
        }
        if (event.reason === "constraint") {
          return { type: "failed", job, error: toWire(new StarlingError("request", event.error ?? "")) };
        }
        const end = performance.now();
        const [promptMs, generationMs] = [active.prefilled - active.started, end - active.prefilled];
        const timings = {
          queuedMs: active.started - active.submitted,
          promptMs,
          generationMs,
          promptPerSecond: active.prompt / (promptMs / 1000),
          // the prompt's last batch also samples the first token
          generationPerSecond: generationMs > 0 ? (event.n_tokens - 1) / (generationMs / 1000) : 0,
        };
        return {
          type: "done",
          job,
          text: event.text,
          reason: event.reason,
          completionTokens: event.n_tokens,
          draftTokens: active.drafted,
          acceptedDraftTokens: active.accepted,
          stopToken: event.stop_token,
          timings,
          receipt: event.receipt,
        };
      }
    }
  }

  /** Text and bytes of a token. */
  #piece(id: number): { text: string; bytes: number[] } {
    const bytes = this.#call((m) => m.piece(id));
    return { text: lossy.decode(bytes), bytes: Array.from(bytes) };
  }

  tokenize(text: string, addSpecial: boolean, parseSpecial: boolean): { ids: number[]; offsets: [number, number][] } {
    return JSON.parse(this.#call((m) => m.tokenize(text, addSpecial, parseSpecial)));
  }

  detokenize(ids: number[]): string {
    return this.#call((m) => m.detokenize(Uint32Array.from(ids)));
  }

  embed(ids: number[]): Float32Array {
    return this.#call((m) => m.embed(Uint32Array.from(ids)));
  }

  render(chat: string): { text: string; ids: number[] } {
    return JSON.parse(this.#call((m) => m.render(chat)));
  }

  openCompletion(body: string, page: string): OpenedCompletion {
    return JSON.parse(this.#call((m) => m.openCompletion(body, page)));
  }

  closeCompletion(completion: number): void {
    this.#release((m) => m.closeCompletion(completion));
  }

  verify(receipt: string): Verification {
    return JSON.parse(this.#call((m) => m.verify(receipt)));
  }

  logitsSha256(ids: number[]): string {
    return this.#call((m) => m.logitsSha256(Uint32Array.from(ids)));
  }

  saveCache(ids: number[]): Uint8Array<ArrayBuffer> {
    return this.#call((m) => m.save(Uint32Array.from(ids))) as Uint8Array<ArrayBuffer>;
  }

  restoreCache(bytes: Uint8Array): number {
    return this.#call((m) => m.restore(bytes));
  }

  clearKvCache(): void {
    this.#call((m) => m.clearPages());
  }

  memory(): MemoryReport {
    const memory = JSON.parse(this.#call((m) => m.memory()));
    return {
      weights: memory.weights,
      kvReserved: memory.kv_reserved,
      kvCommitted: memory.kv_committed,
      kvInUse: memory.kv_in_use,
      kvCached: memory.kv_cached,
      kvStored: memory.kv_stored,
      kvRefused: memory.kv_refused,
      module: this.#loaded!.instance.memory.buffer.byteLength,
    };
  }

  /** Crashes the module, on a helper thread if `thread`: for tests. */
  crash(thread: boolean): void {
    this.#call(() => {
      const { bindings } = this.#loaded!.instance;
      if (thread && "crashThread" in bindings) (bindings.crashThread as () => void)();
      else bindings.crash();
    });
  }

  /** Writes all new KV pages, while no request runs. */
  async #saveRest(): Promise<void> {
    if (this.#savesRest || !this.#keepsPages) return;
    this.#savesRest = true;
    try {
      do await yieldToEventLoop();
      while (this.#active.size === 0 && this.#call((m) => m.savePages()));
    } catch (e) {
      // a crash: all later calls report it
      if (!isFatal(e)) throw e;
    } finally {
      this.#savesRest = false;
    }
  }

  /** Frees the model. */
  dispose(): void {
    this.#dropAll();
    this.#grammars.free();
    this.#release((m) => m.free());
    this.#loaded = undefined;
    this.#fail(new StarlingError("disposed", "the model was disposed"));
  }

  /** Drops all requests. */
  #dropAll(): void {
    this.#active.clear();
    this.#waiting.forEach(freeConstraint);
    this.#waiting = [];
  }

  /** All later calls throw this error. */
  #fail(error: StarlingError): void {
    this.#failure ??= error;
  }

  /** Frees something in the module; does nothing after a crash. */
  #release(work: (model: Model) => void): void {
    try {
      this.#call(work);
    } catch (e) {
      if (!isFatal(e)) throw e;
    }
  }

  #call<T>(work: (model: Model) => T): T {
    if (this.#failure) throw this.#failure;
    try {
      const { instance, model } = this.#loaded!;
      return instance.call(() => work(model));
    } catch (e) {
      if (isFatal(e)) this.#fail(e as StarlingError);
      throw e;
    }
  }
}

/** Frees the job's own constraint; the module has a fork. */
function freeConstraint(job: Job): void {
  job.constraint?.free();
  job.constraint = undefined;
}

let channel: MessageChannel | undefined;
const resolvers: (() => void)[] = [];

/**
 * Resolves in a later task. A message port instead of a timer, which browsers clamp to 4 ms. In workerd messages come before
 * all other tasks, and a port that one request created cannot be used by another: there `scheduler.wait`.
 */
function yieldToEventLoop(): Promise<void> {
  const { scheduler, setImmediate } = globalThis as {
    scheduler?: { wait?: (ms: number) => Promise<void> };
    setImmediate?: (f: () => void) => void;
  };
  if (scheduler?.wait) return scheduler.wait(0);
  if (setImmediate) return new Promise((resolve) => setImmediate(resolve));
  if (typeof MessageChannel === "undefined") return new Promise((resolve) => setTimeout(resolve));
  if (!channel) {
    channel = new MessageChannel();
    channel.port1.onmessage = () => resolvers.shift()?.();
  }
  return new Promise((resolve) => {
    resolvers.push(resolve);
    channel!.port2.postMessage(null);
  });
}
