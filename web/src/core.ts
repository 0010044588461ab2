// The engine at work: owns the module's objects, feeds them the model as it arrives, and runs a batch at a time, so that
// messages and aborts get through between batches. Runs in a worker, or inline.

import { type InitOutput, Loader, initSync, type Model, crash, panicMessage } from "../wasm/starling.js";
import { blobFile, openPart, read, remoteTag, type Part, type SourceFile } from "./source.js";
import { cacheWriter, cached, modelCache, type CacheWriter } from "./cache.js";
import { type ErrorCode, StarlingError, toWire } from "./errors.js";
import type { CoreEvent } from "./protocol.js";
import type { LoadOptions, MemoryReport, ModelInfo, Progress, Verification } from "./types.js";

/** What loading takes, with nothing in it that cannot cross to a worker. */
export interface CoreOptions {
  parts: Part[];
  cache: NonNullable<LoadOptions["cache"]>;
  sha256: string[] | undefined;
  receipts: boolean;
  module: WebAssembly.Module;
  /** As the module takes them. */
  session: { n_ctx?: number | undefined; max_seqs?: number | undefined; batch_tokens?: number | undefined; kv_type?: string | undefined };
}

/** A request on its way. */
interface Job {
  job: number;
  request: string;
  submitted: number;
  started: number;
  prefilled: number;
  prompt: number;
}

/** What an event of the module looks like. */
type EngineEvent =
  | { type: "prefilled"; id: number; n_prompt: number; n_cached: number }
  | { type: "token"; id: number; token: number; text: string; logprob: number | null; top: [number, number][] }
  | { type: "done"; id: number; text: string; reason: "stop" | "length" | "not_finite"; n_tokens: number; receipt?: string };

/** Bytes of weights that fit a module's 4 GiB beside keys, values and working memory. */
const MOST_BYTES = 3.6e9;

export class Core {
  readonly info: ModelInfo;
  #module: InitOutput;
  #model: Model;
  #emit: (events: CoreEvent[]) => void;
  #waiting: Job[] = [];
  /** By the module's id. */
  #active = new Map<number, Job>();
  #running = false;
  #dead: StarlingError | undefined;

