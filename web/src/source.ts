// Model sources: each becomes files of known length that can be opened at any byte offset.

import { StarlingError } from "./errors.js";
import { absolute, localFile } from "./features.js";
import { builtin, fileUrl } from "./runtime.js";
import { pause, unlessAborted } from "./signal.js";

/**
 * A model: the URL of a GGUF file (in Node, Deno and Bun also a path), `hf:owner/repo/file.gguf` or
 * `hf:owner/repo@revision/file.gguf`, a `File` or `Blob`, bytes, a stream of bytes, or a handle of `node:fs/promises`; or an array of URLs or files, the parts of a split model in order. The URL of the first part
 * (`…-00001-of-00003.gguf`) stands for all.
 */
export type Source =
  | string
  | URL
  | Blob
  | ArrayBuffer
  | Uint8Array
  | ReadableStream<Uint8Array<ArrayBuffer>>
  | FileHandle
  | (string | URL | Blob)[];

/** A file that `open` of `node:fs/promises` returns. It must stay open until the model is loaded. */
export interface FileHandle {
  readonly fd: number;
  read(buffer: Uint8Array, offset: number, length: number, position: number): Promise<{ bytesRead: number }>;
}

type Bytes = Uint8Array<ArrayBuffer>;

/** A file of a source, in a form that can be posted to a worker. */
export type Part =
  | { url: string }
  | { blob: Blob }
  | { bytes: Uint8Array<ArrayBuffer> }
  | { stream: ReadableStream<Uint8Array<ArrayBuffer>>; size: number | undefined };

/** The files of a source, with absolute URLs. */
export function parts(source: Source, size: number | undefined): Part[] {
  if (Array.isArray(source)) {
    if (source.length === 0) throw new StarlingError("request", "the list of files is empty");
    return source.map((s) => (s instanceof Blob ? { blob: s } : { url: absoluteUrl(s) }));
  }
  if (source instanceof Blob) return [{ blob: source }];
  if (source instanceof ArrayBuffer) return [{ bytes: new Uint8Array(source) }];
  // a copy of shared memory, which other threads may write
  if (source instanceof Uint8Array)
    return [{ bytes: source.buffer instanceof ArrayBuffer ? (source as Bytes) : new Uint8Array(source) }];
  if (source instanceof ReadableStream) return [{ stream: source, size }];
  if (isFileHandle(source)) return [handlePart(source)];
  return shardUrls(absoluteUrl(source)).map((url) => ({ url }));
}

const isFileHandle = (source: object | string): source is FileHandle =>
  typeof source === "object" && typeof (source as FileHandle).fd === "number";

/** A file of Node as a stream, which can be posted to a worker. */
function handlePart(handle: FileHandle): StreamPart {
  const size = builtin("node:fs")?.fstatSync(handle.fd).size;
  let from = 0;
  const stream = new ReadableStream<Bytes>({
    async pull(controller) {
      const bytes = new Uint8Array(CHUNK_BYTES);
      const { bytesRead } = await handle.read(bytes, 0, bytes.length, from);
      if (bytesRead === 0) return controller.close();
      from += bytesRead;
      controller.enqueue(bytes.subarray(0, bytesRead));
    },
  });
  return { stream, size };
}

function absoluteUrl(url: string | URL): string {
  const text = String(url);
  if (/^hf:/i.test(text)) return hubUrl(text);
  const file = typeof url === "string" ? fileUrl(url) : undefined;
  return (file ?? absolute(url)).href;
}

function hubUrl(source: string): string {
  const hub = /^hf:([^/]+)\/([^/@]+)(?:@([^/]+))?\/(.+)$/i.exec(source);
  if (!hub)
    throw new StarlingError("request", `"${source}": expected hf:owner/repo/file.gguf or hf:owner/repo@revision/file.gguf`);
  return `https://huggingface.co/${hub[1]}/${hub[2]}/resolve/${hub[3] ?? "main"}/${hub[4]}`;
}

