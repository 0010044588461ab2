// Refuses a package whose modules lack the kernels or have grown, and prints their sizes: run by build.sh.

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
};
/** Fewer than a build with kernels has, more than chance would put into bytes. */
const LEAST = 50;
/** Bytes that a module may have, as it is and with brotli: 1 MiB, and 350 KiB. */
const MOST = { "simd128": [1 << 20, 350 << 10] };

for (const [isa, code] of Object.entries(DOTS)) {
  const module = await readFile(new URL(`wasm/${isa}.wasm`, import.meta.url));
  let dots = 0;
  for (let at = module.indexOf(Buffer.from(code)); at >= 0; at = module.indexOf(Buffer.from(code), at + 1)) dots += 1;
  const sizes = [module.length, brotliCompressSync(module).length];
  console.log(`${isa}.wasm: ${sizes[0]} bytes, ${sizes[1]} with brotli, ${dots} dot instructions`);
  if (dots < LEAST) throw new Error(`${isa}.wasm has ${dots} dot instructions: it was built without its kernels`);
  if (MOST[isa]?.some((most, i) => sizes[i] > most)) {
    throw new Error(`${isa}.wasm has ${sizes} bytes, more than ${MOST[isa]}: what made it grow?`);
  }
}
