// Downloaded files kept in the browser: in the origin private file system, else in the Cache API.

import { StarlingError } from "./errors.js";
import { Pieces } from "./source.js";

/** A file in the cache. */
export interface CacheEntry {
  /** Where it came from. */
  url: string;
  /** Bytes. */
  size: number;
  /** The server's ETag, or its date of last change. */
  tag?: string | undefined;
  /** SHA-256 in hexadecimal, where it was computed. */
  sha256?: string | undefined;
  /** When it was stored, in milliseconds since 1970. */
  stored: number;
}

/** What the cache takes and may take. */
export interface CacheUsage {
  /** Which storage is used; `none` where the runtime has none. */
  storage: "opfs" | "cache-api" | "none";
  /** Bytes of cached models. */
  cached: number;
  /** Bytes that the whole origin uses. */
  usage: number;
  /** Bytes that the whole origin may use. */
  quota: number;
}

/** A file on its way into the cache: nothing of it is seen before `commit`. */
export interface CacheWriter {
  write(bytes: Uint8Array<ArrayBuffer>): Promise<void>;
  commit(entry: CacheEntry): Promise<void>;
  abort(): Promise<void>;
}

interface Store {
  readonly storage: "opfs" | "cache-api";
  get(url: string): Promise<{ entry: CacheEntry; blob: Blob } | undefined>;
  writer(url: string): Promise<CacheWriter>;
  delete(url: string): Promise<boolean>;
  list(): Promise<CacheEntry[]>;
}

const NAME = "starling-models";

async function key(url: string): Promise<string> {
  const hash = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(url));
  return Array.from(new Uint8Array(hash), (b) => b.toString(16).padStart(2, "0")).join("");
}

/** `null` for what is not there. */
async function orNull<T>(promise: Promise<T>): Promise<T | null> {
  try {
    return await promise;
  } catch (e) {
    if ((e as Error).name === "NotFoundError") return null;
    throw e;
  }
}

/** Two files an entry: HASH.gguf, and HASH.json, which is written last and removed first. */
class Opfs implements Store {
  readonly storage = "opfs";
  constructor(private readonly directory: FileSystemDirectoryHandle) {}

  async #entry(name: string): Promise<CacheEntry | null> {
    const handle = await orNull(this.directory.getFileHandle(name));
    if (!handle) return null;
    try {
      return JSON.parse(await (await handle.getFile()).text()) as CacheEntry;
    } catch {
      return null; // cut short
    }
  }

  async get(url: string) {
    const name = await key(url);
    const entry = await this.#entry(`${name}.json`);
    const file = entry && (await orNull(this.directory.getFileHandle(`${name}.gguf`)));
    const blob = await file?.getFile();
    // a file of another length is no copy of it
    return entry && blob?.size === entry.size ? { entry, blob } : undefined;
  }

  async writer(url: string): Promise<CacheWriter> {
    const name = await key(url);
    const created = !(await orNull(this.directory.getFileHandle(`${name}.gguf`)));
    const file = await this.directory.getFileHandle(`${name}.gguf`, { create: true });
    // written beside the file, and put in its place when closed: several tabs may do so at once
    const stream = await file.createWritable();
    return {
      write: (bytes) => stream.write(bytes),
      commit: async (entry) => {
        await stream.close();
        const json = await (await this.directory.getFileHandle(`${name}.json`, { create: true })).createWritable();
        await json.write(JSON.stringify(entry));
        await json.close();
      },
      abort: async () => {
        await stream.abort();
        if (created && !(await this.#entry(`${name}.json`))) await orNull(this.directory.removeEntry(`${name}.gguf`));
      },
    };
  }

  async delete(url: string) {
    const name = await key(url);
    const there = (await orNull(this.directory.removeEntry(`${name}.json`))) !== null;
    await orNull(this.directory.removeEntry(`${name}.gguf`));
    return there;
  }

  async list() {
    const entries: CacheEntry[] = [];
    for await (const name of (this.directory as unknown as { keys(): AsyncIterable<string> }).keys()) {
      const entry = name.endsWith(".json") ? await this.#entry(name) : null;
      if (entry) entries.push(entry);
    }
    return entries.sort((a, b) => a.stored - b.stored);
  }
}

/** A response an entry; the entry itself is in a header. */
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
    // put when the file is complete
    let pieces = new Pieces();
    return {
      write: async (bytes) => pieces.add(bytes),
      commit: async (entry) => {
        const headers = { "x-entry": encodeURIComponent(JSON.stringify(entry)) };
        await this.cache.put(await this.#at(url), new Response(pieces.blob(), { headers }));
      },
      abort: async () => {
        pieces = new Pieces();
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
}

let opened: Promise<Store | undefined> | undefined;

/** The store of this origin, if there is one. */
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
    // a private window may refuse
  }
  try {
    // not in runtimes whose Cache API is for servers
    if (globalThis.location && globalThis.caches) return new CacheApi(await caches.open(NAME));
  } catch {
    // so it may here
  }
  return undefined;
}

/** A file of the cache. */
export async function cached(url: string): Promise<{ entry: CacheEntry; blob: Blob } | undefined> {
  return (await store())?.get(url);
}

/** Starts to write a file; undefined where the runtime has no storage. */
export async function cacheWriter(url: string, size: number): Promise<CacheWriter | undefined> {
  const here = await store();
  if (!here) return undefined;
  const estimate = await navigator.storage?.estimate?.();
  const free = (estimate?.quota ?? Infinity) - (estimate?.usage ?? 0);
  const full = (cause?: unknown) =>
    new StarlingError(
      "quota",
      `no room to cache ${url}: ${size} bytes, ${Math.max(free, 0)} free; evict cached models or load with cache: "none"`,
      { cause },
    );
  if (size > free) throw full();
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

/** The models that were downloaded before. */
export const modelCache = {
  /** All cached files, the oldest first. */
  list: async (): Promise<CacheEntry[]> => (await (await store())?.list()) ?? [],

  /** Removes the file of a URL; says whether it was there. */
  evict: async (url: string): Promise<boolean> => (await (await store())?.delete(url)) ?? false,

  /** Removes all files. */
  clear: async (): Promise<void> => {
    const here = await store();
    for (const { url } of (await here?.list()) ?? []) await here?.delete(url);
  },

  /** What is used, and what may be. */
  usage: async (): Promise<CacheUsage> => {
    const here = await store();
    const estimate = (await globalThis.navigator?.storage?.estimate?.()) ?? {};
    const cached = ((await here?.list()) ?? []).reduce((sum, { size }) => sum + size, 0);
    return { storage: here?.storage ?? "none", cached, usage: estimate.usage ?? 0, quota: estimate.quota ?? 0 };
  },
};
