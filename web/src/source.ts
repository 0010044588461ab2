// Where models come from: every source becomes files of known length that can be opened at any byte.

import { StarlingError } from "./errors.js";
import { absolute, localFile } from "./features.js";
import { pause, unlessAborted } from "./signal.js";

/**
 * A model: the URL of a GGUF file, `hf:owner/repo/file.gguf` or `hf:owner/repo@revision/file.gguf`, a `File` or `Blob`,
 * bytes, or a stream of bytes; or an array of URLs or files, the parts of a split model in order. The URL of the first part
 * (`…-00001-of-00003.gguf`) stands for all.
 */
export type Source =
  | string
  | URL
  | Blob
  | ArrayBuffer
  | Uint8Array
  | ReadableStream<Uint8Array<ArrayBuffer>>
  | (string | URL | Blob)[];

type Bytes = Uint8Array<ArrayBuffer>;

/** A source as it crosses to a worker. */
export type Part =
  | { url: string }
  | { blob: Blob }
  | { bytes: Uint8Array<ArrayBuffer> }
  | { stream: ReadableStream<Uint8Array<ArrayBuffer>>; size: number | undefined };

/** The parts of a source, with URLs made absolute. */
export function parts(source: Source, size: number | undefined): Part[] {
  if (Array.isArray(source)) {
    if (source.length === 0) throw new StarlingError("request", "the list of files is empty");
    return source.map((s) => (s instanceof Blob ? { blob: s } : { url: address(s) }));
  }
  if (source instanceof Blob) return [{ blob: source }];
  if (source instanceof ArrayBuffer) return [{ bytes: new Uint8Array(source) }];
  // of shared memory, which others may write meanwhile, a copy
  if (source instanceof Uint8Array)
    return [{ bytes: source.buffer instanceof ArrayBuffer ? (source as Bytes) : new Uint8Array(source) }];
  if (source instanceof ReadableStream) return [{ stream: source, size }];
  return shards(address(source)).map((url) => ({ url }));
}

function address(url: string | URL): string {
  const hub = /^hf:([^/]+)\/([^/@]+)(?:@([^/]+))?\/(.+)$/.exec(String(url));
  return hub ? `https://huggingface.co/${hub[1]}/${hub[2]}/resolve/${hub[3] ?? "main"}/${hub[4]}` : absolute(url).href;
}

