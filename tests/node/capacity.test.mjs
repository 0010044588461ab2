// How large a model may be, for every kind of module: after web/build.sh.

import assert from "node:assert/strict";
import { test } from "node:test";

import { capacityOf, checkFits } from "../../web/dist/capacity.js";

const GIB = 2 ** 30;
const plain = { isMemory64: false, isOwn: false, memory64: undefined, isSupported: true };

/** What becomes of a model of that many bytes: the module at hand, the one with memory64, or an error. */
function outcome(bytes, options) {
  const capacity = capacityOf({ ...plain, ...options });
  try {
    checkFits(bytes, capacity);
  } catch (e) {
    assert.equal(e.code, "memory");
    return e.message;
  }
  return bytes > capacity.module ? "memory64" : "at hand";
}

test("a model that fits stays in the module at hand; a larger one gets memory64 where that may be", () => {
  for (const bytes of [1, 3.6e9]) {
    for (const options of [{}, { isOwn: true }, { isSupported: false }, { memory64: false }, { isMemory64: true }])
      assert.equal(outcome(bytes, options), "at hand");
  }
  for (const bytes of [3.6e9 + 1, 5 * GIB, 15.5e9]) {
    assert.equal(outcome(bytes, {}), "memory64");
    assert.equal(outcome(bytes, { isMemory64: true, memory64: true }), "at hand");
    assert.equal(outcome(bytes, { isMemory64: true, isOwn: true }), "at hand");
  }
});

test("a model that does not fit is refused with its length, the limit and what would help", () => {
  const limit = "the model has 5368709120 bytes, a WebAssembly module with 32-bit addresses has room for 3600000000";
  for (const [options, more] of [
    [{ isSupported: false }, /, and this runtime has no memory64 for larger models: Chrome and Edge 133, Firefox 134/],
    [{ isSupported: false, isOwn: true }, /this runtime has no memory64/],
    [{ isOwn: true }, /: pass simd128-memory64\.wasm in the option `wasm`$/],
    [{ memory64: false }, /, and the option memory64 is false$/],
  ]) {
    const message = outcome(5 * GIB, options);
    assert.ok(message.startsWith(limit), message);
    assert.match(message, more);
  }
  for (const options of [{}, { isMemory64: true }, { isMemory64: true, isOwn: true }])
    assert.match(outcome(16 * GIB, options), /^the model has 17179869184 bytes, .* with memory64 has room for 15500000000$/);
});

test("a module of the caller with other addresses than asked for is refused", () => {
  for (const isMemory64 of [true, false]) {
    const own = { ...plain, isOwn: true, isMemory64 };
    assert.throws(() => capacityOf({ ...own, memory64: !isMemory64 }), { code: "request", message: /the option `wasm` has/ });
    capacityOf({ ...own, memory64: isMemory64 });
  }
});
