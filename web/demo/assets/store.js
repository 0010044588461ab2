// Conversations in the browser's local storage.

const KEY = "starling-conversations";
/** Conversations that are kept. */
const MAX = 50;

const digits = (_, value) => (typeof value === "bigint" ? { bigint: String(value) } : value);
const numbers = (_, value) => (typeof value?.bigint === "string" ? BigInt(value.bigint) : value);

/** Whether a node is one, below an earlier one. */
const isNode = (node, i) =>
  typeof node?.role === "string" &&
  typeof node.content === "string" &&
  Number.isInteger(node.parent) &&
  node.parent >= -1 &&
  node.parent < i;

/** A conversation as this version keeps it: the first versions had a list of messages. */
function current({ id, title, messages, nodes, leaf }) {
  const tree = nodes ?? messages?.map((message, i) => ({ ...message, parent: i - 1 }));
  if (typeof id !== "string" || !Array.isArray(tree) || !tree.every(isNode)) return [];
  const last = Number.isInteger(leaf) && leaf >= -1 && leaf < tree.length ? leaf : tree.length - 1;
  return [{ id, title: String(title), nodes: tree, leaf: last }];
}

/** `{ id, title, nodes, leaf }`, the one that was changed last first. */
export function list() {
  try {
    const all = JSON.parse(localStorage.getItem(KEY) ?? "[]", numbers);
    return Array.isArray(all) ? all.flatMap((kept) => (kept ? current(kept) : [])) : [];
  } catch {
    return []; // no storage, or not ours
  }
}

/** Writes the conversations, and returns those that are kept. */
function write(all) {
  // without the oldest if there is no room for all; receipts are the largest part
  for (let keep = Math.min(all.length, MAX); keep > 0; keep = Math.floor(keep / 2)) {
    try {
      const kept = all.slice(0, keep);
      localStorage.setItem(KEY, JSON.stringify(kept, digits));
      return kept;
    } catch {
      // tried again with fewer
    }
  }
  return list();
}

/** Keeps a conversation, and returns the list. */
export function put(conversation) {
  return write([conversation, ...list().filter(({ id }) => id !== conversation.id)]);
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