/** All parts of a split model, of which the first is given. */
function shards(url: string): string[] {
  const first = /^(.*-)00001-of-(\d{5})(\.gguf(?:[?#].*)?)$/.exec(url);
  if (!first) return [url];
  return Array.from(
    { length: Number(first[2]) },
    (_, i) => `${first[1]}${String(i + 1).padStart(5, "0")}-of-${first[2]}${first[3]}`,
  );
}

/** A file that can be opened at any byte. */
export interface SourceFile {
  /** For messages. */
  name: string;
  size: number;
  /** What tells versions apart, where the server says. */
  tag: string | undefined;
  /** The bytes from there on. */
  open(from: number, signal?: AbortSignal): Promise<ReadableStream<Uint8Array<ArrayBuffer>>>;
  /** Whether opening it again may help after a failure. */
  remote: boolean;
  /** Whether its streams are nobody else's, so that one buffer can take all their pieces. */
  owned?: boolean;
  /** Whether its bytes were counted already, as all of it had to be read to know how many there are. */
  counted?: boolean;
}

/** Told of bytes of a file whose length is not known yet; throws if they become too many. */
export type Count = (bytes: number) => void;

export const blobFile = (blob: Blob, name = (blob as File).name ?? "blob"): SourceFile => ({
  name,
  size: blob.size,
  tag: undefined,
  open: async (from) => (from === 0 ? blob : blob.slice(from)).stream(),
  remote: false,
  owned: true,
});

const PIECE = 1 << 20;

/** Bytes from there on, in pieces. */
function streamOf(bytes: Bytes, from: number, piece: (first: number, end: number) => Bytes): ReadableStream<Bytes> {
  return new ReadableStream({
    pull(controller) {
      if (from >= bytes.length) return controller.close();
      controller.enqueue(piece(from, from + PIECE));
      from += PIECE;
    },
  });
}

function bytesFile(bytes: Bytes): SourceFile {
  const open = async (from: number) => streamOf(bytes, from, (first, end) => bytes.subarray(first, end));
  return { name: "bytes", size: bytes.length, tag: undefined, open, remote: false };
}

/** Bytes on their way to a worker: of a part of a buffer, what crosses is all of it. */
export const crossing = (bytes: Bytes): StreamPart => ({
  stream: streamOf(bytes, 0, (first, end) => bytes.slice(first, end)),
  size: bytes.length,
});

/** Puts copies of bytes together in blobs, which a browser may keep on disk. */
export class Pieces {
  #blob = new Blob([]);
  #last: Blob[] = [];

  add(bytes: Uint8Array<ArrayBuffer>): void {
    if (this.#last.push(new Blob([bytes])) === 64) this.#blob = this.blob();
  }

  /** All so far. */
  blob(): Blob {
    const blob = new Blob([this.#blob, ...this.#last]);
    this.#last = [];
    return (this.#blob = blob);
  }
}

/** All of a file. */
async function collect(file: SourceFile, signal: AbortSignal | undefined, count: Count): Promise<Blob> {
  const pieces = new Pieces();
  for await (const bytes of read(file, 0, signal)) {
    count(bytes.length);
    pieces.add(bytes);
  }
  return pieces.blob();
}

/** A file whose length nobody says: all of it must be there before its first byte can be placed. */
async function whole(file: SourceFile, signal: AbortSignal | undefined, count: Count): Promise<SourceFile> {
  return { ...blobFile(await collect(file, signal, count), file.name), tag: file.tag, counted: true };
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

/** All of a stream, for what takes none. */
export async function inBlob(part: StreamPart, signal: AbortSignal | undefined, count: Count): Promise<Part> {
  return { blob: await collect(streamFile({ ...part, size: undefined }), signal, count) };
}

/** Opens a part that is not cached; with `now`, reading will start at once. */
export async function openPart(
  part: Part,
  headers: Record<string, string>,
  signal: AbortSignal | undefined,
  count: Count,
  now = true,
): Promise<SourceFile> {
  if ("blob" in part) return blobFile(part.blob);
  if ("bytes" in part) return bytesFile(part.bytes);
  if ("stream" in part) return part.size === undefined ? whole(streamFile(part), signal, count) : streamFile(part);
  const file = await localFile(new URL(part.url));
  return file ? blobFile(file, part.url) : remoteFile(part.url, headers, signal, count, now);
}

/** What tells versions apart. One that is compressed on its way has a weak tag, or one that says so. */
const tagOf = ({ headers }: Response) =>
  headers
    .get("etag")
    ?.replace(/^W\//, "")
    .replace(/[-;](gzip|br|zstd|deflate)"$/, '"') ??
  headers.get("last-modified") ??
  undefined;

/** Bytes of the file, if the server says; a compressed answer has another length. */
function sizeOf({ headers }: Response): number | undefined {
  if (headers.has("content-encoding")) return undefined;
  const size = /\/(\d+)$/.exec(headers.get("content-range") ?? "")?.[1] ?? headers.get("content-length");
  return size === null ? undefined : Number(size);
}

/** Whether browsers hide from scripts of this origin how an answer was compressed, whose length they would see. */
const isElsewhere = (url: string) => globalThis.location !== undefined && new URL(url).origin !== location.origin;

/** Asks for a file from there on, by which a browser asks for it as it is, not compressed. */
const byRange = (from: number) => ({ range: `bytes=${from}-` });

/** What a server says of a file: what a cached copy is compared with. Undefined if it cannot be reached. */
export async function remoteTag(
  url: string,
  headers: Record<string, string>,
  signal: AbortSignal | undefined,
): Promise<{ tag: string | undefined; size: number | undefined } | undefined> {
  try {
    const asked = { ...headers, ...(isElsewhere(url) && byRange(0)) };
    const response = await fetch(url, { method: "HEAD", cache: "no-cache", headers: asked, signal: signal ?? null });
    return response.ok ? { tag: tagOf(response), size: sizeOf(response) } : undefined;
  } catch (e) {
    signal?.throwIfAborted();
    return undefined;
  }
}

/** Past the browser's HTTP cache, which may have another version and would keep a second copy. Not all runtimes know this. */
const FRESH: RequestInit = "cache" in Request.prototype ? { cache: "no-store" } : {};

async function request(
  url: string,
  more: Record<string, string>,
  from: number,
  signal: AbortSignal | undefined,
  isPart = from > 0,
): Promise<Response> {
  let response;
  try {
    const headers = { ...more, ...(isPart && byRange(from)) };
    response = await fetch(url, { ...FRESH, headers, signal: signal ?? null });
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

/** The file from its beginning. */
async function begin(
  url: string,
  headers: Record<string, string>,
  signal: AbortSignal | undefined,
): Promise<Response> {
  const asIs = isElsewhere(url) && (await request(url, headers, 0, signal, true).catch(() => undefined));
  signal?.throwIfAborted();
  if (asIs) return asIs;
  const first = await request(url, headers, 0, signal);
  return sizeOf(first) === undefined ? askForLength(url, headers, signal, first) : first;
}

/** The same file by range, which most servers say the length of. */
async function askForLength(
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
  now: boolean,
): Promise<SourceFile> {
  let first: Response | undefined = await begin(url, headers, signal);
  const [size, tag] = [sizeOf(first), tagOf(first)];
  if (!now && size !== undefined) {
    // a browser opens few connections to a server, and this one would wait
    await first.body!.cancel();
    first = undefined;
  }

  const open = async (from: number, signal?: AbortSignal) => {
    const response = first && from === 0 ? first : await request(url, headers, from, signal);
    first = undefined;
    if (tagOf(response) !== tag) {
      await response.body!.cancel();
      throw new StarlingError("checksum", `${url} changed while it was downloaded`);
    }
    // a server may answer with the whole file
    return from > 0 && response.status !== 206 ? skip(response.body!, from) : response.body!;
  };
  const file = { name: url, size: size ?? Infinity, tag, open, remote: true, owned: true };
  return size === undefined ? whole(file, signal, count) : file;
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

/** Connections that may break one after the other without a byte between them. */
const ATTEMPTS = 5;

/**
 * A reader whose pieces are in one buffer where that may be, and where the stream can: browsers see garbage of this kind
 * late, and much of a model would be twice in memory until then.
 */
function readerOf(
  stream: ReadableStream<Bytes>,
  owned = false,
): Pick<ReadableStreamDefaultReader<Bytes>, "read" | "cancel"> {
  if (!owned) return stream.getReader();
  let reader: ReadableStreamBYOBReader;
  try {
    reader = stream.getReader({ mode: "byob" });
  } catch {
    return stream.getReader();
  }
  let buffer = new ArrayBuffer(PIECE);
  const read = async () => {
    const { done, value } = await reader.read(new Uint8Array(buffer));
    if (done || !value) return { done: true as const, value: undefined };
    buffer = value.buffer;
    return { done, value };
  };
  return { read, cancel: () => reader.cancel() };
}

/**
 * The bytes of a file from there on, each piece until the next is asked for; a connection that breaks is made again where
 * it broke.
 */
export async function* read(
  file: SourceFile,
  from: number,
  signal: AbortSignal | undefined,
): AsyncGenerator<Uint8Array<ArrayBuffer>, void> {
  let failures = 0;
  const soFar = () => `${from}${file.size === Infinity ? "" : ` of ${file.size}`} bytes`;
  while (from < file.size) {
    signal?.throwIfAborted();
    let reader: ReturnType<typeof readerOf> | undefined;
    try {
      reader = readerOf(await file.open(from, signal), file.owned);
      for (;;) {
        signal?.throwIfAborted();
        const { done, value } = await unlessAborted(reader.read(), signal);
        if (done) break;
        failures = 0;
        from += value.length;
        yield value;
      }
      // the end, whether or not it comes too early
      if (from >= file.size || file.size === Infinity || !file.remote) return;
      throw new StarlingError("network", `${file.name}: the connection ended after ${soFar()}`);
    } catch (e) {
      signal?.throwIfAborted();
      failures += 1;
      if (e instanceof StarlingError && e.code !== "network") throw e;
      if (!file.remote || failures === ATTEMPTS) {
        if (e instanceof StarlingError) throw e;
        throw new StarlingError("network", `${file.name}: broke after ${soFar()}: ${(e as Error).message}`, {
          cause: e,
        });
      }
      await pause(100 * 2 ** failures, signal);
    } finally {
      // without waiting: a source may take its time, or for ever
      void reader?.cancel().catch(() => {});
    }
  }
}
