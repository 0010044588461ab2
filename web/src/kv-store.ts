// KV pages in the origin private file system, so that a conversation goes on after a reload without computing its prompt again.
//
// A cache: it may be lost, is never trusted (the module checks each page), and a failure only turns it off. One file for each
// model and KV type, of slots of equal size, which one tab at a time holds open:
//
// | bytes | content |
// |---|---|
// | 32 | key of the page; zeros if the slot is empty |
// | 8 | turn in which it was used last, f64 little-endian |
// | `page_bytes` | the page, as the module exports it, with a checksum |

import { StarlingError } from "./errors.js";
import { hex } from "./hex.js";
import type { LoadOptions } from "./types.js";

/** What came of a page that was read: the module has it, refused it, or has no room for it. */
export type Taken = "imported" | "refused" | "full";

const DIRECTORY = "starling-kv";
const KEY_BYTES = 32;
const HEADER_BYTES = KEY_BYTES + 8;
/** Offset of the position in an exported page: u64 little-endian. */
const POSITION_OFFSET = 68;
/** Milliseconds to wait for another tab, or for the page before a reload, to close the file. */
const LOCK_WAIT_MS = 1000;

/** A handle of the file system, with the methods that TypeScript's library has for workers only. */
interface SyncAccessHandle {
  read(into: Uint8Array, options: { at: number }): number;
  write(bytes: Uint8Array, options: { at: number }): number;
  getSize(): number;
  truncate(size: number): void;
  close(): void;
}

type FileHandle = FileSystemFileHandle & { createSyncAccessHandle(): Promise<SyncAccessHandle> };
type Directory = FileSystemDirectoryHandle & { entries(): AsyncIterable<[string, FileSystemHandle]> };

/** Bytes of all models by default. */
const DEFAULT_MAX_BYTES = 512 << 20;

/** What `kvCache` asks for. */
export function kvCacheOf(option: LoadOptions["kvCache"]): { maxBytes: number } | undefined {
  const { maxBytes = DEFAULT_MAX_BYTES } = typeof option === "object" ? option : {};
  if (!(typeof maxBytes === "number" && maxBytes >= 0))
    throw new StarlingError("request", `kvCache.maxBytes is ${maxBytes}, expected a number of bytes`);
  return option ? { maxBytes } : undefined;
}

/** What the pages of a model have in common: a digest in hexadecimal, and their size. */
export interface PageFormat {
  namespace: string;
  page_bytes: number;
  /** Slots of a snapshot of recurrent states; 0 for a model without recurrent layers. */
  snapshot_records: number;
}

interface Slot {
  key: string;
  turn: number;
  position: number;
}

async function directory(create: boolean): Promise<Directory> {
  const root = await navigator.storage.getDirectory();
  return (await root.getDirectoryHandle(DIRECTORY, { create })) as Directory;
}

/** Removes the pages of all models that no tab has open; returns the number of bytes. */
export async function clearKvStores(): Promise<number> {
  let removed = 0;
  try {
    const all = await directory(false);
    for (const { name, size } of await filesOf(all)) if (await remove(all, name)) removed += size;
  } catch {
    // there is none
  }
  return removed;
}

async function remove(from: Directory, name: string): Promise<boolean> {
  try {
    await from.removeEntry(name, { recursive: true });
    return true;
  } catch {
    return false; // open in another tab
  }
}

interface StoredFile {
  name: string;
  size: number;
  modified: number;
}

/** The files of all models; removes what is none. */
async function filesOf(all: Directory): Promise<StoredFile[]> {
  const files: StoredFile[] = [];
  for await (const [name, handle] of all.entries()) {
    const file = handle.kind === "file" ? await (handle as FileSystemFileHandle).getFile().catch(() => undefined) : undefined;
    if (file && /^[0-9a-f]{64}\.pages$/.test(name)) files.push({ name, size: file.size, modified: file.lastModified });
    else await remove(all, name);
  }
  return files;
}

/** Runs `use` under the lock of a file, for as long as its promise; `undefined` if another tab holds it. */
async function lock(name: string, held: Promise<void>): Promise<boolean> {
  const locks = globalThis.navigator?.locks;
  if (!locks) return true;
  return new Promise((resolve) => {
    const signal = AbortSignal.timeout(LOCK_WAIT_MS);
    const granted = () => {
      resolve(true);
      return held;
    };
    locks.request(`${DIRECTORY}/${name}`, { signal }, granted).catch(() => resolve(false));
  });
}

