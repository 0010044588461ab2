// Backends: an engine in a worker, or inline on this thread.

import { Core } from "./core.js";
import { StarlingError, type WireError, fromWire, toWire } from "./errors.js";
import { type LoadRequest, countFitting } from "./load.js";
import {
  type Backend,
  type Choice,
  type CoreEvent,
  type FromWorker,
  type Method,
  type OutputConstraint,
  type ToWorker,
  isLast,
} from "./protocol.js";
import type { Thread } from "./runtime.js";
import { startWorker } from "./script.js";
import { type Part, transferable, readToBlob } from "./source.js";
import type { ModelInfo, Progress } from "./types.js";

export interface BackendOptions {
  core: LoadRequest;
  onProgress: (progress: Progress) => void;
  signal: AbortSignal | undefined;
  emit: (events: CoreEvent[]) => void;
}

/** An engine on this thread. */
export async function inline({ core, onProgress, signal, emit }: BackendOptions): Promise<Backend> {
  const engine = await Core.load(core, onProgress, signal, emit);
  return {
    info: engine.info,
    submit: (job, request, constraint) => engine.submit(job, request, constraint),
    cancel: (job) => engine.cancel(job),
    call: async (method, ...args) => {
      const f = engine[method] as (...args: unknown[]) => never;
      return f.apply(engine, args);
    },
    dispose: () => engine.dispose(),
  };
}

/** An engine in a worker of its own. */
export async function inWorker(options: BackendOptions): Promise<Backend> {
  options.signal?.throwIfAborted();
  // bundlers look for exactly this form
  const worker = startWorker(
    "worker.js",
    () => new Worker(new URL("./worker.js", import.meta.url), { type: "module" }),
  );
  try {
    return await new WorkerBackend(worker, options).load(options);
  } catch (e) {
    worker.terminate();
    throw e;
  }
}

/** Milliseconds that a worker has to clean up after an abort. */
const ABORT_GRACE_MS = 2000;

/** Milliseconds that the threads of a crashed module have to end: Chromium leaks threads that are ending when their parent is
 * terminated. */
const CRASH_GRACE_MS = 2000;

class WorkerBackend implements Backend {
  info!: ModelInfo;
  #worker: Thread;
  #emit: (events: CoreEvent[]) => void;
  #calls = new Map<number, { resolve: (value: never) => void; reject: (e: Error) => void }>();
  #nextCall = 0;
  #jobs = new Set<number>();
  #failure: Error | undefined;
  #onMessage: (message: FromWorker) => void = () => {};
  /** Rejects the load in progress. */
  #refuse: (e: Error) => void = () => {};

  constructor(worker: Thread, { emit, onProgress }: BackendOptions) {
    this.#worker = worker;
    this.#emit = emit;
    worker.onerror = (event) => {
      event.preventDefault();
      const why = event.message ?? "the script cannot be loaded";
      this.#refuse(new StarlingError("unsupported", `the worker cannot start: ${why}`));
      this.#end(new StarlingError("crashed", `the worker failed: ${why}`));
    };
    worker.onmessage = ({ data }: MessageEvent<FromWorker>) => {
      switch (data.type) {
        case "progress":
          return onProgress(data.progress);
        case "events":
          for (const event of data.events) if (isLast(event)) this.#jobs.delete(event.job);
          emit(data.events);
          this.#hold();
          return data.events.forEach((event) => event.type === "failed" && this.#endIfCrashed(event.error));
        case "reply":
          this.#calls.get(data.call)?.resolve(data.value as never);
          this.#calls.delete(data.call);
          return this.#hold();
        case "fault":
          this.#calls.get(data.call)?.reject(fromWire(data.error));
          this.#calls.delete(data.call);
          this.#hold();
          return this.#endIfCrashed(data.error);
        default:
          return this.#onMessage(data);
      }
    };
  }

  #post(message: ToWorker, transfer: Transferable[] = []) {
    this.#worker.postMessage(message, transfer);
  }