  private constructor(module: InitOutput, model: Model, emit: (events: CoreEvent[]) => void) {
    this.#module = module;
    this.#model = model;
    this.#emit = emit;
    const info = JSON.parse(model.info());
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
      threads: 1,
      worker: false,
      numerics: info.numerics,
    };
  }

  static async load(
    options: CoreOptions,
    onProgress: (progress: Progress) => void,
    signal: AbortSignal | undefined,
    emit: (events: CoreEvent[]) => void,
  ): Promise<Core> {
    signal?.throwIfAborted();
    // one instance for all that run inline
    const module = initSync({ module: options.module });
    const writers: { writer: CacheWriter; url: string; file: SourceFile; part: number }[] = [];
    let loader: Loader | undefined;
    let model: Model | undefined;
    let places: Place[] = [];
    try {
      for (const part of options.parts) places.push(await locate(part, options, signal));
      const total = places.reduce((sum, { file }) => sum + file.size, 0);
      if (total > MOST_BYTES) {
        throw new StarlingError("memory", `the model has ${total} bytes; a WebAssembly module has room for weights of about ${MOST_BYTES} at most`);
      }
      for (const [part, { file, url }] of places.entries()) {
        const writer = url === undefined ? undefined : await cacheWriter(url, file.size);
        if (writer) writers.push({ writer, url: url!, file, part });
      }
      const meter = new Meter(total, onProgress);
      const taken = places.map(() => 0);
      const take = async (part: number, until: "directory" | "end") => {
        const { file, from } = places[part]!;
        for await (const bytes of read(file, taken[part]!, signal)) {
          if (taken[part] === 0 && bytes[0] === "<".charCodeAt(0)) throw new StarlingError("model", `${file.name} is a web page, not a GGUF file`);
          taken[part]! += bytes.length;
          await writers.find((w) => w.part === part)?.writer.write(bytes);
          const known = guarded(() => loader!.feed(part, bytes));
          meter.add(from, bytes.length);
          if (known && until === "directory") return;
        }
      };
      loader = guarded(() => new Loader(Float64Array.from(places, ({ file }) => file.size), options.receipts || options.sha256 !== undefined));
      if (places.length > 1) for (const part of places.keys()) await take(part, "directory");
      for (const part of places.keys()) await take(part, "end");
      meter.done();
      const sha256 = places.map((_, part) => loader!.sha256(part));
      for (const [part, { file }] of places.entries()) {
        const want = options.sha256?.[part]?.toLowerCase();
        if (want !== undefined && want !== sha256[part]) {
          throw new StarlingError("checksum", `${file.name} has the SHA-256 ${sha256[part]}, expected ${want}`);
        }
      }
      const whole = loader;
      loader = undefined;
      model = guarded(() => whole.open(JSON.stringify(options.session)));
      for (const { writer, url, file, part } of writers) {
        await writer.commit({ url, size: file.size, tag: file.tag, sha256: sha256[part], stored: Date.now() });
      }
      return new Core(module, model, emit);
    } catch (e) {
      for (const { writer } of writers) await writer.abort().catch(() => {});
      if (!isDead(e)) {
        loader?.free();
        model?.free();
      }
      // a cached file that cannot be loaded is of no use
      const broken = e instanceof StarlingError && (e.code === "model" || e.code === "checksum");
      for (const { from, file } of places) if (broken && from === "cache") await modelCache.evict(file.name);
      throw e;
    }
  }

  /** Takes a request in JSON; what becomes of it is emitted. */
  submit(job: number, request: string): void {
    const now = performance.now();
    this.#waiting.push({ job, request, submitted: now, started: now, prefilled: now, prompt: 0 });
    void this.#run();
  }

  /** Forgets a request. */
  cancel(job: number): void {
    this.#waiting = this.#waiting.filter((w) => w.job !== job);
    for (const [id, active] of this.#active) {
      if (active.job !== job) continue;
      this.#active.delete(id);
      this.#call((m) => m.cancel(id));
    }
  }

  async #run(): Promise<void> {
    if (this.#running) return;
    this.#running = true;
    try {
      for (;;) {
        const events = this.#admit();
        if (this.#active.size > 0) {
          const step = JSON.parse(this.#call((m) => m.step())) as { events: EngineEvent[] };
          for (const event of step.events) {
            const seen = this.#seen(event);
            if (seen) events.push(seen);
          }
        }
        if (events.length > 0) this.#emit(events);
        if (this.#active.size + this.#waiting.length === 0) return;
        await breathe();
      }
    } catch (e) {
      const error = toWire(e);
      const jobs = [...this.#active.values(), ...this.#waiting];
      this.#active.clear();
      this.#waiting = [];
      this.#emit(jobs.map(({ job }) => ({ type: "failed", job, error })));
    } finally {
      this.#running = false;
    }
  }

  /** Lets those in that there is room for; says what is wrong with the others. */
  #admit(): CoreEvent[] {
    const failed: CoreEvent[] = [];
    while (this.#waiting.length > 0) {
      const next = this.#waiting[0]!;
      try {
        const id = this.#call((m) => m.submit(next.request));
        next.started = performance.now();
        this.#active.set(id, next);
      } catch (e) {
        if (isDead(e)) throw e;
        if (e instanceof StarlingError && e.code === "capacity" && this.#active.size > 0) break;
        failed.push({ type: "failed", job: next.job, error: toWire(e) });
      }
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
        const top = event.top.map(([id, logprob]) => ({ id, logprob, text: this.detokenize([id]) }));
        return { type: "token", job, token: { id: event.token, text: event.text, ...(event.logprob !== null && { logprob: event.logprob }), ...(top.length > 0 && { top }) } };
      }
      case "done": {
        this.#active.delete(event.id);
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
        return { type: "done", job, text: event.text, reason: event.reason, completionTokens: event.n_tokens, timings, receipt: event.receipt };
      }
    }
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

  memory(): MemoryReport {
    const memory = JSON.parse(this.#call((m) => m.memory()));
    return {
      weights: memory.weights,
      kvReserved: memory.kv_reserved,
      kvInUse: memory.kv_in_use,
      kvCached: memory.kv_cached,
      module: this.#module.memory.buffer.byteLength,
    };
  }

  /** Crashes the module, to test what happens then. */
  crash(): void {
    this.#call(() => crash());
  }

  /** Frees the model. */
  dispose(): void {
    if (this.#dead) return;
    this.#dead = new StarlingError("disposed", "the model was disposed");
    this.#active.clear();
    this.#waiting = [];
    this.#model.free();
  }

  #call<T>(work: (model: Model) => T): T {
    if (this.#dead) throw this.#dead;
    try {
      return guarded(() => work(this.#model));
    } catch (e) {
      if (isDead(e)) this.#dead = e as StarlingError;
      throw e;
    }
  }
}

const isDead = (e: unknown) => e instanceof StarlingError && (e.code === "crashed" || e.code === "disposed");

/** Gives the module's errors their names. */
function guarded<T>(work: () => T): T {
  try {
    return work();
  } catch (e) {
    if (e instanceof WebAssembly.RuntimeError || e instanceof RangeError) {
      const said = panicMessage();
      throw new StarlingError("crashed", said ? `Starling crashed: ${said}` : `Starling crashed: ${e.message}; most likely its memory ran out, of which a module has at most 4 GiB`, { cause: e });
    }
    const { code, message } = e as { code?: ErrorCode; message: string };
    throw code ? new StarlingError(code, message) : e;
  }
}

/** A file, and where its bytes come from; with the URL to cache it under, if it shall be. */
interface Place {
  file: SourceFile;
  from: Progress["from"];
  url?: string;
}

async function locate(part: Part, options: CoreOptions, signal: AbortSignal | undefined): Promise<Place> {
  if (!("url" in part) || part.url.startsWith("file:")) return { file: await openPart(part, signal), from: "local" };
  const { url } = part;
  const hit = options.cache === "reuse" || options.cache === "revalidate" ? await cached(url) : undefined;
  if (hit) {
    const remote = options.cache === "revalidate" ? await remoteTag(url, signal) : undefined;
    const same = !remote || (remote.tag === hit.entry.tag && (remote.size ?? hit.entry.size) === hit.entry.size);
    if (same) return { file: blobFile(hit.blob, url), from: "cache" };
  }
  const file = await openPart(part, signal, options.parts.length === 1);
  return { file, from: "network", ...(options.cache !== "none" && { url }) };
}

/** Counts bytes, and reports ten times a second at most. */
class Meter {
  #total: number;
  #report: (progress: Progress) => void;
  #loaded = 0;
  #from: Progress["from"] = "local";
  #rate = 0;
  #last = performance.now();
  #lastLoaded = 0;

  constructor(total: number, report: (progress: Progress) => void) {
    this.#total = total;
    this.#report = report;
  }

  add(from: Progress["from"], bytes: number): void {
    this.#loaded += bytes;
    this.#from = from;
    if (performance.now() - this.#last >= 100) this.#tell();
  }

  done(): void {
    this.#tell();
  }

  #tell(): void {
    const now = performance.now();
    const seconds = Math.max(now - this.#last, 1) / 1000;
    const rate = (this.#loaded - this.#lastLoaded) / seconds;
    // over about two seconds
    const weight = Math.min(seconds / 2, 1);
    this.#rate = this.#rate === 0 ? rate : this.#rate + (rate - this.#rate) * weight;
    [this.#last, this.#lastLoaded] = [now, this.#loaded];
    const remaining = this.#rate > 0 ? (this.#total - this.#loaded) / this.#rate : 0;
    this.#report({ from: this.#from, loaded: this.#loaded, total: this.#total, rate: this.#rate, remaining });
  }
}

let channel: MessageChannel | undefined;
const resumes: (() => void)[] = [];

/** Lets other tasks run. A timer would wait for 4 ms in browsers. */
function breathe(): Promise<void> {
  const { setImmediate } = globalThis as { setImmediate?: (f: () => void) => void };
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
