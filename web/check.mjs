// Checks that the modules have their kernels and are not too large, and prints their sizes. Run by build.sh.

import { readFile } from "node:fs/promises";
import { brotliCompressSync } from "node:zlib";

// i32x4.dot_i16x8_s, and i32x4.relaxed_dot_i8x16_i7x16_add_s
const [SIMD128, RELAXED] = [
  [0xfd, 0xba, 0x01],
  [0xfd, 0x93, 0x02],
];
const DOTS = {
  "simd128": SIMD128,
  "relaxed-simd": RELAXED,
  "simd128-threads": SIMD128,
  "relaxed-simd-threads": RELAXED,
  "simd128-memory64": SIMD128,
  "simd128-memory64-threads": SIMD128,
};
/** Fewer than a build with kernels has, more than random bytes would have. */
const MIN_DOTS = 50;
/** Bytes of the module for browsers without relaxed SIMD at most: raw, and with brotli. */
const MAX_SIZES = { "simd128": [3072 << 10, 960 << 10] };

for (const [isa, code] of Object.entries(DOTS)) {
  const module = await readFile(new URL(`wasm/${isa}.wasm`, import.meta.url));
  let dots = 0;
  for (let at = module.indexOf(Buffer.from(code)); at >= 0; at = module.indexOf(Buffer.from(code), at + 1)) dots += 1;
  const sizes = [module.length, brotliCompressSync(module).length];
  console.log(`${isa}.wasm: ${sizes[0]} bytes, ${sizes[1]} with brotli, ${dots} dot instructions`);
  if (dots < MIN_DOTS)
    throw new Error(`${isa}.wasm has ${dots} dot instructions, expected at least ${MIN_DOTS}: it was built without SIMD`);
  if (MAX_SIZES[isa]?.some((max, i) => sizes[i] > max))
    throw new Error(`${isa}.wasm has ${sizes} bytes raw and with brotli, expected at most ${MAX_SIZES[isa]}`);
}
