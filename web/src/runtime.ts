// What differs between browsers, Node, Deno, Bun and workerd.

interface Builtins {
  "node:fs": {
    openAsBlob?(path: URL): Promise<Blob>;
    promises: { readFile(path: URL): Promise<Uint8Array<ArrayBuffer>> };
    fstatSync(fd: number): { size: number };
  };
  "node:os": { availableParallelism(): number };
  "node:url": { pathToFileURL(path: string): URL };
  "node:worker_threads": {
    Worker: new (script: URL) => NodeWorker;
    parentPort: { postMessage(message: unknown): void; on(event: "message", f: (data: never) => void): void } | null;
  };
}

interface NodeWorker {
  on(event: "message" | "error", f: (value: never) => void): void;
  postMessage(message: unknown, transfer?: Transferable[]): void;
  terminate(): unknown;
  ref(): void;
  unref(): void;
}

/** A module of Node, which Deno and Bun have too; `undefined` elsewhere. */
export function builtin<K extends keyof Builtins>(name: K): Builtins[K] | undefined {
  const { process } = globalThis as { process?: { getBuiltinModule?(name: string): unknown } };
  return process?.getBuiltinModule?.(name) as Builtins[K] | undefined;
}

const isWorkerd = () => globalThis.navigator?.userAgent === "Cloudflare-Workers";

/** Whether this is Node, Deno or Bun. */
const isServer = () => typeof document === "undefined" && !isWorkerd() && builtin("node:worker_threads") !== undefined;

/** Whether models run in workers by default: in pages, and in Node, Deno and Bun. */
export const hasOwnThread = () => typeof document !== "undefined" || isServer();

/** Whether the clock advances while the module computes. */
export const hasClock = () => !isWorkerd();

/** Number of CPUs. */
export const cpus = () => globalThis.navigator?.hardwareConcurrency ?? builtin("node:os")?.availableParallelism() ?? 1;

/** The URL of a path, where paths are names of files. */
export function fileUrl(path: string): URL | undefined {
  // of two letters at least: a drive is no scheme
  if (!isServer() || /^[a-z][a-z0-9+.-]+:/i.test(path)) return undefined;
  return builtin("node:url")?.pathToFileURL(path);
}

/** What the package needs of a worker: the interface of browsers, and whether it keeps a process of Node alive. */
export interface Thread {
  onmessage: ((event: MessageEvent) => void) | null;
  onerror: ((event: ErrorEvent) => void) | null;
  postMessage(message: unknown, transfer?: Transferable[]): void;
  terminate(): void;
  ref?(): void;
  unref?(): void;
}

/** A worker of Node with the interface of browsers. */
export function nodeThread(script: URL): Thread | undefined {
  const threads = typeof Worker === "undefined" ? builtin("node:worker_threads") : undefined;
  if (!threads) return undefined;
  const worker = new threads.Worker(script);
  const thread: Thread = {
    onmessage: null,
    onerror: null,
    postMessage: (message, transfer) => worker.postMessage(message, transfer),
    terminate: () => void worker.terminate(),
    ref: () => worker.ref(),
    unref: () => worker.unref(),
  };
  worker.on("message", (data) => thread.onmessage?.({ data } as unknown as MessageEvent));
  worker.on("error", ({ message }: Error) => thread.onerror?.({ message, preventDefault() {} } as ErrorEvent));
  return thread;
}

/** The side of a worker that talks to the thread which started it. */
export function parent<In, Out>(receive: (message: In) => void): (message: Out) => void {
  const port = typeof postMessage === "undefined" ? builtin("node:worker_threads")?.parentPort : undefined;
  if (port) {
    port.on("message", receive);
    return (message) => port.postMessage(message);
  }
  addEventListener("message", ({ data }: MessageEvent<In>) => receive(data));
  return (message) => postMessage(message);
}
