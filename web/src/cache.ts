// Downloaded files kept in the browser: in the origin private file system, else in the Cache API.

import { StarlingError } from "./errors.js";
import { Pieces, type Source, parts } from "./source.js";

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

/** A file on its way into the cache: nothing of it is seen before `commit`, which {@link exclusively} has to surround. */
export interface CacheWriter {
  write(bytes: Uint8Array<ArrayBuffer>): Promise<void>;
  commit(entry: CacheEntry): Promise<void>;
  /** Leaves nothing of it, whether it was committed or not. */
  abort(): Promise<void>;
}

/** A file that is there. */
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

/** `null` for what is not there. */
async function orNull<T>(promise: Promise<T>): Promise<T | null> {
  try {
    return await promise;
  } catch (e) {
    if ((e as Error).name === "NotFoundError") return null;
    throw e;
  }
}

/** Runs work while no other tab does; not inside of such work. */
export function exclusively<T>(work: () => Promise<T>, mode: LockMode = "exclusive"): Promise<T> {
  const locks = globalThis.navigator?.locks;
  return locks ? locks.request(NAME, { mode }, work) : work();
}

/** Two files an entry: HASH.gguf, and HASH.json, without which the other counts for nothing. */
class Opfs implements Store {
  readonly storage = "opfs";
  constructor(private readonly directory: FileSystemDirectoryHandle) {}

  /** What belongs together, if it does: a file of another length is no copy. */
  async #read(name: string): Promise<Hit | undefined> {
    const json = await orNull(this.directory.getFileHandle(`${name}.json`));
    const file = json && (await orNull(this.directory.getFileHandle(`${name}.gguf`)));
    if (!file) return undefined;
    const blob = await file.getFile();
    try {
      const entry = JSON.parse(await (await json.getFile()).text()) as CacheEntry;
      return blob.size === entry.size ? { entry, blob } : undefined;
    } catch {
      return undefined; // cut short
    }
  }

  /** Removes a file; says whether it was there. One that another tab is writing stays, without a JSON. */
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
    // JSONs first
    return files.sort((a, b) => Number(b.endsWith(".json")) - Number(a.endsWith(".json")));
  }

  async get(url: string) {
    return this.#read(await key(url));
  }

  async writer(url: string): Promise<CacheWriter> {
    const name = await key(url);
    const file = await this.directory.getFileHandle(`${name}.gguf`, { create: true });
    // written beside the file, and put in its place when closed: several tabs may do so at once
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
          if (!committed && (await this.#read(name))) return; // there was one before
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

  /** Removes on its way what a tab has left that ended before its time. */
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
    let committed = false;
    return {
      write: async (bytes) => pieces.add(bytes),
      commit: async (entry) => {
        const headers = { "x-entry": encodeURIComponent(JSON.stringify(entry)) };
        await this.cache.put(await this.#at(url), new Response(pieces.blob(), { headers }));
        committed = true;
      },
      abort: async () => {
        pieces = new Pieces();
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

/** Files of the cache as they are at one time, so that parts of a model belong together. */
export async function cached(urls: string[]): Promise<(Hit | undefined)[]> {
  const here = await store();
  if (!here || urls.length === 0) return urls.map(() => undefined);
  return exclusively(() => Promise.all(urls.map((url) => here.get(url))), "shared");
}

/** Removes the file of exactly this URL; says whether it was there. */
export const uncache = async (url: string): Promise<boolean> => (await (await store())?.delete(url)) ?? false;

/** Starts to write a file, of some that need `room` bytes together; undefined where the runtime has no storage. */
export async function cacheWriter(url: string, size: number, room: number): Promise<CacheWriter | undefined> {
  const here = await store();
  if (!here) return undefined;
  const left = async () => {
    const estimate = await navigator.storage?.estimate?.();
    return (estimate?.quota ?? Infinity) - (estimate?.usage ?? 0);
  };
  let free = await left();
  if (room > free) {
    // what tabs have left that ended before their time goes first
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

/** The models that were downloaded before. */
export const modelCache = {
  /** All cached files, the oldest first. */
  list: async (): Promise<CacheEntry[]> => (await (await store())?.list()) ?? [],

  /** Removes what was downloaded for a source, as it was given to `load`; says whether anything was there. */
  evict: async (source: Source): Promise<boolean> => {
    if (!(await store())) return false;
    let found = false;
    for (const part of parts(source, undefined)) if ("url" in part && (await uncache(part.url))) found = true;
    return found;
  },

  /** Removes all files. */
  clear: async (): Promise<void> => (await store())?.clear(),

  /** What is used, and what may be. */
  usage: async (): Promise<CacheUsage> => {
    const here = await store();
    const estimate = (await globalThis.navigator?.storage?.estimate?.()) ?? {};
    const cached = ((await here?.list()) ?? []).reduce((sum, { size }) => sum + size, 0);
    return { storage: here?.storage ?? "none", cached, usage: estimate.usage ?? 0, quota: estimate.quota ?? 0 };
  },
};