  async load({ core, signal }: BackendOptions): Promise<Backend> {
    const { promise, resolve, reject } = withResolvers<ModelInfo>();
    // it may reject before it is awaited
    promise.catch(() => {});
    this.#refuse = reject;
    this.#onMessage = (message) => {
      if (message.type === "loaded") resolve(message.info);
      if (message.type === "refused") reject(signal?.aborted ? (signal.reason as Error) : fromWire(message.error));
    };
    let grace: ReturnType<typeof setTimeout> | undefined;
    const abort = () => {
      this.#post({ type: "abort" });
      grace = setTimeout(() => reject(signal!.reason as Error), ABORT_GRACE_MS);
    };
    signal?.addEventListener("abort", abort);
    try {
      await this.#postLoad(core, signal);
      this.info = await promise;
      // loaded in spite of the abort
      signal?.throwIfAborted();
      this.#hold();
      return this;
    } finally {
      clearTimeout(grace);
      signal?.removeEventListener("abort", abort);
    }
  }

  async #postLoad(core: LoadRequest, signal: AbortSignal | undefined): Promise<void> {
    const n = core.parts.length;
    // the model's files, then those of the draft model
    const all = [...core.parts, ...core.draftParts];
    const post = (all: Part[], streams: Transferable[]) => {
      try {
        const options = { ...core, parts: all.slice(0, n), draftParts: all.slice(n) };
        this.#post({ type: "load", options }, streams);
      } catch (e) {
        const message = `the model cannot be sent to the worker: ${(e as Error).message}`;
        throw new StarlingError("unsupported", message, { cause: e });
      }
    };
    const sendable = all.map((part) => ("bytes" in part ? transferable(part.bytes) : part));
    const streams = sendable.flatMap((part) => ("stream" in part ? [part.stream] : []));
    try {
      post(sendable, streams);
    } catch (e) {
      if (streams.length === 0) throw e;
      // not every browser can transfer streams
      const parts: Part[] = [];
      for (const part of all) {
        if ("stream" in part) parts.push(await readToBlob(part, signal, countFitting(core.capacity)));
        else parts.push("bytes" in part ? { blob: new Blob([part.bytes]) } : part);
      }
      post(parts, []);
    }
  }

  /** A worker keeps a process of Node alive while it has something to do. */
  #hold(): void {
    if (this.#calls.size + this.#jobs.size > 0) this.#worker.ref?.();
    else this.#worker.unref?.();
  }

  /** A worker whose module has crashed is of no more use. */
  #endIfCrashed(error: WireError): void {
    if (error.code === "crashed" && !this.#failure) this.#end(fromWire(error), CRASH_GRACE_MS);
  }

  /** Fails all calls and requests, and terminates the worker after `delay` milliseconds. */
  #end(error: Error, delay = 0): void {
    if (delay > 0) setTimeout(() => this.#worker.terminate(), delay);
    else if (!this.#failure) this.#worker.terminate();
    this.#failure = error;
    for (const { reject } of this.#calls.values()) reject(error);
    this.#calls.clear();
    for (const job of this.#jobs) this.#fail(job, error);
    this.#jobs.clear();
  }

  #fail(job: number, error: Error): void {
    this.#emit([{ type: "failed", job, error: toWire(error) }]);
  }

  submit(job: number, request: string | Choice, constraint: OutputConstraint | undefined): void {
    if (this.#failure) return this.#fail(job, this.#failure);
    this.#jobs.add(job);
    this.#hold();
    this.#post({ type: "submit", job, request, constraint });
  }

  cancel(job: number): void {
    this.#jobs.delete(job);
    this.#hold();
    this.#post({ type: "cancel", job });
  }

  call<M extends Method>(method: M, ...args: Parameters<Core[M]>): Promise<ReturnType<Core[M]>> {
    if (this.#failure) return Promise.reject(this.#failure);
    const { promise, resolve, reject } = withResolvers<ReturnType<Core[M]>>();
    const call = this.#nextCall++;
    this.#calls.set(call, { resolve, reject });
    this.#hold();
    this.#post({ type: "call", call, method, args });
    return promise;
  }

  dispose(): void {
    this.#end(new StarlingError("disposed", "the model was disposed"));
  }
}

function withResolvers<T>() {
  let resolve!: (value: T) => void;
  let reject!: (e: Error) => void;
  const promise = new Promise<T>((yes, no) => ([resolve, reject] = [yes, no]));
  return { promise, resolve, reject };
}
