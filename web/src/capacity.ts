// How large a model may be: its length decides between the module with 32-bit addresses and that with 64-bit addresses.

import { StarlingError } from "./errors.js";

/** Bytes of weights that fit, beside the KV cache and working memory, in the 4 GiB of 32-bit addresses. */
const MAX_BYTES = 3.6e9;
/** The same for memory64: browsers give a module at most 16 GiB. */
const MAX_BYTES_MEMORY64 = 15.5e9;

/** Pages of 64 KiB of a memory with 64-bit addresses at most, as the module says. */
export const MAX_PAGES_MEMORY64 = 262144;

/**
 * The memory, shared by threads with 64-bit addresses, for a model of `bytes` bytes and 4 GiB besides. Its maximum is reserved at
 * once, and those of models that were disposed of are in the way until they are collected.
 */
export function sharedMemory64(bytes: number): WebAssembly.Memory {
  const pages = Math.min(Math.ceil(bytes / 65536) + 65536, MAX_PAGES_MEMORY64);
  const size = { initial: 64n, maximum: BigInt(pages), address: "i64", shared: true };
  return new WebAssembly.Memory(size as unknown as WebAssembly.MemoryDescriptor);
}

/** How large a model may be. */
export interface Capacity {
  /** Bytes of weights that fit in the module at hand. */
  module: number;
  /** Bytes of weights that fit in a module that may be fetched for a larger model; as `module` if there is none. */
  most: number;
  /** For the error: why no larger model fits. */
  why: string;
}

/** What decides about the capacity. */
export interface CapacityOptions {
  /** Whether the module at hand has 64-bit addresses. */
  isMemory64: boolean;
  /** Whether the caller passed it, so that no other may be fetched. */
  isOwn: boolean;
  /** {@link LoadOptions.memory64}. */
  memory64: boolean | undefined;
  /** Whether the runtime has memory64. */
  isSupported: boolean;
}

export function capacityOf({ isMemory64, isOwn, memory64, isSupported }: CapacityOptions): Capacity {
  const only = (module: number, why: string) => ({ module, most: module, why });
  if (isOwn && memory64 !== undefined && memory64 !== isMemory64) {
    const bits = isMemory64 ? 64 : 32;
    throw new StarlingError("request", `memory64 is ${memory64}, but the module in the option \`wasm\` has ${bits}-bit addresses`);
  }
  if (isMemory64) return only(MAX_BYTES_MEMORY64, `a WebAssembly module with memory64 has room for ${MAX_BYTES_MEMORY64}`);
  const limit = `a WebAssembly module with 32-bit addresses has room for ${MAX_BYTES}`;
  if (!isSupported) return only(MAX_BYTES, `${limit}, and this runtime has no memory64 for larger models: ${WHO_HAS_IT}`);
  if (isOwn) return only(MAX_BYTES, `${limit}: pass simd128-memory64.wasm in the option \`wasm\``);
  if (memory64 === false) return only(MAX_BYTES, `${limit}, and the option memory64 is false`);
  return { ...capacityOf({ isMemory64: true, isOwn, memory64, isSupported }), module: MAX_BYTES };
}

const WHO_HAS_IT = "Chrome and Edge 133, Firefox 134 and Node 24 have it, Safari does not";

/** Throws if a model of `bytes` bytes does not fit; `isPart` says that its length is not known yet. */
export function checkFits(bytes: number, { most, why }: Capacity, isPart = false): void {
  if (bytes <= most) return;
  throw new StarlingError("memory", `the model has ${isPart ? "at least " : ""}${bytes} bytes, ${why}`);
}
