// A model on its way: from its files or the cache into the module, and into the cache.

import type { Loader, Model } from "../wasm/starling.js";
import { type CacheWriter, type Hit, cacheWriter, cached, exclusively, uncache } from "./cache.js";
import { StarlingError } from "./errors.js";
import type { Isa } from "./features.js";
import { Instance, isFatal } from "./instance.js";
import { beginRace, fasterIsa } from "./race.js";
import { pause } from "./signal.js";
import { type Count, type Part, type SourceFile, blobFile, openPart, read, remoteTag } from "./source.js";
import { Helpers } from "./threads.js";
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
  instance: Instance;
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
  const instance = new Instance(options.module);
  const helping = Helpers.start(options.module, instance.memory, options.threads - 1);
  const load = async (cache: LoadRequest["cache"]) => {
    const model = await loadOnce({ ...options, cache }, instance, helping, onProgress, signal);
    return { instance, model, helpers: await helping };
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
  instance: Instance,
  helping: Promise<Helpers>,
  onProgress: (progress: Progress) => void,
  signal: AbortSignal | undefined,
): Promise<Model> {
  const writers: { writer: CacheWriter; url: string; file: SourceFile; part: number }[] = [];
  let loader: Loader | undefined;
  let model: Model | undefined;
  let places: Place[] = [];
  try {
    const isChoice = options.isa === undefined && instance.call(beginRace);
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
    const nameOf = (file: number) => places[file]!.file.name;
    const taken = places.map(() => 0);
    const take = async (part: number, until: "directory" | "end") => {
      const { file, from } = places[part]!;
      for await (const bytes of read(file, taken[part]!, signal)) {
        if (taken[part] === 0 && bytes[0] === "<".charCodeAt(0))
          throw new StarlingError("model", `${file.name} is a web page, not a GGUF file`);
        taken[part]! += bytes.length;
        await writers.find((w) => w.part === part)?.writer.write(bytes);
        const known = instance.call(() => loader!.feed(part, bytes), nameOf);
        if (!file.counted) meter.add(from, bytes.length);
        if (known && until === "directory") return;
      }
    };
    const sizes = Float64Array.from(places, ({ file }) => file.size);
    const digest = options.receipts || options.sha256 !== undefined;
    loader = instance.call(({ Loader }) => new Loader(sizes, digest));
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
    const isa = options.isa ?? (isChoice ? instance.call(fasterIsa) : undefined);
    const whole = loader;
    loader = undefined;
    const threads = 1 + (await helping).count;
    // what a build has beside its own must be named
    const session = { ...options.session, ...(isa === "relaxed-i16" && { isa }), threads };
    model = instance.call(() => whole.open(JSON.stringify(session)), nameOf);
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
    if (!isFatal(e)) {
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