/** The pages of one model. */
export class KvStore {
  #file: SyncAccessHandle;
  #release: () => void;
  #slotBytes: number;
  #maxSlots: number;
  /** By index in the file; `undefined` where empty. */
  #slots: (Slot | undefined)[] = [];
  #bySlotKey = new Map<string, number>();
  #turn = 0;
  /** Pages that the module refused. */
  refused = 0;
  /** Whether the model continues only from snapshots ({@link KvStore.resumable}). */
  readonly hasSnapshots: boolean;

  private constructor(file: SyncAccessHandle, release: () => void, format: PageFormat, maxBytes: number) {
    this.#file = file;
    this.#release = release;
    this.#slotBytes = HEADER_BYTES + format.page_bytes;
    this.hasSnapshots = format.snapshot_records > 0;
    this.#maxSlots = Math.floor(maxBytes / this.#slotBytes);
    this.#scan();
  }

  /**
   * Opens the pages of a model, and removes those of others, least recently used first, where all together exceed `maxBytes`.
   * `undefined` where there is no such storage, or another tab uses it.
   */
  static async open(format: PageFormat, maxBytes: number): Promise<KvStore | undefined> {
    const { namespace, page_bytes } = format;
    const name = `${namespace}.pages`;
    let release = () => {};
    let file: SyncAccessHandle | undefined;
    try {
      if (HEADER_BYTES + page_bytes > maxBytes) return undefined;
      const all = await directory(true);
      const held = new Promise<void>((resolve) => (release = resolve));
      if (!(await lock(name, held))) return undefined;
      const handle = (await all.getFileHandle(name, { create: true })) as FileHandle;
      file = await handle.createSyncAccessHandle();
      const others = (await filesOf(all)).filter((other) => other.name !== name);
      // the pages of other models have what this one leaves, at most a half
      let room = maxBytes - Math.max(maxBytes / 2, file.getSize());
      let kept = 0;
      for (const { name, size } of others.sort((a, b) => b.modified - a.modified)) {
        if (size > room && (await remove(all, name))) continue;
        room -= size;
        kept += size;
      }
      return new KvStore(file, release, format, Math.max(maxBytes - kept, HEADER_BYTES + page_bytes));
    } catch {
      // no such storage: private windows, runtimes without it, threads that may not wait
      file?.close();
      release();
      return undefined;
    }
  }

