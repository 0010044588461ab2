// An engine in a worker, or inline.

import { Core } from "./core.js";
import { StarlingError, type WireError, fromWire, toWire } from "./errors.js";
import { type LoadRequest, countFitting } from "./load.js";
import type { Backend, CoreEvent, Form, FromWorker, Method, ToWorker } from "./protocol.js";
import { startWorker } from "./script.js";
import { type Part, crossing, inBlob } from "./source.js";
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
    submit: (job, request, form) => engine.submit(job, request, form),
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

/** How long an aborted worker may clean up, in milliseconds. */
const GRACE = 2000;

/** How long the threads of a crashed module have to stop: Chromium leaves some behind that are at it when their parent ends. */
const SETTLE = 2000;

class WorkerBackend implements Backend {
  info!: ModelInfo;
  #worker: Worker;
  #emit: (events: CoreEvent[]) => void;
  #calls = new Map<number, { resolve: (value: never) => void; reject: (e: Error) => void }>();
  #nextCall = 0;
  #jobs = new Set<number>();
  #gone: Error | undefined;
  #onMessage: (message: FromWorker) => void = () => {};
  /** Ends loading, while it lasts. */
  #refuse: (e: Error) => void = () => {};

  constructor(worker: Worker, { emit, onProgress }: BackendOptions) {
    this.#worker = worker;
    this.#emit = emit;
    worker.onerror = (event) => {
      event.preventDefault();
      const why = event.message ?? "its script cannot be loaded";
      this.#refuse(new StarlingError("unsupported", `the worker does not start: ${why}`));
      this.#end(new StarlingError("crashed", `the worker failed: ${why}`));
    };
    worker.onmessage = ({ data }: MessageEvent<FromWorker>) => {
      switch (data.type) {
        case "progress":
          return onProgress(data.progress);
        case "events":
          for (const { type, job } of data.events) if (type === "done" || type === "failed") this.#jobs.delete(job);
          emit(data.events);
          return data.events.forEach((event) => event.type === "failed" && this.#endIfCrashed(event.error));
        case "reply":
          this.#calls.get(data.call)?.resolve(data.value as never);
          return this.#calls.delete(data.call);
        case "fault":
          this.#calls.get(data.call)?.reject(fromWire(data.error));
          this.#calls.delete(data.call);
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
    // it may be refused before it is waited for
    promise.catch(() => {});
    this.#refuse = reject;
    this.#onMessage = (message) => {
      if (message.type === "loaded") resolve(message.info);
      if (message.type === "refused") reject(signal?.aborted ? (signal.reason as Error) : fromWire(message.error));
    };
    let grace: ReturnType<typeof setTimeout> | undefined;
    const abort = () => {
      this.#post({ type: "abort" });
      grace = setTimeout(() => reject(signal!.reason as Error), GRACE);
    };
    signal?.addEventListener("abort", abort);
    try {
      await this.#postLoad(core, signal);
      this.info = await promise;
      // not taken back in time: the caller has given it up
      signal?.throwIfAborted();
      return this;
    } finally {
      clearTimeout(grace);
      signal?.removeEventListener("abort", abort);
    }
  }

  async #postLoad(core: LoadRequest, signal: AbortSignal | undefined): Promise<void> {
    const post = (parts: Part[], streams: Transferable[]) => {
      try {
        this.#post({ type: "load", options: { ...core, parts } }, streams);
      } catch (e) {
        const message = `nothing can be sent to a worker: ${(e as Error).message}`;
        throw new StarlingError("unsupported", message, { cause: e });
      }
    };
    const crossed = core.parts.map((part) => ("bytes" in part ? crossing(part.bytes) : part));
    const streams = crossed.flatMap((part) => ("stream" in part ? [part.stream] : []));
    try {
      post(crossed, streams);
    } catch (e) {
      if (streams.length === 0) throw e;
      // streams cannot be transferred everywhere
      const parts: Part[] = [];
      for (const part of core.parts) {
        if ("stream" in part) parts.push(await inBlob(part, signal, countFitting()));
        else parts.push("bytes" in part ? { blob: new Blob([part.bytes]) } : part);
      }
      post(parts, []);
    }
  }

  /** Nothing more can be asked of a worker whose module has crashed. */
  #endIfCrashed(error: WireError): void {
    if (error.code === "crashed" && !this.#gone) this.#end(fromWire(error), SETTLE);
  }

  /** Nothing more comes from the worker; it has so many milliseconds left. */
  #end(error: Error, left = 0): void {
    if (left > 0) setTimeout(() => this.#worker.terminate(), left);
    else if (!this.#gone) this.#worker.terminate();
    this.#gone = error;
    for (const { reject } of this.#calls.values()) reject(error);
    this.#calls.clear();
    for (const job of this.#jobs) this.#fail(job, error);
    this.#jobs.clear();
  }

  #fail(job: number, error: Error): void {
    this.#emit([{ type: "failed", job, error: toWire(error) }]);
  }

  submit(job: number, request: string, form: Form | undefined): void {
    if (this.#gone) return this.#fail(job, this.#gone);
    this.#jobs.add(job);
    this.#post({ type: "submit", job, request, form });
  }

  cancel(job: number): void {
    this.#jobs.delete(job);
    this.#post({ type: "cancel", job });
  }

  call<M extends Method>(method: M, ...args: Parameters<Core[M]>): Promise<ReturnType<Core[M]>> {
    if (this.#gone) return Promise.reject(this.#gone);
    const { promise, resolve, reject } = withResolvers<ReturnType<Core[M]>>();
    const call = this.#nextCall++;
    this.#calls.set(call, { resolve, reject });
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
