// Loading: streams a model from its files or the cache into the module, and into the cache.

import type { Loader, Model } from "../wasm/starling.js";
import { type CacheWriter, type Hit, cacheWriter, cached, exclusively, uncache } from "./cache.js";
import { type Capacity, checkFits } from "./capacity.js";
import { StarlingError } from "./errors.js";
import { type Isa, compile } from "./features.js";
import { Instance, isFatal } from "./instance.js";
import { pause, unlessAborted } from "./signal.js";
import { type ByteSink, type Count, type Part, type SourceFile, blobFile, openPart, read, remoteTag } from "./source.js";
import { Helpers } from "./threads.js";
import type { LoadOptions, Progress } from "./types.js";

/** What loading needs, in a form that can be posted to a worker. */
export interface LoadRequest {
  parts: Part[];
  /** Files of the draft model; none without one. */
  draftParts: Part[];
  /** Whether the model's own layer for multi-token prediction drafts. */
  draftMtp: boolean;
  cache: NonNullable<LoadOptions["cache"]>;
  sha256: string[] | undefined;
  /** HTTP headers of requests for the parts. */
  headers: Record<string, string>;
  receipts: boolean;
  /** KV pages are kept on disk, which needs a digest of the model. */
  kvCache: { maxBytes: number } | undefined;
  module: WebAssembly.Module;
  capacity: Capacity;
  /** Number of threads with this one; more than one only in a worker. */
  threads: number;
  /** Requested instruction set. */
  isa: Isa | undefined;
  /** Options of the module, under its names. */
  session: {
    n_ctx?: number | undefined;
    max_seqs?: number | undefined;
    batch_tokens?: number | undefined;
    working_memory?: number | undefined;
    kv_type?: string | undefined;
    draft_max?: number | undefined;
    /** On a thread with other work: milliseconds of a step, as far as a step can be shortened. */
    max_step_ms?: number | undefined;
  };
}

/** Counts the bytes of a file of unknown length, after files of `bytes` bytes; throws when the model becomes too large. */
export function countFitting(capacity: Capacity, bytes = 0): Count {
  return (more) => checkFits((bytes += more), capacity, true);
}

/** A loaded model, its instance and threads. */
export interface Loaded {
  instance: Instance;
  model: Model;
  helpers: Helpers;
}

/** Loads a model. A cached file that turns out to be wrong is removed and downloaded again. */
export async function loadModel(
  options: LoadRequest,
  onProgress: (progress: Progress) => void,
  signal: AbortSignal | undefined,
): Promise<Loaded> {
  signal?.throwIfAborted();
  const engines = new Engines(options, signal);
  try {
    return await loadOnce(options, engines, onProgress, signal);
  } catch (e) {
    if (!(e instanceof StaleCache)) throw e;
    try {
      return await loadOnce({ ...options, cache: "reload" }, engines, onProgress, signal);
    } catch (again) {
      // without a network, the error of the cached file says more
      throw again instanceof StarlingError && again.code === "network" ? e.fault : again;
    }
  }
}

/** An instance and its threads, which start while the weights arrive. */
interface Engine {
  instance: Instance;
  helpersStarted: Promise<Helpers>;
}

/** Starts the engine for a model of a certain length. */
class Engines {
  #options: LoadRequest;
  #signal: AbortSignal | undefined;
  #started = new Map<WebAssembly.Module, Engine>();

  constructor(options: LoadRequest, signal: AbortSignal | undefined) {
    this.#options = options;
    this.#signal = signal;
  }

