// Feature detection, and fetching the module build for this runtime.

import { MAX_PAGES_MEMORY64 } from "./capacity.js";
import { type ErrorCode, StarlingError } from "./errors.js";
import { builtin, cpus, isServer } from "./runtime.js";

/** Instruction sets; `relaxed-i16` is relaxed SIMD with 16-bit products, for CPUs without VNNI. All give the same bytes. */
export type Isa = "simd128" | "relaxed-simd" | "relaxed-i16";

/** WebAssembly features of this runtime. */
export interface Features {
  /** Fixed-width SIMD, which Starling needs. */
  simd128: boolean;
  /** Relaxed SIMD: faster. */
  relaxedSimd: boolean;
  /** Shared memory, for threads; a page must be cross-origin isolated. */
  sharedMemory: boolean;
  /** Memory with 64-bit addresses, for models beyond 4 GiB. */
  memory64: boolean;
  /** Number of CPUs, as the runtime reports it. */
  cpus: number;
}

// a module with one function without arguments
const moduleOf = (...body: number[]) =>
  Uint8Array.of(
    0,
    97,
    115,
    109,
    1,
    0,
    0,
    0,
    1,
    4,
    1,
    96,
    0,
    0,
    3,
    2,
    1,
    0,
    10,
    body.length + 4,
    1,
    body.length + 2,
    0,
    ...body,
    11,
  );
const splat = [65, 1, 253, 15];
const drop = 26;

/** Detects the WebAssembly features of this runtime. */
export function features(): Features {
  return {
    simd128: WebAssembly.validate(moduleOf(...splat, drop)),
    relaxedSimd: WebAssembly.validate(moduleOf(...splat, ...splat, 253, 128, 2, drop)),
    sharedMemory: (sharedMemory ??= canShareMemory({ initial: 1, maximum: 65536 })),
    memory64: WebAssembly.validate(MEMORY64),
    cpus: cpus(),
  };
}

// a module with a table and a memory with 64-bit addresses
const MEMORY64 = Uint8Array.of(0, 97, 115, 109, 1, 0, 0, 0, 4, 4, 1, 112, 4, 0, 5, 3, 1, 4, 1);

let sharedMemory: boolean | undefined;

/** Whether memory can be shared. `size` has the maximum of the module: some systems refuse to reserve it. */
function canShareMemory(size: object): boolean {
  if (typeof SharedArrayBuffer === "undefined" || globalThis.crossOriginIsolated === false) return false;
  try {
    const memory = new WebAssembly.Memory({ ...size, shared: true } as WebAssembly.MemoryDescriptor);
    return memory.buffer instanceof SharedArrayBuffer;
  } catch {
    return false;
  }
}

let sharedMemory64: boolean | undefined;

// once: each attempt reserves 16 GiB of addresses until it is collected
const canShareMemory64 = () => (sharedMemory64 ??= canShareMemory({ initial: 1n, maximum: BigInt(MAX_PAGES_MEMORY64), address: "i64" }));

/** More threads by default cost more in synchronisation than they gain. */
const DEFAULT_MAX_THREADS = 8;

/** Number of threads: `asked`, or by default one for each core; half of more than 4 CPUs are taken for hyper-threads. */
export function threadsFor(asked: number | undefined): number {
  if (asked !== undefined && !(Number.isSafeInteger(asked) && asked >= 1 && asked <= 64))
    throw new StarlingError("request", `threads is ${asked}, expected a whole number from 1 to 64`);
  const { sharedMemory, cpus: n } = features();
  // V8 11 of Node 20 loses a thread that waits in the module now and then
  if (!sharedMemory || typeof Worker === "undefined") return 1;
  if (asked === undefined && isServer()) return 1;
  return asked ?? Math.min(n <= 4 ? n : Math.ceil(n / 2), DEFAULT_MAX_THREADS);
}

/** A module or where to fetch it. In workerd modules are imported. */
export type WasmSource = WebAssembly.Module | ArrayBuffer | Uint8Array<ArrayBuffer> | string | URL;

/** Compiled modules by name or URL: compiling takes longer than loading a small model. */
const compiled = new Map<string, Promise<WebAssembly.Module>>();

/** What the engine's module is built for. */
export interface Build {
  isa: Isa | undefined;
  threads: boolean;
  memory64: boolean;
}

/** The engine's module, compiled once for all models of a page. */
export async function compile(build: Build, source?: WasmSource): Promise<WebAssembly.Module> {
  if (!features().simd128)
    throw new StarlingError("unsupported", "this runtime has no WebAssembly SIMD (simd128), which Starling needs");
  const own = fromCaller(source, "option `wasm`");
  if (own) return own;
  if (source !== undefined) return memoise(String(source), () => fetchModule(source as string | URL));
  const name = buildName(build);
  return memoise(name, () => fetchModule(builds[name]()));
}

