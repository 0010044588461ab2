// A model on its way: from its files or the cache into the module, and into the cache.

import type { InitOutput, Loader, Model } from "../wasm/starling.js";
import { type CacheWriter, type Hit, cacheWriter, cached, exclusively, uncache } from "./cache.js";
import { type ErrorCode, StarlingError } from "./errors.js";
import type { Isa } from "./features.js";
import { beginRace, fasterIsa } from "./race.js";
import { pause } from "./signal.js";
import { type Count, type Part, type SourceFile, blobFile, openPart, read, remoteTag } from "./source.js";
import { type Face, Helpers, faceOf } from "./threads.js";
import type { LoadOptions, Progress } from "./types.js";

/** What loading takes, with nothing in it that cannot cross to a worker. */
export interface LoadRequest {
  parts: Part[];
  cache: NonNullable<LoadOptions["cache"]>;
  sha256: string[] | undefined;
  /** Of requests for the parts. */
  headers: Record<string, string>;
  receipts: boolean;
  module: WebAssembly.Module;
  /** Threads, this one included; more than one only in a worker. */
  threads: number;
  /** Instruction set, if one was asked for. */
  isa: Isa | undefined;
  /** As the module takes them. */
  session: {
    n_ctx?: number | undefined;
    max_seqs?: number | undefined;
    batch_tokens?: number | undefined;
    working_memory?: number | undefined;
    kv_type?: string | undefined;
  };
}

/** Bytes of weights that fit a module's 4 GiB beside keys, values and working memory. */
const MOST_BYTES = 3.6e9;

/** Refuses a model of so many bytes, or of more if they are yet to come, if it is too large. */
function fits(bytes: number, more = false): void {
  if (bytes <= MOST_BYTES) return;
  throw new StarlingError(
    "memory",
    `the model has ${more ? "at least " : ""}${bytes} bytes; a WebAssembly module has room for weights of about ${MOST_BYTES} at most`,
  );
}

/** Counts bytes of a file whose length is not known, after others of so many bytes, as far as they fit. */
export function countFitting(bytes = 0): Count {
  return (more) => fits((bytes += more), true);
}

/** A model, and what it runs on. */
export interface Loaded {
  face: Face;
  module: InitOutput;
  model: Model;
  helpers: Helpers;
}

/** Loads a model; if it cannot, nothing is left of it. What the cache has is asked for anew where it is of no use. */
export async function loadModel(
  options: LoadRequest,
  onProgress: (progress: Progress) => void,
  signal: AbortSignal | undefined,
): Promise<Loaded> {
  signal?.throwIfAborted();
  if (crashed) {
    throw new StarlingError(
      "crashed",
      `the module has crashed, and without a worker it cannot start again: ${crashed.message}`,
    );
  }
  face = faceOf(options.module);
  // one instance for all that run inline
  const module = face.initSync({ module: options.module });
  const helping = Helpers.start(options.module, module.memory, options.threads - 1);
  const load = async (cache: LoadRequest["cache"]) => {
    const model = await loadOnce({ ...options, cache }, helping, onProgress, signal);
    return { face, module, model, helpers: await helping };
  };
  try {
    return await load(options.cache);
  } catch (e) {
    if (!(e instanceof StaleCache)) throw e;
    try {
      return await load("reload");
    } catch (again) {
      // without a network, what was wrong is the file
      throw again instanceof StarlingError && again.code === "network" ? e.fault : again;
    }
  }
}

/** A cached file was no model, or not the one asked for; it is in the cache no more. */
class StaleCache extends Error {
  constructor(readonly fault: StarlingError) {
    super(fault.message);
  }
}

