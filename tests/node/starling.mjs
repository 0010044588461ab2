// The two ways to the engine from JavaScript, as one: `open(model, pieceBytes, options, digest)` gives a session with info,
// submit, step, cancel, tokenize, detokenize, logitsSha256, embed, save, restore, memory and close; what is wrong is thrown
// as "kind: message".

import { readFile } from "node:fs/promises";
import v8 from "node:v8";

const relaxed = Uint8Array.of(
  0, 97, 115, 109, 1, 0, 0, 0, 1, 4, 1, 96, 0, 0, 3, 2, 1, 0, 10, 16, 1, 14, 0, 65, 1, 253, 15, 65, 2, 253, 15, 253,
  128, 2, 26, 11,
);

/** Whether this Node runs relaxed SIMD, which older ones do only with a flag; sets it. */
export function hasRelaxedSimd() {
  if (!WebAssembly.validate(relaxed)) v8.setFlagsFromString("--experimental-wasm-relaxed-simd");
  return WebAssembly.validate(relaxed);
}

/** Instruction sets that a module built for relaxed SIMD has, first what it takes by itself: the baseline compiler of V8 11
 * lowers the relaxed dot wrongly, and the engine finds that out. */
export const relaxedIsas = parseInt(process.versions.v8) < 12 ? ["simd128"] : ["relaxed-simd", "relaxed-i16"];

/** The module with plain exports. */
export class Plain {
  static async load(file) {
    const { instance } = await WebAssembly.instantiate(await readFile(file), {});
    return new Plain(instance.exports);
  }

  constructor(exports) {
    this.exports = exports;
  }

  /** A buffer of the module with those bytes, or that text. */
  buffer(bytes) {
    if (typeof bytes === "string") bytes = new TextEncoder().encode(bytes);
    const pointer = this.exports.starling_alloc(bytes.length) >>> 0;
    if (pointer === 0) throw new Error(`no memory for ${bytes.length} bytes`);
    new Uint8Array(this.exports.memory.buffer).set(bytes, pointer);
    return pointer;
  }

  call(name, ...args) {
    const packed = BigInt.asUintN(64, this.exports[name](...args));
    const pointer = Number(packed >> 32n);
    const bytes = new Uint8Array(this.exports.memory.buffer, pointer, Number(packed & 0xffffffffn));
    const reply = JSON.parse(new TextDecoder().decode(bytes));
    this.exports.starling_free(pointer);
    if (reply.error) throw new Error(`${reply.error.kind}: ${reply.error.message}`);
    return reply.ok;
  }

  open(model, pieceBytes, options, digest = false) {
    const loader = this.exports.starling_loader(BigInt(model.length), Number(digest));
    for (let at = 0; at < model.length; at += pieceBytes) {
      this.call("starling_feed", loader, this.buffer(model.subarray(at, at + pieceBytes)));
    }
    const id = this.call("starling_open", loader, this.buffer(JSON.stringify(options)));
    return new PlainSession(this, id);
  }
}

class PlainSession {
  constructor(module, id) {
    this.module = module;
    this.id = id;
  }
  #call(name, ...args) {
    return this.module.call(name, this.id, ...args);
  }
  #json(name, value) {
    return this.#call(name, this.module.buffer(JSON.stringify(value)));
  }
  info() {
    return this.#call("starling_info");
  }
  submit(request) {
    return this.#json("starling_submit", request);
  }
  step() {
    return this.#call("starling_step");
  }
  cancel(id) {
    return this.module.exports.starling_cancel(this.id, BigInt(id)) === 1;
  }
  tokenize(text) {
    return this.#call("starling_tokenize", this.module.buffer(text));
  }
  detokenize(ids) {
    return this.#json("starling_detokenize", ids);
  }
  logitsSha256(ids) {
    return this.#json("starling_logits", ids);
  }
  embed(ids) {
    return Float32Array.from(this.#json("starling_embed", Array.from(ids)));
  }
  save(ids) {
    const { pointer, len } = this.#json("starling_save", ids);
    const bytes = new Uint8Array(this.module.exports.memory.buffer, pointer, len).slice();
    this.module.exports.starling_free(pointer);
    return bytes;
  }
  restore(bytes) {
    return this.#call("starling_restore", this.module.buffer(bytes));
  }
  memory() {
    return this.#call("starling_memory");
  }
  close() {
    this.module.exports.starling_close(this.id);
  }
}

/** The face for JavaScript. */
export class Package {
  static async load(directory) {
    const js = await import(new URL("starling.js", directory).href);
    await js.default({ module_or_path: await readFile(new URL("starling_bg.wasm", directory)) });
    return new Package(js);
  }

  constructor(js) {
    this.js = js;
  }

  open(model, pieceBytes, options, digest = false) {
    return named(() => {
      const loader = new this.js.Loader(Float64Array.of(model.length), digest);
      for (let at = 0; at < model.length; at += pieceBytes) loader.feed(0, model.subarray(at, at + pieceBytes));
      return new PackageSession(loader.open(JSON.stringify(options)));
    });
  }
}

/** Errors as those of the plain face. */
function named(work) {
  try {
    return work();
  } catch (e) {
    throw e.code ? new Error(`${e.code}: ${e.message}`) : e;
  }
}

class PackageSession {
  constructor(model) {
    this.model = model;
  }
  info() {
    return JSON.parse(this.model.info());
  }
  submit(request) {
    return named(() => this.model.submit(JSON.stringify(request)));
  }
  step() {
    return JSON.parse(this.model.step());
  }
  cancel(id) {
    return this.model.cancel(id);
  }
  tokenize(text) {
    return JSON.parse(this.model.tokenize(text, true, false));
  }
  detokenize(ids) {
    return named(() => this.model.detokenize(Uint32Array.from(ids)));
  }
  logitsSha256(ids) {
    return named(() => this.model.logitsSha256(Uint32Array.from(ids)));
  }
  embed(ids) {
    return named(() => this.model.embed(Uint32Array.from(ids)));
  }
  save(ids) {
    return named(() => this.model.save(Uint32Array.from(ids)));
  }
  restore(bytes) {
    return named(() => this.model.restore(bytes));
  }
  memory() {
    return JSON.parse(this.model.memory());
  }
  close() {
    this.model.free();
  }
}
