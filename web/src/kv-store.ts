// What pages ask of the KV cache in the origin private file system: the option, and to clear it. The module reads and writes the
// files (host-wasm/src/opfs.rs, page_store.rs).

import { StarlingError } from "./errors.js";
import type { LoadOptions } from "./types.js";

const DIRECTORY = "starling-kv";

/** Bytes of all models by default. */
const DEFAULT_MAX_BYTES = 512 << 20;

/** What `kvCache` asks for. */
export function kvCacheOf(option: LoadOptions["kvCache"]): { maxBytes: number } | undefined {
  const { maxBytes = DEFAULT_MAX_BYTES } = typeof option === "object" ? option : {};
  if (!(typeof maxBytes === "number" && maxBytes >= 0))
    throw new StarlingError("request", `kvCache.maxBytes is ${maxBytes}, expected a number of bytes`);
  return option ? { maxBytes } : undefined;
}

/** Removes the pages of all models that no tab has open; returns the number of bytes. */
export async function clearKvStores(): Promise<number> {
  let removed = 0;
  try {
    const root = await navigator.storage.getDirectory();
    const directory = await root.getDirectoryHandle(DIRECTORY);
    const { values } = directory as unknown as { values(): AsyncIterable<FileSystemFileHandle> };
    for (const handle of await collect(values.call(directory))) {
      const size = (await handle.getFile?.().catch(() => undefined))?.size ?? 0;
      // one that is open in another tab stays
      const isRemoved = await directory.removeEntry(handle.name, { recursive: true }).then(() => true, () => false);
      if (isRemoved) removed += size;
    }
  } catch {
    // there is none
  }
  return removed;
}

/** All values of an iteration, before any of them is removed. */
async function collect<T>(values: AsyncIterable<T>): Promise<T[]> {
  const all: T[] = [];
  for await (const value of values) all.push(value);
  return all;
}
