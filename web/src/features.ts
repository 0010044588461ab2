// What the runtime can do, and the module built for it.

import init, { initSync, type InitOutput } from "../wasm/starling.js";
import { StarlingError } from "./errors.js";

/** The instruction sets there are builds for. Both give the same bytes. */
export type Isa = "simd128" | "relaxed-simd";

/** What this runtime can do. */
export interface Features {
  /** Fixed-width SIMD, without which nothing runs. */
  simd128: boolean;
  /** Relaxed SIMD, which is faster. */
  relaxedSimd: boolean;
  /** Whether memory can be shared between threads here. Starling runs on one thread so far. */
  sharedMemory: boolean;
}

// a function without arguments whose body uses one instruction of the set
const module_ = (...body: number[]) =>
  Uint8Array.of(0, 97, 115, 109, 1, 0, 0, 0, 1, 4, 1, 96, 0, 0, 3, 2, 1, 0, 10, body.length + 4, 1, body.length + 2, 0, ...body, 11);
const splat = [65, 1, 253, 15];
const drop = 26;

/** What this runtime can do. */
export function features(): Features {
  return {
    simd128: WebAssembly.validate(module_(...splat, drop)),
    relaxedSimd: WebAssembly.validate(module_(...splat, ...splat, 253, 128, 2, drop)),
    sharedMemory: typeof SharedArrayBuffer !== "undefined" && globalThis.crossOriginIsolated !== false,
  };
}

/** A module given by the caller, where it cannot be fetched: workerd imports modules, for example. */
export type WasmSource = WebAssembly.Module | ArrayBuffer | Uint8Array<ArrayBuffer> | string | URL;

let loaded: Promise<InitOutput> | undefined;

/** The module, loaded once. */
export function loadModule(isa: Isa | undefined, source: WasmSource | undefined): Promise<InitOutput> {
  loaded ??= instantiate(isa, source).catch((e: unknown) => {
    loaded = undefined;
    throw e;
  });
  return loaded;
}

async function instantiate(isa: Isa | undefined, source: WasmSource | undefined): Promise<InitOutput> {
  const { simd128, relaxedSimd } = features();
  if (!simd128) throw new StarlingError("unsupported", "this runtime has no WebAssembly SIMD (simd128), which Starling needs");
  if (source instanceof WebAssembly.Module) return initSync({ module: source });
  if (source instanceof ArrayBuffer || ArrayBuffer.isView(source)) return init({ module_or_path: source });
  isa ??= relaxedSimd ? "relaxed-simd" : "simd128";
  // bundlers look for exactly this form
  source ??=
    isa === "relaxed-simd"
      ? new URL("../wasm/relaxed-simd.wasm", import.meta.url)
      : new URL("../wasm/simd128.wasm", import.meta.url);
  const url = new URL(source as string | URL, import.meta.url);
  const file = await localFile(url);
  return init({ module_or_path: file ? await file.arrayBuffer() : url });
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
