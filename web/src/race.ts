// Which of two ways to compute is faster here.

import type { Isa } from "./features.js";
import type { Face } from "./threads.js";

const TURNS = 5;
/** About a millisecond of dots: some clocks tick ten times in one. */
const ROUNDS = 100_000;
/** How much less time the second way must take; what it saves in dots it does not save elsewhere. */
const LESS = 0.8;

/**
 * The faster instruction set of a module for relaxed SIMD: where the processor has no instruction for its dot product,
 * which nothing tells, others are faster, those of 4-bit weights most. `undefined` where there is no choice.
 */
export function fasterIsa(face: Face): Isa | undefined {
  const time = (isa: Isa) => {
    const start = performance.now();
    return face.race(isa, ROUNDS) ? performance.now() - start : NaN;
  };
  const [dots, i16] = ["relaxed-simd", "relaxed-i16"] as const;
  // the first of each may wait for the compiler
  if (Number.isNaN(time(dots) + time(i16))) return undefined;
  let [slow, fast] = [0, 0];
  for (let turn = 0; turn < TURNS; turn++) {
    slow += time(dots);
    fast += time(i16);
  }
  return fast < slow * LESS ? i16 : dots;
}
