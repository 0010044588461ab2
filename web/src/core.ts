// The engine at work: runs a batch at a time, so that messages and aborts get through between batches. Runs in a worker,
// or inline.

import { StarlingError, toWire } from "./errors.js";
import { GrammarReader } from "./grammar.js";
import { isFatal } from "./instance.js";
import { type Loaded, loadModel, type LoadRequest } from "./load.js";
import type { CoreEvent, Form } from "./protocol.js";
import { lossy } from "./request.js";
import type { Constraint, Model } from "../wasm/starling.js";
import type { MemoryReport, ModelInfo, Progress, Verification } from "./types.js";

/** A request on its way. */
interface Job {
  job: number;
  /** The module's, once it is let in. */
  id: number | undefined;
  request: string;
  /** What its answer follows. */
  constraint: Constraint | undefined;
  submitted: number;
  started: number;
  prefilled: number;
  prompt: number;
}

/** What an event of the module looks like. */
type EngineEvent =
  | { type: "prefilled"; id: number; n_prompt: number; n_cached: number }
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
    };

export class Core {
  readonly info: ModelInfo;
  /** Undefined once disposed, so that the instance's memory can be collected. */
  #loaded: Loaded | undefined;
  #emit: (events: CoreEvent[]) => void;
  #waiting: Job[] = [];
  /** By the module's id. */
  #active = new Map<number, Job>();
  /** How many were taken. */
  #steps = 0;
  /** Whether there was no room for the first that waits, and none has become free since: finding out takes its tokens. */
  #isFull = false;
  #grammars = new GrammarReader(() => this.#call((m) => m.words()));
  #dead: StarlingError | undefined;

  private constructor(loaded: Loaded, emit: (events: CoreEvent[]) => void) {
    this.#loaded = loaded;
    this.#emit = emit;
    loaded.helpers.onLost = (error) => this.#die(error);
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
    return new Core(await loadModel(options, onProgress, signal), emit);
  }

  /** Takes a request in JSON, and what its answer has to be; what becomes of it is emitted. */
  submit(job: number, request: string, form: Form | undefined): void {
    const now = performance.now();
    let constraint: Constraint | undefined;
    try {
      if (form) constraint = this.#grammars.constraint(form);
    } catch (e) {
      return this.#emit([{ type: "failed", job, error: toWire(e) }]);
    }
    const times = { submitted: now, started: now, prefilled: now };
    const waiting: Job = { job, id: undefined, request, constraint, ...times, prompt: 0 };
    this.#waiting.push(waiting);
    void this.#drive(waiting);
  }