/** Name of the fastest build of this package for this runtime. */
function buildName({ isa, threads, memory64 }: Build): keyof typeof builds {
  const { relaxedSimd, memory64: hasMemory64 } = features();
  const unsupported = (why: string) => new StarlingError("unsupported", why);
  const isRelaxed = isa?.startsWith("relaxed");
  if (memory64) {
    if (!hasMemory64) throw unsupported("this runtime has no memory64, which the option memory64 needs");
    if (isRelaxed) throw unsupported(`isa is ${isa}, but the modules with memory64 have simd128 only`);
    return threads && canShareMemory64() ? "simd128-memory64-threads" : "simd128-memory64";
  }
  if (isRelaxed && !relaxedSimd) throw unsupported(`this runtime has no relaxed SIMD, which ${isa} needs`);
  const name = isa === "simd128" || (!isa && !relaxedSimd) ? "simd128" : "relaxed-simd";
  return threads ? `${name}-threads` : name;
}

/** The grammar module, compiled once for a page, when it is first needed. */
export function compileGrammar(source: WasmSource | undefined): Promise<WebAssembly.Module> {
  const own = fromCaller(source, "option `grammarWasm`");
  const fetch = () => fetchModule(source === undefined ? builds.grammar() : (source as string | URL));
  return own ?? memoise(String(source ?? "grammar"), fetch);
}

/** The module of the caller, unless it is to be fetched. */
function fromCaller(source: WasmSource | undefined, name: string): Promise<WebAssembly.Module> | undefined {
  if (source instanceof WebAssembly.Module) return Promise.resolve(source);
  if (source instanceof ArrayBuffer || ArrayBuffer.isView(source)) return compileBytes(source, name, "request");
  return undefined;
}

function memoise(key: string, fetch: () => Promise<WebAssembly.Module>): Promise<WebAssembly.Module> {
  let module = compiled.get(key);
  if (!module) {
    module = fetch();
    compiled.set(key, module);
    // retry on the next call
    module.catch(() => compiled.delete(key));
  }
  return module;
}

/** The builds of this package; bundlers look for exactly this form. */
export const builds = {
  "simd128": () => new URL("../wasm/simd128.wasm", import.meta.url),
  "relaxed-simd": () => new URL("../wasm/relaxed-simd.wasm", import.meta.url),
  "simd128-threads": () => new URL("../wasm/simd128-threads.wasm", import.meta.url),
  "relaxed-simd-threads": () => new URL("../wasm/relaxed-simd-threads.wasm", import.meta.url),
  "simd128-memory64": () => new URL("../wasm/simd128-memory64.wasm", import.meta.url),
  "simd128-memory64-threads": () => new URL("../wasm/simd128-memory64-threads.wasm", import.meta.url),
  "grammar": () => new URL("../wasm/grammar.wasm", import.meta.url),
};

async function fetchModule(source: string | URL): Promise<WebAssembly.Module> {
  const url = absolute(source);
  const file = await localFile(url);
  if (file) return compileBytes(await file.arrayBuffer(), url.href, "network");
  const failed = (why: string, cause?: unknown) => new StarlingError("network", `${url.href}: ${why}`, { cause });
  try {
    const response = await fetch(url);
    if (!response.ok) throw failed(`${response.status} ${response.statusText}`);
    // some servers send another type, which `compileStreaming` refuses
    const known = response.headers.get("content-type")?.startsWith("application/wasm");
    if (known) return await WebAssembly.compileStreaming(response);
    return await compileBytes(await response.arrayBuffer(), url.href, "network");
  } catch (e) {
    if (e instanceof StarlingError) throw e;
    throw e instanceof WebAssembly.CompileError ? compileError(url.href, e) : failed((e as Error).message, e);
  }
}

/** Resolves a URL against that of the page. */
export function absolute(url: string | URL): URL {
  try {
    return new URL(url, globalThis.document?.baseURI ?? globalThis.location?.href);
  } catch (e) {
    throw new StarlingError("request", `"${url}" is not a URL`, { cause: e });
  }
}

const compileError = (name: string, cause: WebAssembly.CompileError) =>
  new StarlingError("unsupported", `${name}: this runtime cannot compile it: ${cause.message}`, { cause });

/** The first bytes of every module. */
const MAGIC = [0, 97, 115, 109];

/** Compiles a module; `codeIfNoModule` is the error code for bytes that are not WebAssembly. */
async function compileBytes(
  bytes: ArrayBuffer | Uint8Array<ArrayBuffer>,
  name: string,
  codeIfNoModule: ErrorCode,
): Promise<WebAssembly.Module> {
  try {
    return await WebAssembly.compile(bytes);
  } catch (e) {
    const begin = bytes instanceof Uint8Array ? bytes : new Uint8Array(bytes);
    if (MAGIC.every((byte, i) => begin[i] === byte)) throw compileError(name, e as WebAssembly.CompileError);
    throw new StarlingError(codeIfNoModule, `${name} is not a WebAssembly module`, { cause: e });
  }
}

/** The file of a `file:` URL; `undefined` for other URLs. */
export async function localFile(url: URL): Promise<Blob | undefined> {
  if (url.protocol !== "file:") return undefined;
  const fs = builtin("node:fs");
  if (!fs) throw new StarlingError("unsupported", `this runtime cannot read files: ${url.href}`);
  try {
    return fs.openAsBlob ? await fs.openAsBlob(url) : new Blob([await fs.promises.readFile(url)]);
  } catch (e) {
    throw new StarlingError("network", `${url.href}: ${(e as Error).message}`, { cause: e });
  }
}
