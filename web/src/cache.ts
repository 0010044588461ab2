// The cache of downloaded files: in the origin private file system, or else in the Cache API.

import { StarlingError } from "./errors.js";
import { BlobBuilder, type Source, parts } from "./source.js";

/** A file in the cache. */
export interface CacheEntry {
  url: string;
  /** Bytes. */
  size: number;
  /** The ETag or Last-Modified of the server. */
  tag?: string | undefined;
  /** SHA-256 in hexadecimal, if it was computed. */
  sha256?: string | undefined;
  /** When it was stored, in milliseconds since 1970. */
  stored: number;
}

/** Storage used and available. */
export interface CacheUsage {
  /** The storage in use; `none` if the runtime has none. */
  storage: "opfs" | "cache-api" | "none";
  /** Bytes of cached models. */
  cached: number;
  /** Bytes that the whole origin uses. */
  usage: number;
  /** Bytes that the whole origin may use. */
  quota: number;
}

/** Writes a file to the cache. It is visible after `commit`, which must run under {@link exclusively}. */
export interface CacheWriter {
  write(bytes: Uint8Array<ArrayBuffer>): Promise<void>;
  commit(entry: CacheEntry): Promise<void>;
  /** Removes the file, committed or not. */
  abort(): Promise<void>;
}

/** A cached file. */
export interface Hit {
  entry: CacheEntry;
  blob: Blob;
}

interface Store {
  readonly storage: "opfs" | "cache-api";
  get(url: string): Promise<Hit | undefined>;
  writer(url: string): Promise<CacheWriter>;
  delete(url: string): Promise<boolean>;
  list(): Promise<CacheEntry[]>;
  clear(): Promise<void>;
}

const NAME = "starling-models";

async function key(url: string): Promise<string> {
  const hash = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(url));
  return Array.from(new Uint8Array(hash), (b) => b.toString(16).padStart(2, "0")).join("");
}

/** `null` in place of a NotFoundError. */
async function orNull<T>(promise: Promise<T>): Promise<T | null> {
  try {
    return await promise;
  } catch (e) {
    if ((e as Error).name === "NotFoundError") return null;
    throw e;
  }
}

/** Runs `work` under a lock that all tabs share. Not reentrant. */
export function exclusively<T>(work: () => Promise<T>, mode: LockMode = "exclusive"): Promise<T> {
  const locks = globalThis.navigator?.locks;
  return locks ? locks.request(NAME, { mode }, work) : work();
}

/** Two files for each entry: HASH.gguf, and HASH.json, which makes it valid. */
class Opfs implements Store {
  readonly storage = "opfs";
  constructor(private readonly directory: FileSystemDirectoryHandle) {}