  /** Forgets a request. */
  cancel(job: number): void {
    this.#isFull = false;
    this.#waiting = this.#waiting.filter((w) => {
      if (w.job === job) free(w);
      return w.job !== job;
    });
    for (const [id, active] of this.#active) {
      if (active.job !== job) continue;
      this.#active.delete(id);
      this.#release((m) => m.cancel(id));
    }
  }

  /**
   * Takes steps for as long as a job is on its way. Every job has such a loop, of which one takes the steps while the others
   * look on; where a server stops all that belongs to a request when its response ends, another goes on.
   */
  async #drive(job: Job): Promise<void> {
    while (this.#waiting.includes(job) || (job.id !== undefined && this.#active.has(job.id))) {
      const steps = this.#steps;
      await breathe();
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
          const seen = this.#seen(event);
          // a token that ends the answer is not part of it, and comes with its end
          if (seen && event.type === "done" && event.stop_token !== undefined)
            events.splice(
              events.findLastIndex((e) => e.type === "token" && e.job === seen.job),
              1,
            );
          if (seen) events.push(seen);
        }
      }
      if (events.length > 0) this.#emit(events);
    } catch (e) {
      const error = toWire(e);
      const jobs = [...this.#active.values(), ...this.#waiting];
      this.#forget();
      this.#emit(jobs.map(({ job }) => ({ type: "failed", job, error })));
    }
  }

  /** Lets those in that there is room for; says what is wrong with the others. */
  #admit(): CoreEvent[] {
    const failed: CoreEvent[] = [];
    while (this.#waiting.length > 0 && !this.#isFull) {
      const next = this.#waiting[0]!;
      try {
        const { request, constraint } = next;
        // one that is refused now may be let in later
        next.id = this.#call((m) => m.submit(request, constraint?.fork()));
        next.started = performance.now();
        this.#active.set(next.id, next);
      } catch (e) {
        if (isFatal(e)) throw e;
        this.#isFull = e instanceof StarlingError && e.code === "capacity" && this.#active.size > 0;
        if (this.#isFull) break;
        failed.push({ type: "failed", job: next.job, error: toWire(e) });
      }
      free(next);
      this.#waiting.shift();
    }
    return failed;
  }

  #seen(event: EngineEvent): CoreEvent | undefined {
    const active = this.#active.get(event.id);
    if (!active) return undefined;
    const { job } = active;
    switch (event.type) {
      case "prefilled":
        active.prefilled = performance.now();
        active.prompt = event.n_prompt - event.n_cached;
        return { type: "prefilled", job, promptTokens: event.n_prompt, cachedTokens: event.n_cached };
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
      case "done": {
        this.#active.delete(event.id);
        this.#isFull = false;
        if (event.reason === "no_memory") {
          const error = new StarlingError("memory", "the module's memory cannot grow: no room for more keys and values");
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
          // the first token comes with the prompt
          generationPerSecond: generationMs > 0 ? (event.n_tokens - 1) / (generationMs / 1000) : 0,
        };
        return {
          type: "done",
          job,
          text: event.text,
          reason: event.reason,
          completionTokens: event.n_tokens,
          stopToken: event.stop_token,
          timings,
          receipt: event.receipt,
        };
      }
    }
  }

  /** What a token stands for. */
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

  memory(): MemoryReport {
    const memory = JSON.parse(this.#call((m) => m.memory()));
    return {
      weights: memory.weights,
      kvReserved: memory.kv_reserved,
      kvCommitted: memory.kv_committed,
      kvInUse: memory.kv_in_use,
      kvCached: memory.kv_cached,
      module: this.#loaded!.instance.memory.buffer.byteLength,
    };
  }

  /** Crashes the module, on a thread that helps if so asked, to test what happens then. */
  crash(thread: boolean): void {
    this.#call(() => {
      const { bindings } = this.#loaded!.instance;
      if (thread && "crashThread" in bindings) (bindings.crashThread as () => void)();
      else bindings.crash();
    });
  }

  /** Frees the model. */
  dispose(): void {
    this.#forget();
    this.#grammars.free();
    this.#release((m) => m.free());
    this.#loaded = undefined;
    this.#die(new StarlingError("disposed", "the model was disposed"));
  }

  /** Nothing is on its way any more. */
  #forget(): void {
    this.#active.clear();
    this.#waiting.forEach(free);
    this.#waiting = [];
  }

  /** From now on every call throws this. */
  #die(error: StarlingError): void {
    this.#dead ??= error;
  }

  /** Gives something back to the module; after a crash there is nothing to be given back. */
  #release(work: (model: Model) => void): void {
    try {
      this.#call(work);
    } catch (e) {
      if (!isFatal(e)) throw e;
    }
  }

  #call<T>(work: (model: Model) => T): T {
    if (this.#dead) throw this.#dead;
    try {
      const { instance, model } = this.#loaded!;
      return instance.call(() => work(model));
    } catch (e) {
      if (isFatal(e)) this.#die(e as StarlingError);
      throw e;
    }
  }
}

/** Frees what a job's answer would have followed, or what it follows a copy of. */
function free(job: Job): void {
  job.constraint?.free();
  job.constraint = undefined;
}

let channel: MessageChannel | undefined;
const resumes: (() => void)[] = [];

/**
 * Lets other tasks run. A timer would wait for 4 ms in browsers; where there is `scheduler.wait`, in workerd, messages come
 * before all other tasks, and whatever is made for one request is of no use to another.
 */
function breathe(): Promise<void> {
  const { scheduler, setImmediate } = globalThis as {
    scheduler?: { wait?: (ms: number) => Promise<void> };
    setImmediate?: (f: () => void) => void;
  };
  if (scheduler?.wait) return scheduler.wait(0);
  if (setImmediate) return new Promise((resolve) => setImmediate(resolve));
  if (typeof MessageChannel === "undefined") return new Promise((resolve) => setTimeout(resolve));
  if (!channel) {
    channel = new MessageChannel();
    channel.port1.onmessage = () => resumes.shift()?.();
  }
  return new Promise((resolve) => {
    resumes.push(resolve);
    channel!.port2.postMessage(null);
  });
}
