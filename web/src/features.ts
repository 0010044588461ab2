// What the runtime can do, and the module built for it.

import { type ErrorCode, StarlingError } from "./errors.js";

/** Instruction sets; the last is the second with dots for processors without VNNI. All give the same bytes. */
export type Isa = "simd128" | "relaxed-simd" | "relaxed-i16";

/** What this runtime can do. */
export interface Features {
  /** Fixed-width SIMD, without which nothing runs. */
  simd128: boolean;
  /** Relaxed SIMD, which is faster. */
  relaxedSimd: boolean;
  /** Whether memory can be shared between threads here, which a page must be cross-origin isolated for. */
  sharedMemory: boolean;
  /** CPUs that the runtime tells of. */
  cpus: number;
}

// a function without arguments whose body uses one instruction of the set
const module_ = (...body: number[]) =>
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

/** What this runtime can do. */
export function features(): Features {
  return {
    simd128: WebAssembly.validate(module_(...splat, drop)),
    relaxedSimd: WebAssembly.validate(module_(...splat, ...splat, 253, 128, 2, drop)),
    sharedMemory: (shares ??= canShare()),
    cpus: globalThis.navigator?.hardwareConcurrency ?? 1,
  };
}

let shares: boolean | undefined;

function canShare(): boolean {
  if (typeof SharedArrayBuffer === "undefined" || globalThis.crossOriginIsolated === false) return false;
  try {
    // as much as the module asks for: some systems refuse
    return new WebAssembly.Memory({ initial: 1, maximum: 65536, shared: true }).buffer instanceof SharedArrayBuffer;
  } catch {
    return false;
  }
}

/** Beyond this many, threads wait for each other more than they help. */
const MOST_THREADS = 8;

/** Threads to use: as many as asked for; by default one for each core, of which most CPUs with many have half as many. */
export function threadsFor(asked: number | undefined): number {
  if (asked !== undefined && !(Number.isSafeInteger(asked) && asked >= 1 && asked <= 64))
    throw new StarlingError("request", `threads is ${asked}, expected a whole number from 1 to 64`);
  const { sharedMemory, cpus } = features();
  if (!sharedMemory) return 1;
  return asked ?? Math.min(cpus <= 4 ? cpus : Math.ceil(cpus / 2), MOST_THREADS);
}

/** A module given by the caller, where it cannot be fetched: workerd imports modules, for example. */
export type WasmSource = WebAssembly.Module | ArrayBuffer | Uint8Array<ArrayBuffer> | string | URL;

/** By what they were asked for: compiling takes longer than loading a small model. */
const compiled = new Map<string, Promise<WebAssembly.Module>>();

/** The module, compiled once in this page however many models use it. */
export function compile(
  isa: Isa | undefined,
  threads: boolean,
  source: WasmSource | undefined,
): Promise<WebAssembly.Module> {
  const { simd128, relaxedSimd } = features();
  if (!simd128)
    return Promise.reject(
      new StarlingError("unsupported", "this runtime has no WebAssembly SIMD (simd128), which Starling needs"),
    );
  const own = given(source, "what was given as `wasm`");
  if (own) return own;
  if (isa?.startsWith("relaxed") && !relaxedSimd && source === undefined)
    return Promise.reject(new StarlingError("unsupported", `this runtime has no relaxed SIMD, which ${isa} needs`));
  const build = isa === "simd128" || (!isa && !relaxedSimd) ? "simd128" : "relaxed-simd";
  const name = threads ? (`${build}-threads` as const) : build;
  return once(String(source ?? name), () => fetchModule(name, source as string | URL | undefined));
}

/** The module that reads schemas and grammars, compiled once in this page, when it is first needed. */
export function compileGrammar(source: WasmSource | undefined): Promise<WebAssembly.Module> {
  const own = given(source, "what was given as `grammarWasm`");
  return own ?? once(String(source ?? "grammar"), () => fetchModule("grammar", source as string | URL | undefined));
}

/** A module given by the caller. */
function given(source: WasmSource | undefined, name: string): Promise<WebAssembly.Module> | undefined {
  if (source instanceof WebAssembly.Module) return Promise.resolve(source);
  if (source instanceof ArrayBuffer || ArrayBuffer.isView(source)) return compileBytes(source, name, "request");
  return undefined;
}

function once(key: string, fetch: () => Promise<WebAssembly.Module>): Promise<WebAssembly.Module> {
  let module = compiled.get(key);
  if (!module) {
    module = fetch();
    compiled.set(key, module);
    // tried anew next time
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
  "grammar": () => new URL("../wasm/grammar.wasm", import.meta.url),
};

async function fetchModule(
  build: keyof typeof builds,
  source: string | URL | undefined,
): Promise<WebAssembly.Module> {
  const url = source === undefined ? builds[build]() : absolute(source);
  const file = await localFile(url);
  if (file) return compileBytes(await file.arrayBuffer(), url.href, "network");
  const failed = (why: string, cause?: unknown) => new StarlingError("network", `${url.href}: ${why}`, { cause });
  try {
    const response = await fetch(url);
    if (!response.ok) throw failed(`${response.status} ${response.statusText}`);
    // some servers do not know the type, which streaming insists on
    const known = response.headers.get("content-type")?.startsWith("application/wasm");
    if (known) return await WebAssembly.compileStreaming(response);
    return await compileBytes(await response.arrayBuffer(), url.href, "network");
  } catch (e) {
    if (e instanceof StarlingError) throw e;
    throw e instanceof WebAssembly.CompileError ? uncompiled(url.href, e) : failed((e as Error).message, e);
  }
}

/** A URL as the page means it. */
export function absolute(url: string | URL): URL {
  try {
    return new URL(url, globalThis.document?.baseURI ?? globalThis.location?.href);
  } catch (e) {
    throw new StarlingError("request", `${url} is not a URL`, { cause: e });
  }
}

const uncompiled = (name: string, cause: WebAssembly.CompileError) =>
  new StarlingError("unsupported", `${name}: this runtime cannot compile it: ${cause.message}`, { cause });

/** What every module begins with. */
const MAGIC = [0, 97, 115, 109];

/** Compiles bytes; `otherwise` is the kind of failure if they are something else than a module. */
async function compileBytes(
  bytes: ArrayBuffer | Uint8Array<ArrayBuffer>,
  name: string,
  otherwise: ErrorCode,
): Promise<WebAssembly.Module> {
  try {
    return await WebAssembly.compile(bytes);
  } catch (e) {
    const begin = bytes instanceof Uint8Array ? bytes : new Uint8Array(bytes);
    if (MAGIC.every((byte, i) => begin[i] === byte)) throw uncompiled(name, e as WebAssembly.CompileError);
    throw new StarlingError(otherwise, `${name} is no WebAssembly module`, { cause: e });
  }
}

interface Fs {
  openAsBlob?(path: URL): Promise<Blob>;
  promises: { readFile(path: URL): Promise<Uint8Array<ArrayBuffer>> };
}

/** The file of a `file:` URL, where the runtime has files. */
export async function localFile(url: URL): Promise<Blob | undefined> {
  if (url.protocol !== "file:") return undefined;
  const { process } = globalThis as { process?: { getBuiltinModule?(name: string): Fs | undefined } };
  const fs = process?.getBuiltinModule?.("node:fs");
  if (!fs) throw new StarlingError("unsupported", `this runtime cannot read ${url.href}`);
  try {
    return fs.openAsBlob ? await fs.openAsBlob(url) : new Blob([await fs.promises.readFile(url)]);
  } catch (e) {
    throw new StarlingError("network", `${url.href}: ${(e as Error).message}`, { cause: e });
  }
}
