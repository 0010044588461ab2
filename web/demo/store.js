// Conversations in the browser's local storage.

const KEY = "starling-conversations";
/** Conversations that are kept. */
const MAX = 50;

const digits = (_, value) => (typeof value === "bigint" ? { bigint: String(value) } : value);
const numbers = (_, value) => (typeof value?.bigint === "string" ? BigInt(value.bigint) : value);

/** `{ id, title, messages }`, the one that was changed last first. */
export function list() {
  try {
    const all = JSON.parse(localStorage.getItem(KEY) ?? "[]", numbers);
    return Array.isArray(all) ? all.filter(({ id, messages }) => typeof id === "string" && Array.isArray(messages)) : [];
  } catch {
    return []; // no storage, or not ours
  }
}

function write(all) {
  // without the oldest if there is no room for all; receipts are the largest part
  for (let keep = Math.min(all.length, MAX); keep > 0; keep = Math.floor(keep / 2)) {
    try {
      localStorage.setItem(KEY, JSON.stringify(all.slice(0, keep), digits));
      return;
    } catch {
      // tried again with fewer
    }
  }
}

export function put(conversation) {
  write([conversation, ...list().filter(({ id }) => id !== conversation.id)]);
}

export function remove(id) {
  const rest = list().filter((conversation) => conversation.id !== id);
  try {
    if (rest.length === 0) localStorage.removeItem(KEY);
  } catch {
    // no storage
  }
  write(rest);
}
