// Cuts a GGUF file into the parts of a split model, as llama.cpp's gguf-split does.

const SIZES = [1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8];
const STRING = 8;
const ARRAY = 9;

/** The parts, as many as asked for, of about as many tensors each. */
export function split(file, n) {
  const view = new DataView(file.buffer, file.byteOffset, file.byteLength);
  let at = 8;
  const u64 = () => Number(view.getBigUint64((at += 8) - 8, true));
  const u32 = () => view.getUint32((at += 4) - 4, true);
  const text = () => {
    const length = u64();
    return Buffer.from(file.subarray(at, (at += length))).toString();
  };
  const skip = (type) => {
    if (type === STRING) text();
    else if (type === ARRAY) for (let inner = u32(), count = u64(); count > 0; count--) skip(inner);
    else at += SIZES[type];
  };

  const [nTensors, nKeys] = [u64(), u64()];
  const keysFrom = at;
  let alignment = 32;
  for (let i = 0; i < nKeys; i++) {
    const key = text();
    const type = u32();
    if (key === "general.alignment") alignment = view.getUint32(at, true);
    skip(type);
  }
  const keys = file.subarray(keysFrom, at);
  const tensors = [];
  for (let i = 0; i < nTensors; i++) {
    const from = at;
    text();
    const dimensions = u32();
    at += 8 * dimensions + 4;
    tensors.push({ head: file.subarray(from, at), offset: u64() });
  }
  const pad = (length) => -length & (alignment - 1);
  const dataFrom = at + pad(at);
  const sorted = [...tensors].sort((a, b) => a.offset - b.offset);
  sorted.forEach(
    (t, i) =>
      (t.data = file.subarray(dataFrom + t.offset, dataFrom + (sorted[i + 1]?.offset ?? file.length - dataFrom))),
  );

  const int = (n, bytes) => {
    const out = Buffer.alloc(bytes);
    bytes === 8 ? out.writeBigUInt64LE(BigInt(n)) : out.writeUIntLE(n, 0, bytes);
    return out;
  };
  const pair = (key, type, value, bytes) =>
    Buffer.concat([int(key.length, 8), Buffer.from(key), int(type, 4), int(value, bytes)]);
  return Array.from({ length: n }, (_, part) => {
    const mine = sorted.slice(Math.ceil((part * nTensors) / n), Math.ceil(((part + 1) * nTensors) / n));
    const splitKeys = [
      pair("split.no", 2, part, 2),
      pair("split.count", 2, n, 2),
      pair("split.tensors.count", 5, nTensors, 4),
    ];
    let offset = 0;
    const heads = mine.map(({ head, data }) => {
      const entry = Buffer.concat([head, int(offset, 8)]);
      offset += data.length + pad(data.length);
      return entry;
    });
    const head = Buffer.concat([
      file.subarray(0, 8),
      int(mine.length, 8),
      int((part === 0 ? nKeys : 0) + 3, 8),
      ...(part === 0 ? [keys] : []),
      ...splitKeys,
      ...heads,
    ]);
    const data = mine.map(({ data }) => Buffer.concat([data, Buffer.alloc(pad(data.length))]));
    return new Uint8Array(Buffer.concat([head, Buffer.alloc(pad(head.length)), ...data]));
  });
}