/** The URLs of all files of a split model, from that of the first. */
function shardUrls(url: string): string[] {
  const first = /^(.*-)00001-of-(\d{5})(\.gguf(?:[?#].*)?)$/.exec(url);
  if (!first) return [url];
  return Array.from(
    { length: Number(first[2]) },
    (_, i) => `${first[1]}${String(i + 1).padStart(5, "0")}-of-${first[2]}${first[3]}`,
  );
}

/** A file that can be opened at any byte offset. */
export interface SourceFile {
  /** Name in error messages. */
  name: string;
  size: number;
  /** Version: the ETag or Last-Modified of the server. */
  tag: string | undefined;
  /** Streams the bytes from an offset. */
  open(from: number, signal?: AbortSignal): Promise<ReadableStream<Uint8Array<ArrayBuffer>>>;
  /** Whether a failed read is retried. */
  remote: boolean;
  /** Whether its streams are the runtime's own: those of others may leave a read to a buffer unanswered at their end. */
  owned?: boolean;
  /** Whether its bytes were counted while it was read to learn its length. */
  counted?: boolean;
}

/** Called with the bytes read of a file of unknown length; throws if it becomes too large. */
export type Count = (bytes: number) => void;

export const blobFile = (blob: Blob, name = (blob as File).name ?? "blob"): SourceFile => ({
  name,
  size: blob.size,
  tag: undefined,
  open: async (from) => (from === 0 ? blob : blob.slice(from)).stream(),
  remote: false,
  owned: true,
});

const CHUNK_BYTES = 1 << 20;

/** Streams bytes from an offset, in chunks that `chunk` makes. */
function streamOf(bytes: Bytes, from: number, chunk: (first: number, end: number) => Bytes): ReadableStream<Bytes> {
  return new ReadableStream({
    pull(controller) {
      if (from >= bytes.length) return controller.close();
      controller.enqueue(chunk(from, from + CHUNK_BYTES));
      from += CHUNK_BYTES;
    },
  });
}

function bytesFile(bytes: Bytes): SourceFile {
  const open = async (from: number) => streamOf(bytes, from, (first, end) => bytes.subarray(first, end));
  return { name: "bytes", size: bytes.length, tag: undefined, open, remote: false };
}

/** Bytes as a transferable stream: posting a view would copy its whole buffer. */
export const transferable = (bytes: Bytes): StreamPart => ({
  stream: streamOf(bytes, 0, (first, end) => bytes.slice(first, end)),
  size: bytes.length,
});

/** Collects bytes in a blob, which a browser may keep on disk. */
export class BlobBuilder {
  #blob = new Blob([]);
  #last: Blob[] = [];

  add(bytes: Uint8Array<ArrayBuffer>): void {
    if (this.#last.push(new Blob([bytes])) === 64) this.#blob = this.blob();
  }

  blob(): Blob {
    const blob = new Blob([this.#blob, ...this.#last]);
    this.#last = [];
    return (this.#blob = blob);
  }
}

/** Reads a whole file. */
async function readAll(file: SourceFile, signal: AbortSignal | undefined, count: Count): Promise<Blob> {
  const pieces = new BlobBuilder();
  const sink: ByteSink = {
    write(bytes) {
      count(bytes.length);
      pieces.add(bytes);
    },
  };
  await read(file, 0, signal, sink, async (stream, sink) => {
    const reader = stream.getReader();
    try {
      for (;;) {
        const { done, value } = await unlessAborted(reader.read(), signal);
        if (done) return false;
        await sink.write(value);
      }
    } finally {
      // not awaited: a source may never settle
      void reader.cancel().catch(() => {});
    }
  });
  return pieces.blob();
}

/** Reads a file of unknown length, which the module must know before the first byte. */
async function buffered(file: SourceFile, signal: AbortSignal | undefined, count: Count): Promise<SourceFile> {
  return { ...blobFile(await readAll(file, signal, count), file.name), tag: file.tag, counted: true };
}

type StreamPart = Extract<Part, { stream: unknown }>;

function streamFile({ stream, size }: StreamPart): SourceFile {
  let opened = false;
  const open = async (from: number) => {
    if (opened || from !== 0) throw new StarlingError("network", "a stream cannot be read twice");
    opened = true;
    return stream;
  };
  return { name: "stream", size: size ?? Infinity, tag: undefined, open, remote: false };
}

/** Reads a stream to a blob, for browsers that cannot transfer streams. */
export async function readToBlob(part: StreamPart, signal: AbortSignal | undefined, count: Count): Promise<Part> {
  return { blob: await readAll(streamFile({ ...part, size: undefined }), signal, count) };
}

/** Opens a file that is not cached; `readsNow` says that reading starts at once. */
export async function openPart(
  part: Part,
  headers: Record<string, string>,
  signal: AbortSignal | undefined,
  count: Count,
  readsNow = true,
): Promise<SourceFile> {
  if ("blob" in part) return blobFile(part.blob);
  if ("bytes" in part) return bytesFile(part.bytes);
  if ("stream" in part) return part.size === undefined ? buffered(streamFile(part), signal, count) : streamFile(part);
  const file = await localFile(new URL(part.url));
  return file ? blobFile(file, part.url) : remoteFile(part.url, headers, signal, count, readsNow);
}

/** The version of a file. Servers mark the ETag of a compressed response as weak or with a suffix. */
const tagOf = ({ headers }: Response) =>
  headers
    .get("etag")
    ?.replace(/^W\//, "")
    .replace(/[-;](gzip|br|zstd|deflate)"$/, '"') ??
  headers.get("last-modified") ??
  undefined;

/** Length of the file, if the server sends it; that of a compressed response is another. */
function sizeOf({ headers }: Response): number | undefined {
  if (headers.has("content-encoding")) return undefined;
  const size = /\/(\d+)$/.exec(headers.get("content-range") ?? "")?.[1] ?? headers.get("content-length");
  return size === null ? undefined : Number(size);
}

/** Whether a URL is cross-origin: browsers show the length of such a response, but not whether it was compressed. */
const isCrossOrigin = (url: string) => globalThis.location !== undefined && new URL(url).origin !== location.origin;

/** A range request from an offset; browsers ask for ranges without compression. */
const rangeFrom = (from: number) => ({ range: `bytes=${from}-` });

/** Version and length of a file, to compare with a cached copy; `undefined` if the server cannot be reached. */
export async function remoteTag(
  url: string,
  headers: Record<string, string>,
  signal: AbortSignal | undefined,
): Promise<{ tag: string | undefined; size: number | undefined } | undefined> {
  try {
    const requestHeaders = { ...headers, ...(isCrossOrigin(url) && rangeFrom(0)) };
    const response = await fetch(url, { method: "HEAD", cache: "no-cache", headers: requestHeaders, signal: signal ?? null });
    return response.ok ? { tag: tagOf(response), size: sizeOf(response) } : undefined;
  } catch (e) {
    signal?.throwIfAborted();
    return undefined;
  }
}

/** Bypasses the HTTP cache, which may have another version and would keep a second copy. Not all runtimes have the option. */
const NO_STORE: RequestInit = "cache" in Request.prototype ? { cache: "no-store" } : {};

async function request(
  url: string,
  more: Record<string, string>,
  from: number,
  signal: AbortSignal | undefined,
  isPart = from > 0,
): Promise<Response> {
  let response;
  try {
    const headers = { ...more, ...(isPart && rangeFrom(from)) };
    response = await fetch(url, { ...NO_STORE, headers, signal: signal ?? null });
  } catch (e) {
    signal?.throwIfAborted();
    throw new StarlingError("network", `${url}: ${(e as Error).message}`, { cause: e });
  }
  if (!response.ok || !response.body) {
    await response.body?.cancel();
    throw new StarlingError("network", `${url}: ${response.status} ${response.statusText}`);
  }
  return response;
}

/** Requests a file from its beginning, in a way that shows its length if the server allows it. */
async function requestStart(
  url: string,
  headers: Record<string, string>,
  signal: AbortSignal | undefined,
): Promise<Response> {
  const uncompressed = isCrossOrigin(url) && (await request(url, headers, 0, signal, true).catch(() => undefined));
  signal?.throwIfAborted();
  if (uncompressed) return uncompressed;
  const first = await request(url, headers, 0, signal);
  return sizeOf(first) === undefined ? requestWithLength(url, headers, signal, first) : first;
}

/** Requests the file again as a range, for which most servers send a length; returns `first` if that is no better. */
async function requestWithLength(
  url: string,
  headers: Record<string, string>,
  signal: AbortSignal | undefined,
  first: Response,
): Promise<Response> {
  let second;
  try {
    second = await request(url, headers, 0, signal, true);
  } catch {
    signal?.throwIfAborted();
    return first;
  }
  const better = sizeOf(second) !== undefined;
  await (better ? first : second).body!.cancel();
  return better ? second : first;
}

async function remoteFile(
  url: string,
  headers: Record<string, string>,
  signal: AbortSignal | undefined,
  count: Count,
  readsNow: boolean,
): Promise<SourceFile> {
  let first: Response | undefined = await requestStart(url, headers, signal);
  const [size, tag] = [sizeOf(first), tagOf(first)];
  if (!readsNow && size !== undefined) {
    // browsers limit connections to a server: frees this one until it is read
    await first.body!.cancel();
    first = undefined;
  }

  const open = async (from: number, signal?: AbortSignal) => {
    const response = first && from === 0 ? first : await request(url, headers, from, signal);
    first = undefined;
    if (tagOf(response) !== tag) {
      await response.body!.cancel();
      throw new StarlingError("checksum", `${url}: changed while it was downloaded`);
    }
    // a server may ignore the range
    return from > 0 && response.status !== 206 ? skip(response.body!, from) : response.body!;
  };
  const file = { name: url, size: size ?? Infinity, tag, open, remote: true, owned: true };
  return size === undefined ? buffered(file, signal, count) : file;
}

function skip(stream: ReadableStream<Uint8Array<ArrayBuffer>>, bytes: number): ReadableStream<Uint8Array<ArrayBuffer>> {
  const transform = new TransformStream<Uint8Array<ArrayBuffer>, Uint8Array<ArrayBuffer>>({
    transform(chunk, controller) {
      const rest = chunk.subarray(Math.min(bytes, chunk.length));
      bytes -= chunk.length - rest.length;
      if (rest.length > 0) controller.enqueue(rest);
    },
  });
  return stream.pipeThrough(transform);
}

/** Attempts without a byte before a read fails. */
const MAX_ATTEMPTS = 5;

/** Takes the chunks of a stream, each valid until `write` has returned or its promise has resolved. */
export interface ByteSink {
  write(bytes: Bytes): void | Promise<void>;
}

/** Moves the bytes of a stream to a sink; returns whether it needs no more of the file. */
type Pump = (stream: ReadableStream<Bytes>, sink: ByteSink) => Promise<boolean>;

/**
 * Streams that are read, so that they are not collected: when nothing but its pending read refers to a blob's stream, Chromium
 * 156 may collect it, and the read never settles.
 */
const reading = new Set<ReadableStream>();

/** Reads a file from an offset. A broken connection is resumed where it broke; an error of the sink is thrown as it is. */
export async function read(file: SourceFile, from: number, signal: AbortSignal | undefined, sink: ByteSink, pump: Pump): Promise<void> {
  let failures = 0;
  let refused: unknown;
  const counting: ByteSink = {
    async write(bytes) {
      failures = 0;
      from += bytes.length;
      try {
        await sink.write(bytes);
      } catch (e) {
        refused = e;
        throw e;
      }
    },
  };
  const soFar = () => `${from}${file.size === Infinity ? "" : ` of ${file.size}`} bytes`;
  while (from < file.size) {
    signal?.throwIfAborted();
    let stream: ReadableStream<Bytes> | undefined;
    try {
      stream = await file.open(from, signal);
      reading.add(stream);
      if (await pump(stream, counting)) return;
      // the module reports a file that is too short
      if (from >= file.size || file.size === Infinity || !file.remote) return;
      throw new StarlingError("network", `${file.name}: the connection ended after ${soFar()}`);
    } catch (e) {
      signal?.throwIfAborted();
      failures += 1;
      if (e === refused || (e instanceof StarlingError && e.code !== "network")) throw e;
      if (!file.remote || failures === MAX_ATTEMPTS) {
        if (e instanceof StarlingError) throw e;
        throw new StarlingError("network", `${file.name}: the connection broke after ${soFar()}: ${(e as Error).message}`, {
          cause: e,
        });
      }
      await pause(100 * 2 ** failures, signal);
    } finally {
      if (stream) reading.delete(stream);
    }
  }
}