async function loadOnce(
  options: LoadRequest,
  helping: Promise<Helpers>,
  onProgress: (progress: Progress) => void,
  signal: AbortSignal | undefined,
): Promise<Model> {
  const writers: { writer: CacheWriter; url: string; file: SourceFile; part: number }[] = [];
  let loader: Loader | undefined;
  let model: Model | undefined;
  let places: Place[] = [];
  try {
    const isChoice = options.isa === undefined && guarded(() => beginRace(face));
    const meter = new Meter(onProgress);
    let total = 0;
    const hits = await found(options);
    for (const [i, part] of options.parts.entries()) {
      const fitting = countFitting(total);
      const count = (more: number) => {
        fitting(more);
        meter.add("url" in part ? "network" : "local", more);
      };
      const place = await locate(part, hits, options, options.sha256?.[i]?.toLowerCase(), signal, count);
      places.push(place);
      total += place.file.size;
    }
    fits(total);
    meter.expect(total);
    const toCache = places.reduce((sum, { file, url }) => sum + (url === undefined ? 0 : file.size), 0);
    for (const [part, { file, url }] of places.entries()) {
      const writer = url === undefined ? undefined : await cacheWriter(url, file.size, toCache);
      if (writer) writers.push({ writer, url: url!, file, part });
    }
    const taken = places.map(() => 0);
    const take = async (part: number, until: "directory" | "end") => {
      const { file, from } = places[part]!;
      for await (const bytes of read(file, taken[part]!, signal)) {
        if (taken[part] === 0 && bytes[0] === "<".charCodeAt(0))
          throw new StarlingError("model", `${file.name} is a web page, not a GGUF file`);
        taken[part]! += bytes.length;
        await writers.find((w) => w.part === part)?.writer.write(bytes);
        const known = guarded(() => loader!.feed(part, bytes));
        if (!file.counted) meter.add(from, bytes.length);
        if (known && until === "directory") return;
      }
    };
    loader = guarded(
      () =>
        new face.Loader(
          Float64Array.from(places, ({ file }) => file.size),
          options.receipts || options.sha256 !== undefined,
        ),
    );
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
    const isa = options.isa ?? (isChoice ? guarded(() => fasterIsa(face)) : undefined);
    const whole = loader;
    loader = undefined;
    const threads = 1 + (await helping).count;
    // what a build has beside its own must be named
    const session = { ...options.session, ...(isa === "relaxed-i16" && { isa }), threads };
    model = guarded(() => whole.open(JSON.stringify(session)));
    // what was said meanwhile gets through
    await pause(0, signal);
    const commit = async () => {
      for (const { writer, url, file, part } of writers) {
        signal?.throwIfAborted();
        await writer.commit({ url, size: file.size, tag: file.tag, sha256: sha256[part], stored: Date.now() });
      }
      signal?.throwIfAborted();
    };
    // all parts at once: another tab may have another version of them
    if (writers.length > 0) await exclusively(commit);
    return model;
  } catch (e) {
    for (const { writer } of writers) await writer.abort().catch(() => {});
    if (!isDead(e)) {
      loader?.free();
      model?.free();
    }
    const fromCache = places.filter(({ from }) => from === "cache");
    const isBroken = e instanceof StarlingError && (e.code === "model" || e.code === "checksum");
    if (!isBroken || fromCache.length === 0) throw e;
    for (const { file } of fromCache) await uncache(file.name);
    throw new StaleCache(e);
  }
}

/** Of the module that was loaded last; there is one at a time. */
let face: Face;

/** Why the module of this thread is of no use any more. */
let crashed: StarlingError | undefined;

/** Whether an error means that nothing more can be asked of the module's objects. */
export const isDead = (e: unknown) => e instanceof StarlingError && (e.code === "crashed" || e.code === "disposed");

/** Gives the module's errors their names; calls nothing of one that has crashed. */
export function guarded<T>(work: () => T): T {
  if (crashed) throw crashed;
  try {
    return work();
  } catch (e) {
    if (e instanceof WebAssembly.RuntimeError || e instanceof RangeError) {
      const said = face.panicMessage();
      throw (crashed = new StarlingError(
        "crashed",
        said
          ? `Starling crashed: ${said}`
          : `Starling crashed: ${e.message}; most likely its memory ran out, of which a module has at most 4 GiB`,
        { cause: e },
      ));
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

/** What the cache has of the parts, as far as it may be used. */
async function found({ parts, cache }: LoadRequest): Promise<Map<string, Hit>> {
  if (cache !== "reuse" && cache !== "revalidate") return new Map();
  const urls = parts.flatMap((part) => ("url" in part && !part.url.startsWith("file:") ? [part.url] : []));
  const hits = await cached(urls);
  return new Map(urls.flatMap((url, i) => (hits[i] ? [[url, hits[i]]] : [])));
}

async function locate(
  part: Part,
  hits: Map<string, Hit>,
  { cache, headers, parts }: LoadRequest,
  sha256: string | undefined,
  signal: AbortSignal | undefined,
  count: Count,
): Promise<Place> {
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

/** Counts bytes, and reports ten times a second at most. */
class Meter {
  /** Until all lengths are known there is no telling. */
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

  /** So many bytes in all; the next of them begin to come. */
  expect(total: number): void {
    this.#total = total;
    [this.#last, this.#lastLoaded] = [performance.now(), this.#loaded];
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