  /** Reads an entry; `undefined` if a file is missing or has another length than the entry says. */
  async #read(name: string): Promise<Hit | undefined> {
    const json = await orNull(this.directory.getFileHandle(`${name}.json`));
    const file = json && (await orNull(this.directory.getFileHandle(`${name}.gguf`)));
    if (!file) return undefined;
    const blob = await file.getFile();
    try {
      const entry = JSON.parse(await (await json.getFile()).text()) as CacheEntry;
      return blob.size === entry.size ? { entry, blob } : undefined;
    } catch {
      return undefined; // truncated JSON
    }
  }

  /** Removes a file; returns whether it existed. One that another tab is writing stays, without a JSON. */
  async #remove(file: string): Promise<boolean> {
    try {
      return (await orNull(this.directory.removeEntry(file))) !== null;
    } catch (e) {
      if ((e as Error).name === "NoModificationAllowedError") return false;
      throw e;
    }
  }

  async #files(): Promise<string[]> {
    const files = [];
    for await (const file of (this.directory as unknown as { keys(): AsyncIterable<string> }).keys()) files.push(file);
    // JSON files first
    return files.sort((a, b) => Number(b.endsWith(".json")) - Number(a.endsWith(".json")));
  }

  async get(url: string) {
    return this.#read(await key(url));
  }

  async writer(url: string): Promise<CacheWriter> {
    const name = await key(url);
    const file = await this.directory.getFileHandle(`${name}.gguf`, { create: true });
    // writes a temporary file that replaces the target when closed: tabs can do so in parallel
    const stream = await file.createWritable();
    let committed = false;
    return {
      write: (bytes) => stream.write(bytes),
      commit: async (entry) => {
        await this.#remove(`${name}.json`);
        await stream.close();
        const json = await (await this.directory.getFileHandle(`${name}.json`, { create: true })).createWritable();
        await json.write(JSON.stringify(entry));
        await json.close();
        committed = true;
      },
      abort: async () => {
        await stream.abort().catch(() => {});
        await exclusively(async () => {
          if (!committed && (await this.#read(name))) return; // keeps the previous version
          await this.#remove(`${name}.json`);
          await this.#remove(`${name}.gguf`);
        });
      },
    };
  }

  async delete(url: string) {
    const name = await key(url);
    return exclusively(async () => {
      const there = await this.#remove(`${name}.json`);
      await this.#remove(`${name}.gguf`);
      return there;
    });
  }

  /** Lists entries; removes incomplete files, which closed tabs left. */
  async list() {
    return exclusively(async () => {
      const entries: CacheEntry[] = [];
      const whole = new Set<string>();
      for (const file of await this.#files()) {
        const [, name, kind] = /^(.*)\.(json|gguf)$/.exec(file) ?? [];
        if (!name) continue;
        const found = kind === "json" ? await this.#read(name) : undefined;
        if (found) {
          entries.push(found.entry);
          whole.add(name);
        } else if (!whole.has(name)) await this.#remove(file);
      }
      return entries.sort((a, b) => a.stored - b.stored);
    });
  }

  async clear() {
    await exclusively(async () => {
      for (const file of await this.#files()) await this.#remove(file);
    });
  }
}

/** A response for each entry; the entry is in a header. */
class CacheApi implements Store {
  readonly storage = "cache-api";
  constructor(private readonly cache: Cache) {}

  async #at(url: string) {
    return new URL(`/${NAME}/${await key(url)}`, globalThis.location?.origin ?? "https://starling.invalid").href;
  }

  #entry(response: Response): CacheEntry {
    return JSON.parse(decodeURIComponent(response.headers.get("x-entry") ?? "{}")) as CacheEntry;
  }

  async get(url: string) {
    const response = await this.cache.match(await this.#at(url));
    if (!response) return undefined;
    const [entry, blob] = [this.#entry(response), await response.blob()];
    return blob.size === entry.size ? { entry, blob } : undefined;
  }

  async writer(url: string): Promise<CacheWriter> {
    // stored by `commit`: responses cannot be appended to
    let pieces = new BlobBuilder();
    let committed = false;
    return {
      write: async (bytes) => pieces.add(bytes),
      commit: async (entry) => {
        const headers = { "x-entry": encodeURIComponent(JSON.stringify(entry)) };
        await this.cache.put(await this.#at(url), new Response(pieces.blob(), { headers }));
        committed = true;
      },
      abort: async () => {
        pieces = new BlobBuilder();
        if (committed) await this.delete(url);
      },
    };
  }

  async delete(url: string) {
    return this.cache.delete(await this.#at(url));
  }

  async list() {
    const responses = await this.cache.matchAll();
    return responses.map((r) => this.#entry(r)).sort((a, b) => a.stored - b.stored);
  }

  async clear() {
    for (const request of await this.cache.keys()) await this.cache.delete(request);
  }
}

let opened: Promise<Store | undefined> | undefined;

function store(): Promise<Store | undefined> {
  return (opened ??= open());
}

async function open(): Promise<Store | undefined> {
  if (!globalThis.crypto?.subtle) return undefined;
  try {
    const root = await globalThis.navigator?.storage?.getDirectory?.();
    if (root && "createWritable" in FileSystemFileHandle.prototype)
      return new Opfs(await root.getDirectoryHandle(NAME, { create: true }));
  } catch {
    // refused in private windows
  }
  try {
    // servers have a Cache API for HTTP responses, but no location
    if (globalThis.location && globalThis.caches) return new CacheApi(await caches.open(NAME));
  } catch {
    // refused in private windows
  }
  return undefined;
}

/** Looks up files under one lock, so that the parts of a model are of one version. */
export async function cached(urls: string[]): Promise<(Hit | undefined)[]> {
  const here = await store();
  if (!here || urls.length === 0) return urls.map(() => undefined);
  return exclusively(() => Promise.all(urls.map((url) => here.get(url))), "shared");
}

/** Removes the file of a URL; returns whether it existed. */
export const uncache = async (url: string): Promise<boolean> => (await (await store())?.delete(url)) ?? false;

/** Starts to write a file of a model that needs `room` bytes; `undefined` if the runtime has no storage. */
export async function cacheWriter(url: string, size: number, room: number): Promise<CacheWriter | undefined> {
  const here = await store();
  if (!here) return undefined;
  const left = async () => {
    const estimate = await navigator.storage?.estimate?.();
    return (estimate?.quota ?? Infinity) - (estimate?.usage ?? 0);
  };
  let free = await left();
  if (room > free) {
    // removes incomplete files
    await here.list();
    free = await left();
  }
  const full = (cause?: unknown) =>
    new StarlingError(
      "quota",
      `no room to cache ${url}: ${size} bytes${room > size ? `, ${room} with the model's other parts` : ""}, ` +
        `${Math.max(free, 0)} free; evict cached models or load with cache: "none"`,
      { cause },
    );
  if (room > free) throw full();
  const guard = async <T>(work: Promise<T>) => {
    try {
      return await work;
    } catch (e) {
      if ((e as Error).name === "QuotaExceededError") throw full(e);
      throw e;
    }
  };
  const writer = await guard(here.writer(url));
  return {
    write: (bytes) => guard(writer.write(bytes)),
    commit: (entry) => guard(writer.commit(entry)),
    abort: writer.abort,
  };
}

/** The cache of downloaded models. */
export const modelCache = {
  /** Lists cached files, oldest first. */
  list: async (): Promise<CacheEntry[]> => (await (await store())?.list()) ?? [],

  /** Removes the files of a source of `load`; returns whether there were any. */
  evict: async (source: Source): Promise<boolean> => {
    if (!(await store())) return false;
    let found = false;
    for (const part of parts(source, undefined)) if ("url" in part && (await uncache(part.url))) found = true;
    return found;
  },

  /** Removes all files. */
  clear: async (): Promise<void> => (await store())?.clear(),

  /** Storage used and available. */
  usage: async (): Promise<CacheUsage> => {
    const here = await store();
    const estimate = (await globalThis.navigator?.storage?.estimate?.()) ?? {};
    const cached = ((await here?.list()) ?? []).reduce((sum, { size }) => sum + size, 0);
    return { storage: here?.storage ?? "none", cached, usage: estimate.usage ?? 0, quota: estimate.quota ?? 0 };
  },
};