  #scan(): void {
    const whole = Math.floor(this.#file.getSize() / this.#slotBytes);
    const n = Math.min(whole, this.#maxSlots);
    if (this.#file.getSize() !== n * this.#slotBytes) this.#file.truncate(n * this.#slotBytes);
    const head = new Uint8Array(HEADER_BYTES + POSITION_OFFSET + 8);
    const view = new DataView(head.buffer);
    for (let i = 0; i < n; i++) {
      const isWhole = this.#file.read(head, { at: i * this.#slotBytes }) === head.length;
      const turn = view.getFloat64(KEY_BYTES, true);
      const key = hex(head.subarray(0, KEY_BYTES));
      const isValid = isWhole && Number.isSafeInteger(turn) && turn >= 0 && /[^0]/.test(key) && !this.#bySlotKey.has(key);
      const position = Number(view.getBigUint64(HEADER_BYTES + POSITION_OFFSET, true));
      this.#slots.push(isValid ? { key, turn, position } : undefined);
      if (!isValid) continue;
      this.#bySlotKey.set(key, i);
      this.#turn = Math.max(this.#turn, turn + 1);
    }
  }

  /** Bytes of the file. */
  get bytes(): number {
    return this.#slots.length * this.#slotBytes;
  }

  /** Number of leading keys whose slots are there. */
  known(keys: Uint8Array): number {
    let n = 0;
    while ((n + 1) * KEY_BYTES <= keys.length && this.#bySlotKey.has(hex(keys.subarray(n * KEY_BYTES, (n + 1) * KEY_BYTES)))) n += 1;
    return n;
  }

  /**
   * Keys of leading pages, and of the snapshot after the last of them: a model with recurrent layers continues only from a
   * snapshot. `snapshotKeys` returns the keys of the snapshot after a page. Empty if there is no whole snapshot.
   */
  resumable(keys: Uint8Array, snapshotKeys: (page: Uint8Array) => Uint8Array): Uint8Array {
    for (let n = this.known(keys); n > 0; n--) {
      const pages = keys.subarray(0, n * KEY_BYTES);
      const snapshot = snapshotKeys(pages.subarray(-KEY_BYTES));
      if (this.known(snapshot) * KEY_BYTES < snapshot.length) continue;
      const all = new Uint8Array(pages.length + snapshot.length);
      all.set(pages);
      all.set(snapshot, pages.length);
      return all;
    }
    return new Uint8Array();
  }

  /**
   * Reads pages by their keys, in order, until one is missing. `take` imports a page; one that is refused is removed.
   */
  restore(keys: Uint8Array, take: (page: Uint8Array) => Taken): void {
    this.#turn += 1;
    const page = new Uint8Array(this.#slotBytes - HEADER_BYTES);
    for (let at = 0; at < keys.length; at += KEY_BYTES) {
      const i = this.#bySlotKey.get(hex(keys.subarray(at, at + KEY_BYTES)));
      if (i === undefined) return;
      const isRead = this.#file.read(page, { at: i * this.#slotBytes + HEADER_BYTES }) === page.length;
      const taken = isRead ? take(page) : "refused";
      if (taken === "full") return;
      if (taken === "refused") {
        this.refused += 1;
        return this.#empty(i);
      }
      this.#touch(i);
    }
  }

  /** Stores a page after its key, in place of the one that was used least recently if there is no room. */
  put(keyAndPage: Uint8Array): void {
    if (keyAndPage.length !== this.#slotBytes - 8) return;
    const key = hex(keyAndPage.subarray(0, KEY_BYTES));
    const known = this.#bySlotKey.get(key);
    if (known !== undefined) return this.#touch(known);
    const view = new DataView(keyAndPage.buffer, keyAndPage.byteOffset);
    const position = Number(view.getBigUint64(KEY_BYTES + POSITION_OFFSET, true));
    const slot = new Uint8Array(this.#slotBytes);
    slot.set(keyAndPage.subarray(0, KEY_BYTES));
    new DataView(slot.buffer).setFloat64(KEY_BYTES, this.#turn, true);
    slot.set(keyAndPage.subarray(KEY_BYTES), HEADER_BYTES);
    const i = this.#room();
    if (!this.#write(slot, i)) return;
    const before = this.#slots[i];
    if (before) this.#bySlotKey.delete(before.key);
    this.#slots[i] = { key, turn: this.#turn, position };
    this.#bySlotKey.set(key, i);
  }

  /** Writes a slot; returns whether there was room. */
  #write(slot: Uint8Array, i: number): boolean {
    try {
      if (this.#file.write(slot, { at: i * this.#slotBytes }) === slot.length) return true;
    } catch (e) {
      if ((e as Error).name !== "QuotaExceededError") throw e;
    }
    if (i < this.#slots.length) throw new Error("a page could not be written");
    // the origin's quota ends here
    this.#maxSlots = this.#slots.length;
    return false;
  }

  /** A slot for a new page. Of pages used in the same turn the last of a conversation goes first: those before it stay usable. */
  #room(): number {
    const free = this.#slots.indexOf(undefined);
    if (free >= 0) return free;
    if (this.#slots.length < this.#maxSlots || this.#slots.length === 0) return this.#slots.length;
    const isOlder = (a: Slot, b: Slot) => a.turn < b.turn || (a.turn === b.turn && a.position > b.position);
    return this.#slots.reduce((oldest, slot, i) => (isOlder(slot!, this.#slots[oldest]!) ? i : oldest), 0);
  }

  #touch(i: number): void {
    const slot = this.#slots[i];
    if (!slot || slot.turn === this.#turn) return;
    slot.turn = this.#turn;
    const turn = new Uint8Array(8);
    new DataView(turn.buffer).setFloat64(0, this.#turn, true);
    this.#file.write(turn, { at: i * this.#slotBytes + KEY_BYTES });
  }

  #empty(i: number): void {
    const slot = this.#slots[i];
    if (slot) this.#bySlotKey.delete(slot.key);
    this.#slots[i] = undefined;
    this.#file.write(new Uint8Array(KEY_BYTES), { at: i * this.#slotBytes });
  }

  /** Removes all pages. */
  clear(): void {
    this.#file.truncate(0);
    this.#slots = [];
    this.#bySlotKey.clear();
  }

  close(): void {
    this.#file.close();
    this.#release();
  }
}