  /** An engine with room for `bytes` bytes of weights; the same for a second attempt, since threads end with their worker. */
  async for(bytes: number): Promise<Engine> {
    const { isa, threads, capacity } = this.#options;
    let { module } = this.#options;
    if (bytes > capacity.module)
      module = await unlessAborted(compile({ isa, threads: threads > 1, memory64: true }), this.#signal);
    let engine = this.#started.get(module);
    if (!engine) {
      const instance = new Instance(module, bytes);
      engine = { instance, helpersStarted: Helpers.start(module, instance.memory, threads - 1) };
      this.#started.set(module, engine);
    }
    return engine;
  }
}

/** A cached file was not a model or had another digest, and was removed from the cache. */
class StaleCache extends Error {
  constructor(readonly fault: StarlingError) {
    super(fault.message);
  }
}

async function loadOnce(
  options: LoadRequest,
  engines: Engines,
  onProgress: (progress: Progress) => void,
  signal: AbortSignal | undefined,
): Promise<Loaded> {
  const writers: { writer: CacheWriter; url: string; file: SourceFile; part: number }[] = [];
  // the files of the model, then those of the draft model
  const parts = [...options.parts, ...options.draftParts];
  const ofDraft = (part: number) => part >= options.parts.length;
  let loader: Loader | undefined;
  let draft: Loader | undefined;
  let model: Model | undefined;
  let files: LocatedFile[] = [];
  try {
    const meter = new ProgressMeter(onProgress);
    let total = 0;
    const hits = await cacheHits(parts, options.cache);
    for (const [i, part] of parts.entries()) {
      const limit = countFitting(options.capacity, total);
      const count = (more: number) => {
        limit(more);
        meter.add("url" in part ? "network" : "local", more);
      };
      const located = await locate(part, hits, { ...options, parts }, options.sha256?.[i]?.toLowerCase(), signal, count);
      files.push(located);
      total += located.file.size;
    }
    checkFits(total, options.capacity);
    const { instance, helpersStarted } = await engines.for(total);
    const canChoose = options.isa === undefined && instance.call(({ warmUpIsas }) => warmUpIsas());
    meter.expect(total);
    const toCache = files.reduce((sum, { file, url }) => sum + (url === undefined ? 0 : file.size), 0);
    for (const [part, { file, url }] of files.entries()) {
      const writer = url === undefined ? undefined : await cacheWriter(url, file.size, toCache);
      if (writer) writers.push({ writer, url: url!, file, part });
    }
    const nameOf = (file: number) => files[file]!.file.name;
    const nameOfDraft = (file: number) => nameOf(options.parts.length + file);
    const bytesFed = files.map(() => 0);
    const feed = async (part: number, until: "directory" | "end") => {
      const { file, from } = files[part]!;
      const writer = writers.find((w) => w.part === part)?.writer;
      const sink: ByteSink = {
        async write(bytes) {
          if (bytesFed[part] === 0 && bytes[0] === "<".charCodeAt(0))
            throw new StarlingError("model", `${file.name} is a web page, not a GGUF file`);
          bytesFed[part]! += bytes.length;
          await writer?.write(bytes);
          if (!file.counted) meter.add(from, bytes.length);
        },
      };
      const [into, index, name] = ofDraft(part) ? [draft!, part - options.parts.length, nameOfDraft] : [loader!, part, nameOf];
      await read(file, bytesFed[part]!, signal, sink, (stream, sink) =>
        instance.run(() => into.feedStream(index, stream, until === "directory", file.owned ?? false, sink, signal), name),
      );
    };
    const sizes = (of: LocatedFile[]) => Float64Array.from(of, ({ file }) => file.size);
    const [own, others] = [files.slice(0, options.parts.length), files.slice(options.parts.length)];
    const digest = options.receipts || options.kvCache !== undefined || options.sha256 !== undefined;
    loader = instance.call(({ Loader }) => new Loader(sizes(own), digest));
    if (options.draftMtp) instance.call(() => loader!.loadMtpHead());
    if (others.length > 0) draft = instance.call(({ Loader }) => new Loader(sizes(others), false));
    if (files.length > 1) for (const part of files.keys()) await feed(part, "directory");
    for (const part of files.keys()) await feed(part, "end");
    meter.done();
    const sha256 = files.map((_, part) => (ofDraft(part) ? undefined : loader!.sha256(part)));
    for (const [part, { file }] of files.entries()) {
      const want = options.sha256?.[part]?.toLowerCase();
      if (want !== undefined && want !== sha256[part]) {
        throw new StarlingError("checksum", `${file.name}: SHA-256 is ${sha256[part]}, expected ${want}`);
      }
    }
    const isa = options.isa ?? (canChoose ? instance.call(({ fasterIsa }) => fasterIsa()) : undefined);
    const [complete, completeDraft] = [loader, draft];
    [loader, draft] = [undefined, undefined];
    const helpers = await helpersStarted;
    const threads = 1 + helpers.count;
    // not the default of the build
    const session = { ...options.session, ...(isa === "relaxed-i16" && { isa }), threads };
    model = instance.call(() => complete.open(JSON.stringify(session), completeDraft), nameOf);
    // lets an abort through
    await pause(0, signal);
    const commit = async () => {
      for (const { writer, url, file, part } of writers) {
        signal?.throwIfAborted();
        await writer.commit({ url, size: file.size, tag: file.tag, sha256: sha256[part], stored: Date.now() });
      }
      signal?.throwIfAborted();
    };
    // all parts under one lock: another tab may commit another version
    if (writers.length > 0) await exclusively(commit);
    return { instance, model, helpers };
  } catch (e) {
    for (const { writer } of writers) await writer.abort().catch(() => {});
    if (!isFatal(e)) {
      loader?.free();
      draft?.free();
      model?.free();
    }
    const fromCache = files.filter(({ from }) => from === "cache");
    const isBroken = e instanceof StarlingError && (e.code === "model" || e.code === "checksum");
    if (!isBroken || fromCache.length === 0) throw e;
    for (const { file } of fromCache) await uncache(file.name);
    throw new StaleCache(e);
  }
}

/** A file, where its bytes come from, and the URL to cache it under. */
interface LocatedFile {
  file: SourceFile;
  from: Progress["from"];
  url?: string;
}

/** Cached files of the parts, by URL; none if the cache must not be used. */
async function cacheHits(parts: Part[], cache: LoadRequest["cache"]): Promise<Map<string, Hit>> {
  if (cache !== "reuse" && cache !== "revalidate") return new Map();
  const urls = parts.flatMap((part) => ("url" in part && !part.url.startsWith("file:") ? [part.url] : []));
  const hits = await cached(urls);
  return new Map(urls.flatMap((url, i) => (hits[i] ? [[url, hits[i]]] : [])));
}

/** Opens a part from the cache, if it has the right version, or from its source. */
async function locate(
  part: Part,
  hits: Map<string, Hit>,
  { cache, headers, parts }: LoadRequest,
  sha256: string | undefined,
  signal: AbortSignal | undefined,
  count: Count,
): Promise<LocatedFile> {
  if (!("url" in part) || part.url.startsWith("file:"))
    return { file: await openPart(part, {}, signal, count), from: "local" };
  const { url } = part;
  const hit = hits.get(url);
  const known = hit?.entry.sha256;
  if (hit && (sha256 === undefined || known === undefined || known === sha256)) {
    const remote = cache === "revalidate" ? await remoteTag(url, headers, signal) : undefined;
    const same = !remote || (remote.tag === hit.entry.tag && (remote.size ?? hit.entry.size) === hit.entry.size);
    if (same) return { file: blobFile(hit.blob, url), from: "cache" };
  }
  const file = await openPart(part, headers, signal, count, parts.length === 1);
  return { file, from: "network", ...(cache !== "none" && { url }) };
}

/** Measures progress and rate, and reports them at most ten times a second. */
class ProgressMeter {
  /** Infinity until the length of every file is known. */
  #total = Infinity;
  #report: (progress: Progress) => void;
  #loaded = 0;
  #from: Progress["from"] = "local";
  #rate = 0;
  #last = performance.now();
  #lastLoaded = 0;

  constructor(report: (progress: Progress) => void) {
    this.#report = report;
  }

  /** Sets the total, and starts to measure the rate. */
  expect(total: number): void {
    this.#total = total;
    [this.#last, this.#lastLoaded] = [performance.now(), this.#loaded];
  }

  add(from: Progress["from"], bytes: number): void {
    this.#loaded += bytes;
    this.#from = from;
    if (performance.now() - this.#last >= 100) this.#send();
  }

  done(): void {
    this.#send();
  }

  #send(): void {
    const now = performance.now();
    const seconds = Math.max(now - this.#last, 1) / 1000;
    const rate = (this.#loaded - this.#lastLoaded) / seconds;
    // exponential average over about 2 seconds
    const weight = Math.min(seconds / 2, 1);
    this.#rate = this.#rate === 0 ? rate : this.#rate + (rate - this.#rate) * weight;
    [this.#last, this.#lastLoaded] = [now, this.#loaded];
    const remaining = this.#rate > 0 ? (this.#total - this.#loaded) / this.#rate : 0;
    this.#report({ from: this.#from, loaded: this.#loaded, total: this.#total, rate: this.#rate, remaining });
  }
}
